"""`python -m tests.tools.no_network MODULE …`: a module's `main` in a process without IP sockets.

The kernel kills the process at the first `socket(AF_INET…)` or `socket(AF_INET6…)` of any of its
threads or children, whoever asks for it: Python, a library in C++, the resolver of host names. So
a server that answers behind this wall has not as much as tried to call anybody. Sockets that were
inherited can be used. Linux on x86-64 and AArch64; needs no rights and no tools.
"""

from __future__ import annotations

import ctypes
import platform
import runpy
import socket
import struct
import sys

PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
ALLOW, KILL_PROCESS = 0x7FFF0000, 0x80000000
LOAD_WORD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16
MACHINES = {"x86_64": (0xC000003E, 41), "aarch64": (0xC00000B7, 198)}
"""How audit names the machine, and its number of `socket`."""


def cannot_wall() -> str:
    """Why there can be no wall here; nothing if there can."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return f"no wall for {sys.platform} on {platform.machine()}"
    try:
        with open("/proc/sys/kernel/seccomp/actions_avail") as file:  # noqa: PTH123
            return "" if "kill_process" in file.read() else "this kernel kills no processes"
    except OSError:
        return "this kernel has no seccomp filters"


def wall() -> None:
    """From now on, for this process and all it starts."""
    audit, number = MACHINES[platform.machine()]
    program = [
        (LOAD_WORD, 0, 0, ARCHITECTURE_AT),
        (JUMP_IF_EQUAL, 0, 5, audit),
        (LOAD_WORD, 0, 0, NUMBER_AT),
        (JUMP_IF_EQUAL, 0, 4, number),
        (LOAD_WORD, 0, 0, FIRST_ARGUMENT_AT),
        (JUMP_IF_EQUAL, 1, 0, int(socket.AF_INET)),
        (JUMP_IF_EQUAL, 0, 1, int(socket.AF_INET6)),
        (RETURN, 0, 0, KILL_PROCESS),
        (RETURN, 0, 0, ALLOW),
    ]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(header), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    wall()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
