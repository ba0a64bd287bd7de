"""How long a start takes, from the command to the first sampled token, cold and warm.

`python -m engine.bench.startup` takes the settings of an engine, starts it, samples one token and
says so. Cold is a start whose caches, ours and MAX's, are empty; warm is one after it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.checkpoint import load_checkpoint
from engine.config import Dtype, EngineConfig, load
from engine.engine import Engine
from engine.libc import keep_freed_memory
from engine.messages import SamplingParams
from engine.records import ROOT
from engine.runner import ModelRunner


def measure_startup(model: Path, dtype: Dtype, repetitions: int) -> dict[str, Any]:
    """Seconds of one cold start and of several warm ones."""
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"--model={model.resolve()}", f"--dtype={dtype}", f"--cache-dir={folder}"]
        seconds = [_seconds_to_first_token(settings, folder) for _ in range(1 + repetitions)]
    return {"cold_s": seconds[0], "warm_s": seconds[1:]}


def _seconds_to_first_token(settings: list[str], folder: str) -> float:
    started = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-m", "engine.bench.startup", *settings],
        cwd=ROOT,
        env=os.environ | {"MODULAR_CACHE_DIR": f"{folder}/modular"},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        elapsed = time.perf_counter() - started
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, process.args)
    return elapsed


def main(argv: list[str]) -> int:
    """Start an engine, sample one token, write a line."""
    keep_freed_memory()
    config = load(EngineConfig, argv, prog="python -m engine.bench.startup")
    weights = load_checkpoint(config.model)
    engine = Engine(weights.config, ModelRunner(weights, config), config)
    engine.generate([[0]], SamplingParams(max_tokens=1))
    sys.stdout.write("sampled\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
