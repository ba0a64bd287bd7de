"""Engines stepped to their end, and what they said."""

from __future__ import annotations

from collections import defaultdict

from srm.engine.config import EngineConfig
from srm.engine.messages import Output, Request, join
from srm.engine.process.engine import Engine
from srm.engine.weights.weights import Weights
from tests.kit.engines.numpy_runner import NumpyRunner
from tests.kit.models.tiny_tokenizer import tiny_folder


def run(engine: Engine, most: int = 1_000) -> list[Output]:
    """All that is said in at most so many steps."""
    outputs: list[Output] = []
    while engine.has_work and most:
        outputs += engine.step_overlapped()
        most -= 1
    return outputs


def tokens(outputs: list[Output]) -> dict[tuple[str, int], bytes]:
    """The ids of all tokens of each sample, by (request, index)."""
    entries: defaultdict[tuple[str, int], list[Output]] = defaultdict(list)
    for output in outputs:
        entries[output.id, output.index].append(output)
    return {key: join(entries[key]).token_ids for key in sorted(entries)}


def alone(request: Request, weights: Weights) -> dict[int, Output]:
    """All that is said of the prompt and of each sample by an engine that does nothing else."""
    n = request.params.n
    config = EngineConfig(
        model=tiny_folder(),
        num_slots=n,
        prefix_slots=1,
        prefix_cache=False,
        max_step_rows=64,
        max_step_tokens=128,
    )
    engine = Engine(weights.config, NumpyRunner(weights, n, config.prefix_slots), config)
    engine.add(request)
    outputs: defaultdict[int, list[Output]] = defaultdict(list)
    while engine.has_work:
        for output in engine.step():
            outputs[output.index].append(output)
    return {index: join(output) for index, output in outputs.items()}
