"""Instruction-set levels of x86-64: what graphs for processors are compiled for, and named by.

A graph compiled for a level runs on every processor that has it, so graphs can be shipped. The
levels are those of the x86-64 psABI, https://gitlab.com/x86-psABIs/x86-64-ABI, and one above them
whose processors multiply bfloat16 themselves.
"""

from __future__ import annotations

import logging
import platform
from functools import cache
from pathlib import Path

from max import driver

log = logging.getLogger(__name__)

_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe xsave".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())
LEVELS = {"cooperlake": _V4 | {"avx512_bf16", "avx512_vnni"}, "x86-64-v4": _V4, "x86-64-v3": _V3}
"""Flags in /proc/cpuinfo that a processor of each level has, by LLVM's name of the level, highest
first."""


def compile_for_level() -> None:
    """Have MAX compile for this processor's level from now on; as it does by itself where the
    processor has none, or where another target was chosen before."""
    if not driver.get_virtual_cpu_target() and (target := level()):
        driver.set_virtual_cpu_target(target)


def level() -> str:
    """Return the highest level of this machine's processor; empty if it has none of them."""
    flags = {flag for line in _facts() if line.startswith("flags") for flag in line.split()}
    return next((name for name, needed in LEVELS.items() if needed <= flags), "")


def warn_of_emulation(device: str, dtype: str) -> None:
    """Say so where products in bfloat16 are asked of a processor that has no instructions for
    them: each is widened to float32 first."""
    if (device, dtype) == ("cpu", "bfloat16") and level() != next(iter(LEVELS)):
        log.warning(
            "dtype = bfloat16: this processor has no instructions for it, so steps take 5 to 6 "
            "times as long as in float32"
        )


def target() -> str:
    """Return what MAX compiles for: a level, or else model and flags of this very processor."""
    return driver.get_virtual_cpu_target() or "".join(_facts()) or platform.processor()


@cache
def _facts() -> list[str]:
    """The distinct lines of /proc/cpuinfo that say what a processor is; none where it is missing"""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
