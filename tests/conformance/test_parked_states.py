"""On the real runner: all is parked halfway, goes on in other slots, and says the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from srm.engine.config import EngineConfig
from srm.engine.messages import Request
from srm.engine.process.engine import Engine
from srm.engine.scheduler.parking import parkable
from srm.engine.state.parked import Parked, merged
from tests.kit.engines.making import request_of
from tests.kit.models.demo import afresh, engine_on_max, prompts
from tests.kit.processes.run_engine import run, tokens

HALFWAY = 6
"""Steps until most samples have said some of their tokens, but all of them none of their end."""
SIZES: dict[str, Any] = {"num_slots": 200, "max_step_rows": 64, "max_step_tokens": 256}
Outputs = dict[tuple[str, int], bytes]


@pytest.fixture(scope="module")
def first(device: str) -> Iterator[Engine]:
    """Of the device; tests make others on its runner."""
    with engine_on_max(**SIZES, device=device) as engine:
        yield engine


def serving(first: Engine, requests: Sequence[Request] = ()) -> Engine:
    engine = afresh(first, EngineConfig(**SIZES))
    for request in requests:
        engine.add(request)
    return engine


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    sampling = {"n": 8, "max_tokens": 16, "temperature": 1.0, "top_p": 0.9, "ignore_eos": False}
    return [
        request_of(
            str(i),
            prompt,
            seed=i,
            presence_penalty=i % 2,
            emit="delta" if i % 3 else "final",
            durable=True,
            **sampling,
        )
        for i, prompt in enumerate(prompts(6, seed=17))
    ]


@pytest.fixture(scope="module")
def expected(first: Engine, requests: list[Request]) -> Outputs:
    return tokens(run(serving(first, requests)))


def test_all_are_parked_and_go_on(
    first: Engine, requests: list[Request], expected: Outputs
) -> None:
    engine = serving(first, requests)
    message = run(engine, HALFWAY) + engine.settle()
    slots = parkable(engine.scheduler.table)
    engine.scheduler.park(slots, engine.runner.read_slots(slots))
    # So that they go on in other slots.
    engine.add(request_of("other", prompts(1, seed=17)[0], priority=1, n=160, max_tokens=2))
    message += run(engine)
    assert engine.scheduler.parking.num_resumed == len(slots) > 20
    assert {key: token for key, token in tokens(message).items() if key[0] != "other"} == expected


def test_another_engine_goes_on(first: Engine, requests: list[Request], expected: Outputs) -> None:
    engine = serving(first, requests)
    run(engine, HALFWAY)
    engine.settle()
    entries: dict[str, list[Parked]] = {}
    for request, parked in engine.parked_of_all():
        entries.setdefault(request.id, []).append(parked)
    after = serving(first)
    after.progress = lambda one: merged(entries[one.id]) if one.id in entries else None
    for request in reversed(requests):
        after.add(request)
    assert tokens(run(after)) == expected
    assert after.scheduler.parking.num_resumed == sum(
        len(merged(entry)) for entry in entries.values()
    )
