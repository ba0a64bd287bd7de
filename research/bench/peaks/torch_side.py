"""Runs modules that need torch in processes of their own: the engine does not import torch.

Knows whether torch and matplotlib are installed. If they are not, a record lacks their part, and
nothing else changes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec

from srm.loadtest.records import ROOT


def has_torch(device: str) -> bool:
    """Whether PyTorch is installed here, for this kind of device."""
    if importlib.util.find_spec("torch") is None:
        return False
    return device == "cpu" or "+cpu" not in importlib.metadata.version("torch")


def torch_products(
    device: str,
    dtypes: tuple[str, ...],
    rows: tuple[int, ...],
    shapes: tuple[tuple[int, int], ...],
    repetitions: int,
    threads: int = 0,
) -> list[dict[str, Any]]:
    """Return torch's matrix products, a list of {by, dtype, shape, gflops}."""
    task = {"device": device, "dtypes": dtypes, "rows": rows, "shapes": shapes}
    more = {"repetitions": repetitions, "threads": threads}
    torch: list[dict[str, Any]] = ask_torch("gemm_peak", task | more)
    return torch


def ask_torch(module: str, task: Any) -> Any:
    """Return what `python -m research.bench.model.<module> TASK` prints; both are JSON."""
    return msgspec.json.decode(run_torch(module, msgspec.json.encode(task).decode()))


def run_torch(module: str, *arguments: str) -> bytes:
    """Return the output of `python -m research.bench.model.<module> ARGUMENTS`, compiling
    without caches."""
    return subprocess.run(
        [sys.executable, "-m", f"research.bench.model.{module}", *arguments],
        cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        check=True,
        stdout=subprocess.PIPE,
    ).stdout


def plot_record(kind: str, report: Path) -> None:
    """Draw a record beside its report and embed it there, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        run_torch("plots", kind, str(report.resolve().with_suffix(".json")))
