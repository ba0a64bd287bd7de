"""An engine can start on a GPU: weights are bound as MAX declares them. Shown without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import get_args

from engine.config import Mixer


def test_weights_are_bound_as_a_gpu_graph_declares_them() -> None:
    command = [sys.executable, "-m", "tests.kernels.gpu_weights"]
    done = subprocess.run(command, check=True, capture_output=True)
    report = json.loads(done.stdout)
    mixers = {graph.split()[1] for graph in report["compared"]}
    assert mixers == set(get_args(Mixer)) and len(report["compared"]) >= 3 * len(mixers)
    assert not report["wrong"]
