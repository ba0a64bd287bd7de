"""Processor time and memory that the processes of a server have used. Reads Linux's /proc.

Knows nothing of what they are but how they were started.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from engine.errors import ConfigError

_TICKS_S = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> dict[str, float]:
    """Return the processor seconds so far of this process and its descendants, summed by module.

    The key is the module of `python -m MODULE`, else the program. Raises ConfigError if there is no
    such process.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    for process, words in _tree(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            seconds[_module(words)] += _seconds(process)
    return dict(seconds)


def seconds_and_peaks(pid: int) -> dict[str, tuple[float, int]]:
    """Return processor seconds and peak memory in bytes, of a supervisor and each descendant.

    Keys are module and command, such as `server jobs`; of several with one name the last counts.
    """
    found = {}
    for process, words in _tree(pid):
        with suppress(FileNotFoundError, ProcessLookupError):
            is_first = process.name == str(pid)
            name = "supervisor" if is_first else " ".join([_module(words), *_command(words)])
            found[name] = _seconds(process), _peak(process)
    return found


def _tree(pid: int) -> Iterator[tuple[Path, list[str]]]:
    """Yield every process of a tree, with its command line."""
    found = [pid]
    while found:
        process = Path(f"/proc/{(one := found.pop())}")
        try:
            yield process, (process / "cmdline").read_text(errors="replace").split("\0")
            for thread in (process / "task").iterdir():
                found += map(int, (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            if one == pid:
                raise ConfigError(f"there is no process {pid}") from None
            # else it has just ended


def _module(words: list[str]) -> str:
    return words[words.index("-m") + 1] if "-m" in words[:-1] else Path(words[0]).name


def _command(words: list[str]) -> list[str]:
    """Return the word after the module, if it is a command."""
    rest = words[words.index("-m") + 2 :] if "-m" in words else []
    return [word for word in rest[:1] if word.isalpha()]


def _peak(process: Path) -> int:
    lines = (process / "status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def _seconds(process: Path) -> float:
    fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S
