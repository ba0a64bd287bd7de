"""An engine can start on a GPU: weights are bound as MAX declares them. Shown without a GPU."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import msgspec

from engine.config import Mixer
from tests.kernels.gpu_weights import Report


def test_weights_are_bound_as_a_gpu_graph_declares_them() -> None:
    command = [sys.executable, "-m", "tests.kernels.gpu_weights"]
    done = subprocess.run(command, check=True, capture_output=True)
    report = msgspec.json.decode(done.stdout, type=Report)
    mixers = {graph.split()[1] for graph in report.compared}
    assert mixers == set(get_args(Mixer)) and len(report.compared) >= 4 * len(mixers)
    assert not report.wrong
