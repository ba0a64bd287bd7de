"""Requests, engines and schedulers whose settings are small enough to follow by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from prometheus_client import REGISTRY

from srm.engine.config import EngineConfig
from srm.engine.messages import Output, Request, SamplingParams, Status
from srm.engine.process.engine import Engine
from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.steps.batch import Batch, SlotStates, StepResult
from srm.engine.weights.weights import Weights
from tests.kit.engines.numpy_runner import TINY, NumpyRunner, check_batch, expanded, tiny_weights
from tests.kit.models.tiny_tokenizer import tiny_folder

OF_A_REQUEST = {
    *("priority", "precedence", "emit", "stream", "share", "weight", "durable"),
    "first_wave",
}
SMALL: dict[str, int] = {
    "num_slots": 8,
    "max_step_rows": 8,
    "max_step_tokens": 64,
    "max_waiting": 100,
    "prefix_slots": 4,
    "max_parked_bytes": 1024**3,
}
IDLE = Status("ready", 8, 0, 0, 100, 1, 0, n_ctx=64, vocab_size=32, fingerprint="")
"""What an engine with 8 slots says of itself before anybody has asked it for anything."""


def request_of(
    request_id: str = "a", prompt: Sequence[int] = (5, 6, 7), **settings: Any
) -> Request:
    """request_of("a", [5, 6], n=2, priority=1): the rest are sampling params, without an end."""
    own = {name: settings.pop(name) for name in OF_A_REQUEST & settings.keys()}
    ids = np.array(prompt, "<i4").tobytes()
    return Request(request_id, ids, SamplingParams(**{"ignore_eos": True, **settings}), **own)


def sample_value(name: str, **labels: str) -> float:
    """What a metric of this process says; 0 before it says anything."""
    return REGISTRY.get_sample_value(name, labels) or 0.0


@cache
def _tiny() -> Weights:
    return tiny_weights()


def engine_of(model: Weights | None = None, **settings: Any) -> Engine:
    """engine_of(num_slots=8, …): an engine on the numpy runner, settings as in EngineConfig."""
    weights, config = (
        model or _tiny(),
        EngineConfig(**{"model": tiny_folder(), **SMALL, **settings}),
    )
    runner = NumpyRunner(weights, config.num_slots)
    return Engine(weights.config, runner, config, weights.fingerprint)


def scheduler_of(**settings: Any) -> Scheduler:
    return Scheduler(TINY, EngineConfig(**{**SMALL, **settings}))


def scheduled(scheduler: Scheduler) -> Batch:
    """The next step's batch, which there must be, checked."""
    batch = scheduler.schedule()
    assert batch is not None
    check_batch(batch, TINY, scheduler.table.num_slots + scheduler.prefixes.num_slots)
    return batch


def complete(scheduler: Scheduler, batch: Batch, tokens: Sequence[int] | int = 9) -> list[Output]:
    """Have the batch's rows sample these tokens."""
    ids = np.broadcast_to(np.array(tokens, np.int32), batch.num_decode)
    return scheduler.complete(batch, StepResult(ids, np.full(len(ids), -0.5, np.float32)))


def step(scheduler: Scheduler, tokens: Sequence[int] | int = 9) -> list[Output]:
    return complete(scheduler, scheduled(scheduler), tokens)


def steps(scheduler: Scheduler, most: int = 1_000) -> list[Output]:
    """All that is said in at most so many steps."""
    outputs: list[Output] = []
    while most and (batch := scheduler.schedule()) is not None:
        check_batch(batch, TINY, scheduler.table.num_slots + scheduler.prefixes.num_slots)
        outputs += complete(scheduler, batch)
        most -= 1
    return outputs


def park_preempted(scheduler: Scheduler) -> int:
    """Park whoever is to give a slot up; how many these are."""
    slots = scheduler.choose_preempted()
    states = SlotStates(np.zeros((len(slots), 1), np.float32), np.zeros(len(slots), np.int32))
    scheduler.park(slots, states)
    return len(slots)


def rows(batch: Batch) -> list[list[int]]:
    """Tokens that each row feeds."""
    of, _ = expanded(batch)
    return [of.token_ids[a:b].tolist() for a, b in pairwise(of.row_offsets.tolist())]


def ints(data: bytes) -> list[int]:
    results: list[int] = np.frombuffer(data, "<i4").tolist()
    return results


def floats(data: bytes) -> list[float]:
    results: list[float] = np.frombuffer(data, "<f4").tolist()
    return results
