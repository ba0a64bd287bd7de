"""Samples where a process spends its time, by py-spy, and sorts the samples by what was done."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from srm.errors import ConfigError

_RATE = 500
"""Samples a second."""
_CALLS = re.compile(
    r"^_*(?:libc_)?(write|writev|send|sendmsg|sendto|recv|recvmsg|recvfrom|read|epoll_\w+)\b"
)
"""Native functions that enter the kernel."""
_FOLDERS = {
    "engine/client/": "engine message",
    "server/text/": "decoding",
    "server/generation/": "rendering",
    "server/reply/": "rendering",
    "server/schema/": "rendering",
    "server/routes/": "requests",
    "server/http/": "requests",
}
PARTS = ("system call", "engine message", "decoding", "rendering", "requests", "loop")
"""Activities that a sample may belong to, decided by its innermost frame from a known folder;
without one it is `loop`."""


@contextmanager
def sampled(pid: int, file: Path, form: str) -> Iterator[None]:
    """Sample a process while the `with` block runs: py-spy's `raw` stacks, or a `flamegraph`.

    Raises ConfigError where py-spy is not installed or may not look into the process.
    """
    command = Path(sys.executable).parent / "py-spy"
    if not command.exists():
        raise ConfigError("profile and flame need py-spy beside Python: pip install py-spy")
    options = ["--full-filenames", "--native", f"--rate={_RATE}", f"--format={form}"]
    with subprocess.Popen(
        [command, "record", f"--pid={pid}", *options, f"--output={file}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)  # it writes what it has
            _, output = process.communicate()
    if not file.exists():
        raise ConfigError(f"py-spy did not sample process {pid}: {output.strip()[-300:]}")


def divided(stacks: str) -> dict[str, int]:
    """Return how many samples of raw stacks are of each part."""
    counts = dict.fromkeys(PARTS, 0)
    for line in stacks.splitlines():
        stack, _, count = line.rpartition(" ")
        counts[part_of(stack.split(";"))] += int(count)
    return counts


def part_of(frames: list[str]) -> str:
    """Return what a stack's frames, the outermost first, are of."""
    if _CALLS.match(frames[-1]) and ".py:" not in frames[-1]:
        return PARTS[0]
    for frame in reversed(frames):
        for folder, part in _FOLDERS.items():
            if f"({folder}" in frame or f"/{folder}" in frame:
                return part
    return PARTS[-1]
