"""`python -m bench.host.burst`: one burst of requests through the engine in process, as JSON.

The baseline of `srm bench http`, which sends the same burst through HTTP.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from engine.config import DEMO_MODEL, EngineConfig
from engine.device.runner import ModelRunner
from engine.messages import SamplingParams
from engine.process.engine import Engine
from engine.settings import load
from engine.weights.checkpoint import load_checkpoint


class LoadConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A burst: `requests` prompts of one token, `n` samples each, all of `max_tokens` tokens."""

    model: Path = DEMO_MODEL
    requests: int = 20
    n: int = 200
    max_tokens: int = 64
    repetitions: int = 3


def measure(config: LoadConfig) -> list[float]:
    """Measure tokens a second in each repetition, after one small burst to warm up."""
    weights, engine_config = load_checkpoint(config.model), EngineConfig()
    engine = Engine(weights.config, ModelRunner(weights, engine_config), engine_config)
    prompts = [[2 + i] for i in range(config.requests)]
    params = SamplingParams(n=config.n, max_tokens=config.max_tokens, ignore_eos=True)
    engine.generate(prompts, msgspec.structs.replace(params, max_tokens=2))
    rates = []
    for repetition in range(config.repetitions):
        started = time.perf_counter()
        outputs = engine.generate(prompts, msgspec.structs.replace(params, seed=repetition))
        seconds = time.perf_counter() - started
        tokens = sum(len(o.token_ids) // 4 for samples in outputs for o in samples)
        rates.append(tokens / seconds)
    return rates


if __name__ == "__main__":
    burst = load(LoadConfig, sys.argv[1:], prog="python -m bench.host.burst")
    sys.stdout.write(msgspec.json.encode(measure(burst)).decode())
