"""A process of its own for what others wrote and nobody can stop from outside: templates, grammars.

It gets little memory, no environment and no
secrets, and is ended when it takes too long; the next question starts another. Messages are JSON
behind their length, and each is answered. It leaves with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import msgspec

import srm

MAX_MEMORY = 1024**3
"""Most address space of a process, in bytes."""
CPU_S = 1
"""Seconds of processor time that a constraint may take."""
_MAX_MESSAGE = 256 * 1024 * 1024
"""Most bytes of a message: a chat of the most characters, every one of them escaped, and more."""
START_S = 600.0
"""Seconds a process may take to start, on a machine that is busy."""
_PR_SET_PDEATHSIG = 1
_ROOT = Path(srm.__file__).resolve().parents[1]
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ")
"""The environment variables that the process gets; others may hold API keys."""


class ProcessFailed(Exception):
    """The question has no answer, and why."""


class Died(ProcessFailed):
    """The process ended, or took too long. The next question may be answered."""

    def __init__(self, why: str, by_signal: int, is_late: bool = False) -> None:
        super().__init__(why)
        self.is_late = is_late
        """Whether it took too long."""
        self.is_over_limit = by_signal in (signal.SIGXCPU, signal.SIGABRT, signal.SIGSEGV)
        """Whether the question was too much for it, and will always be."""


class Answer(msgspec.Struct):
    """What the process made of a message, or why it is nothing."""

    text: str = ""
    data: bytes = b""
    error: str | None = None


def send(stream: IO[bytes], message: object) -> None:
    body = msgspec.json.encode(message)
    stream.write(len(body).to_bytes(8, "little") + body)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """The next message as JSON; None if the other side is gone, or says what is none."""
    size = stream.read(8)
    if len(size) < 8:
        return None
    if (length := int.from_bytes(size, "little")) > _MAX_MESSAGE:
        return None
    body = stream.read(length)
    return body if len(body) == length else None


def limit_this_process(parent: int) -> bool:
    """End with the parent and take no more than MAX_MEMORY; false if the parent is gone already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return os.getppid() == parent


def limit_processor_time() -> None:
    """Have this process killed when it has used CPU_S more seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    until = int(used.ru_utime + used.ru_stime) + 1 + CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


def take_idle_processors(thread: int = 0) -> None:
    """Have a thread, by default this one, and those that it begins take a processor only where no
    other thread wants it, if the system can. At nice 19 a second of it took the engine 0.7 s."""
    with contextlib.suppress(OSError):  # a system that groups threads by session
        Path(f"/proc/{thread or 'self'}/autogroup").write_text("19")
    try:
        os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # a sandbox
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, 19)


class LimitedProcess:
    """Runs a module that answers messages. One thread at a time may ask."""

    def __init__(self, module: str, first: object, is_restart_idle: bool = False) -> None:
        """`first` is the message that each new process gets before any other. With
        `is_restart_idle` one that takes another's place starts as `take_idle_processors` says: what
        ended the first may end many."""
        self._module = module
        self._is_restart_idle, self._has_begun = is_restart_idle, False
        self._first = first
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def ask(self, message: object, within_s: float) -> Answer:
        """Return the answer; kill the process after `within_s` seconds. Raises ProcessFailed."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self.start()
        return self._ask(process, message, within_s)

    def start(self) -> subprocess.Popen[bytes]:
        """Start anew. Raises ProcessFailed with what is wrong with the first message."""
        self._kill()
        self._process = process = subprocess.Popen(
            # -P: a folder named as ours where we are started is not ours
            [sys.executable, "-P", "-m", self._module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for us
            env={
                "OPENBLAS_NUM_THREADS": "1",  # which each take 40 MiB of MAX_MEMORY
                "PYTHONPATH": os.pathsep.join((str(_ROOT), *filter(None, sys.path))),
                **{name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            },
        )
        if self._is_closed:  # by a thread that may not have seen this process
            self._kill()
            raise Died("it is closed", 0)
        if self._is_restart_idle and self._has_begun:
            take_idle_processors(process.pid)
        self._has_begun = True
        self._ask(process, self._first, START_S)
        return process

    def _ask(self, process: subprocess.Popen[bytes], message: object, within_s: float) -> Answer:
        assert process.stdin is not None and process.stdout is not None
        took_too_long = threading.Event()

        def stop() -> None:
            took_too_long.set()
            process.kill()

        timer = threading.Timer(within_s, stop)
        timer.start()
        try:
            send(process.stdin, message)
            reply = receive(process.stdout)
        except (BrokenPipeError, ValueError):  # ended, or closed by another thread
            reply = None
        finally:
            timer.cancel()
        if reply is None:
            self._kill()
            process.wait()  # where another thread closes it
            is_late = took_too_long.is_set()
            why = f"it takes longer than {within_s:g} s" if is_late else "it failed"
            raise Died(why, -process.returncode, is_late)
        answer = msgspec.json.decode(reply, type=Answer)
        if answer.error is not None:
            raise ProcessFailed(answer.error)
        return answer

    def close(self) -> None:
        """End the process, whatever it does; none is started any more. For any thread."""
        self._is_closed = True
        self._kill()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # what it never read
                    stream.close()
