"""On the real runner: all is parked halfway, goes on in other slots, and says the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import pytest
from tokenizers import Tokenizer

from engine.config import DEMO_MODEL, EngineConfig, ModelConfig
from engine.device.runner import ModelRunner
from engine.messages import Request, SamplingParams
from engine.process.engine import Engine
from engine.scheduler.parking import parkable
from engine.settings import load
from engine.state.parked import Parked, merged
from engine.weights.checkpoint import load_checkpoint
from tests.engines.run_engine import run, tokens
from training.tasks import problems

HALFWAY = 6
"""Steps until most samples have said some of their tokens, but all of them none of their end."""
CONFIG_FLAGS = ["--num-slots=200", "--max-step-rows=64", "--max-step-tokens=256"]


class Served:
    """The demo model on a device."""

    def __init__(self, device: str) -> None:
        self.config = load(EngineConfig, [*CONFIG_FLAGS, f"--device={device}"])
        weights = load_checkpoint(DEMO_MODEL)
        self.model: ModelConfig = weights.config
        self.runner = ModelRunner(weights, self.config)

    def engine(self, requests: Sequence[Request] = ()) -> Engine:
        """A new one; what the pool holds is the one's before."""
        engine = Engine(self.model, self.runner, self.config)
        for request in requests:
            engine.add(request)
        return engine


@pytest.fixture(scope="module")
def served(device: str) -> Iterator[Served]:
    found = Served(device)
    yield found
    found.runner.close()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(p.prompt).ids for p in islice(problems("held-out", 17), 6)]
    params = {"n": 8, "max_tokens": 16, "temperature": 1.0, "top_p": 0.9}
    return [
        Request(
            id=str(i),
            prompt_token_ids=np.array(prompt, "<i4").tobytes(),
            params=SamplingParams(**params, seed=i, presence_penalty=i % 2),  # type: ignore[arg-type]
            emit="delta" if i % 3 else "final",
            durable=True,
        )
        for i, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def expected(served: Served, requests: list[Request]) -> dict[tuple[str, int], bytes]:
    return tokens(run(served.engine(requests)))


def test_all_are_parked_and_go_on(
    served: Served, requests: list[Request], expected: dict[tuple[str, int], bytes]
) -> None:
    engine = served.engine(requests)
    said = run(engine, HALFWAY) + engine.settle()
    slots = parkable(engine.scheduler.table)
    engine.scheduler.park(slots, served.runner.read_slots(slots))
    # So that they go on in others.
    nothing = Request(
        id="other",
        prompt_token_ids=requests[0].prompt_token_ids,
        priority=1,
        params=SamplingParams(n=160, max_tokens=2),
    )
    engine.add(nothing)
    said += run(engine)
    assert engine.scheduler.parking.num_resumed == len(slots) > 20
    assert {key: one for key, one in tokens(said).items() if key[0] != "other"} == expected


def test_another_engine_goes_on(
    served: Served, requests: list[Request], expected: dict[tuple[str, int], bytes]
) -> None:
    engine = served.engine(requests)
    run(engine, HALFWAY)
    engine.settle()
    kept: dict[str, list[Parked]] = {}
    for request, parked in engine.parked_of_all():
        kept.setdefault(request.id, []).append(parked)
    after = served.engine()
    after.progress = lambda one: merged(kept[one.id]) if one.id in kept else None
    for request in reversed(requests):
        after.add(request)
    assert tokens(run(after)) == expected
    assert after.scheduler.parking.num_resumed == sum(len(merged(one)) for one in kept.values())
