"""Runs modules that need torch in processes of their own: the engine does not import torch.

Knows whether torch and matplotlib are installed. If they are not, a record lacks their part, and
nothing else changes.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from engine.records import ROOT


def has_torch() -> bool:
    """Whether PyTorch is installed here."""
    return importlib.util.find_spec("torch") is not None


def ask_torch(module: str, *arguments: str) -> bytes:
    """Return the output of `python -m bench.model.<module> ARGUMENTS`, compiling without caches."""
    return subprocess.run(
        [sys.executable, "-m", f"bench.model.{module}", *arguments],
        cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        check=True,
        stdout=subprocess.PIPE,
    ).stdout


def plot_record(kind: str, report: Path) -> None:
    """Draw a record beside its report and embed it there, if matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is not None:
        ask_torch("plot_records", kind, str(report.resolve().with_suffix(".json")))
