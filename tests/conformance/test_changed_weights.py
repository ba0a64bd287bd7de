"""The MAX engine with other weights: afterwards a fresh engine, on the way the numpy engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.device.runner import ModelRunner
from engine.messages import Output, Request, SamplingParams
from engine.process.engine import Engine
from engine.steps.batch import Runner
from engine.weights.random_model import random_tensors
from engine.weights.weights import fold
from tests.conformance.test_scores import CONFIG
from tests.engines.numpy_runner import NumpyRunner

OLD, NEW = (fold(CONFIG, random_tensors(CONFIG, seed), f"random-{seed}") for seed in (0, 7))
pytestmark = pytest.mark.slow  # the numpy engine is held to the same in the ordinary suite
SETTINGS = EngineConfig(num_slots=64, max_step_rows=16, max_step_tokens=48)
rng = np.random.default_rng(1)
HEADER = rng.integers(2, 300, 40).tolist()
PROMPTS = [HEADER[:length] + rng.integers(2, 300, 3).tolist() for length in (0, 5, 20, 33, 40)]
RANDOM = SamplingParams(n=6, max_tokens=10, temperature=1.0, seed=3, ignore_eos=True)
GREEDY = SamplingParams(n=2, max_tokens=14, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def runner() -> Iterator[ModelRunner]:
    one = ModelRunner(OLD, SETTINGS)
    yield one
    one.close()


def tokens(outputs: list[list[Output]]) -> list[list[bytes]]:
    return [[output.token_ids for output in samples] for samples in outputs]


def test_afterwards_it_is_an_engine_that_never_had_others(runner: ModelRunner) -> None:
    runner.load_weights(OLD)
    engine = Engine(CONFIG, runner, SETTINGS)
    old = tokens(engine.generate(PROMPTS, RANDOM))
    engine.load_weights(NEW)
    new = tokens(engine.generate(PROMPTS, RANDOM))
    fresh = ModelRunner(NEW, SETTINGS)
    assert new == tokens(Engine(CONFIG, fresh, SETTINGS).generate(PROMPTS, RANDOM))
    fresh.close()
    assert new != old
    engine.load_weights(OLD)
    assert tokens(engine.generate(PROMPTS, RANDOM)) == old


def changed_after(runner: Runner, steps: int) -> dict[tuple[str, int], bytes]:
    """All tokens, where the weights change after so many steps and what runs goes on."""
    engine = Engine(CONFIG, runner, SETTINGS)
    for number, prompt in enumerate(PROMPTS):
        ids = np.array(prompt, "<i4").tobytes()
        engine.add(Request(id=str(number), prompt_token_ids=ids, params=GREEDY, emit="delta"))
    said: defaultdict[tuple[str, int], bytes] = defaultdict(bytes)
    for step in range(60):
        if step == steps:
            engine.load_weights(NEW)
        for output in engine.step():
            said[output.id, output.index] += output.token_ids
    assert not engine.has_work
    return said


@pytest.mark.parametrize("steps", [1, 4, 9])
def test_what_runs_goes_on_as_in_the_numpy_engine(runner: ModelRunner, steps: int) -> None:
    runner.load_weights(OLD)
    found = changed_after(runner, steps)
    assert found == changed_after(NumpyRunner(OLD, SETTINGS.num_slots), steps)
    assert all(len(one) == 4 * GREEDY.max_tokens for one in found.values())
