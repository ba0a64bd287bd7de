"""The bundled model on MAX, and what tests ask it. Needs no torch, which a GPU machine may lack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import msgspec
from tokenizers import Tokenizer

from srm.engine.config import DEMO_MODEL, EngineConfig
from srm.engine.device.runner import make_runner
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.weights import Weights
from srm.settings import load
from srm.training.problems.drawn import problems

TOKENIZER = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
START_S = 300
"""How long a slow machine may take to compile the step graph."""


@contextmanager
def engine_on_max(weights: Weights | None = None, /, **settings: Any) -> Iterator[Engine]:
    """engine_on_max(num_slots=64, …): settings as in EngineConfig; weights, if not the bundled."""
    weights = weights or load_checkpoint(DEMO_MODEL)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    config = load(EngineConfig, flags, {})
    runner = make_runner(weights, config)
    yield Engine(weights.config, runner, config)
    runner.close()


def afresh(engine: Engine, config: EngineConfig | None = None, /, **settings: Any) -> Engine:
    """Another engine on the same runner, which does not know what the pool holds."""
    config = msgspec.structs.replace(config or EngineConfig(), **settings)
    return Engine(engine.model, engine.runner, config)


def prompts(count: int, seed: int, solved: bool = False) -> list[list[int]]:
    """Token ids of held-out problems, with their solutions if they are wanted."""
    drawn = islice(problems("held-out", seed), count)
    texts = (f"{token.prompt} {token.solution}" if solved else token.prompt for token in drawn)
    return [TOKENIZER.encode(text).ids for text in texts]
