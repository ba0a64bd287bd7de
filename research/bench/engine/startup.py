"""Start-up time, from the command to the first sampled token, cold and warm.

`python -m research.bench.engine.startup` takes the settings of an engine, starts it, samples one
token and reports it. A cold start has empty caches, ours and MAX's; a warm one comes after it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research.bench.engine.models import BenchConfig
from srm.engine.config import Dtype, EngineConfig
from srm.engine.device.libc import keep_freed_memory
from srm.engine.device.runner import ModelRunner
from srm.engine.messages import SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint
from srm.loadtest.records import ROOT
from srm.settings import load


def measure_startup(
    model: Path, dtype: Dtype, config: BenchConfig, *, cold: bool
) -> dict[str, Any]:
    """Measure one cold start, if wanted, and several warm ones, in seconds.

    Without a cold start the step graph is taken from `config.cache_dir`.
    """
    settings = [f"--model={model.resolve()}", f"--dtype={dtype}", f"--device={config.device}"]
    with tempfile.TemporaryDirectory() as empty:
        cache = empty if cold else config.cache_dir.expanduser()
        environ = {"MODULAR_CACHE_DIR": f"{empty}/modular"} if cold else {}
        graphs = [f"--cache-dir={cache}", f"--graphs-dir={cache}"]  # none that a release has
        command = [sys.executable, "-m", "research.bench.engine.startup", *settings, *graphs]
        seconds = [
            _seconds_to_first_token(command, os.environ | environ)
            for _ in range(cold + config.repetitions)
        ]
    return {"cold_s": seconds[0], "warm_s": seconds[1:]} if cold else {"warm_s": seconds}


def _seconds_to_first_token(command: list[str], environ: Mapping[str, str]) -> float:
    started = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        elapsed = time.perf_counter() - started
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return elapsed


def main(argv: list[str]) -> int:
    """Start an engine, sample one token, write a line."""
    keep_freed_memory()
    config = load(EngineConfig, argv, prog="python -m research.bench.engine.startup")
    weights = load_checkpoint(config.model)
    engine = Engine(weights.config, ModelRunner(weights, config), config)
    engine.generate([[0]], SamplingParams(max_tokens=1))
    sys.stdout.write("sampled\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
