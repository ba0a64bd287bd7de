"""Graphs that are kept compiled in deploy/gpu/kept are those that this code would compile."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from srm.engine.device.graph_notes import unpack
from tests.kit.serving import ROOT

KEPT = ROOT / "deploy" / "gpu" / "kept"
STALE = (
    "deploy/gpu/kept lacks what was printed, of these kernels: run `python -m deploy.gpu.graphs "
    "--output build/graphs`, delete what is there and run `python -m srm.engine.device.graph_notes "
    "keep build/graphs deploy/gpu/kept`"
)


def test_kept_graphs_are_what_this_code_would_compile(tmp_path: Path) -> None:
    unpack(KEPT, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.kit.ptx.kept_graphs", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, ""), f"{STALE}\n{done.stderr}"
