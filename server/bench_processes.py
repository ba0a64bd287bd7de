"""How much processor time the processes of a server have taken. Reads Linux's /proc.

Knows nothing of what they are but how they were started.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from engine.errors import ConfigError

_TICKS_S = os.sysconf("SC_CLK_TCK")


def processor_seconds(pid: int) -> dict[str, float]:
    """So far, of this process and all that it started, summed by what they run.

    That is the module of `python -m MODULE`, else the program. Raises ConfigError if there is no
    such process.
    """
    seconds: defaultdict[str, float] = defaultdict(float)
    found = [pid]
    while found:
        process = Path(f"/proc/{(one := found.pop())}")
        try:
            seconds[_name(process)] += _seconds(process)
            for thread in (process / "task").iterdir():
                found += map(int, (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            if one == pid:
                raise ConfigError(f"there is no process {pid}") from None
            # else it has just ended
    return dict(seconds)


def _name(process: Path) -> str:
    words = (process / "cmdline").read_text(errors="replace").split("\0")
    return words[words.index("-m") + 1] if "-m" in words[:-1] else Path(words[0]).name


def _seconds(process: Path) -> float:
    fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_S
