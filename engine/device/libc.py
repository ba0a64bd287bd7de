"""Settings of the C library, where it is glibc, and of MAX's threads that make steps on a CPU
faster."""

from __future__ import annotations

import ctypes
import os
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
PR_SET_TIMERSLACK = 29
TIMER_SLACK_NS = 10_000_000
BUSY_WAIT = ("MODULAR_THREAD_BUSY_WAIT_US", "MODULAR_RUNTIME_THREAD_BUSY_WAIT_TIME_US")
"""Two of MAX's libraries read one each; it aborts the process if they differ."""
BUSY_WAIT_US = 20


def keep_freed_memory() -> None:
    """Let the process keep up to 2 GiB that it frees, and take large arrays from there.

    A step's activations and logits are freed at its end. By default they go back to the system, and
    the next step pays for each of their pages anew: a tenth of its time on a CPU, and at many
    thousand rows half of what the host does itself.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**30)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Give all that the process has freed back to the system, until it takes it anew.

    Arrays of ever other sizes leave gaps between those that live, which only grow.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def let_timers_be_late() -> None:
    """Let timed waits of this thread, and of those it starts from now on, be 10 ms late.

    MAX starts one at the first step that wakes every 0.15 ms for nothing, and takes a core from the
    step each time: a third of a step's time at batch 1, a twentieth at 2,048.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK_NS))


def wait_busily_for_less() -> None:
    """Let MAX's threads look for work for 20 µs before they sleep, not for 200.

    To be called before MAX opens a device in this process. What they look for comes within a few
    microseconds or after the step; meanwhile they would take the core from the API process, or from
    the other thread's share of the step. Whoever sets a variable keeps it.
    """
    wanted = next(filter(None, map(os.environ.get, BUSY_WAIT)), str(BUSY_WAIT_US))
    os.environ |= dict.fromkeys(BUSY_WAIT, wanted)
