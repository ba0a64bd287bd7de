"""Tokens that the MAX engine samples under biases, penalties and bans, and what it says of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
from max.driver import accelerator_count

from srm.engine.config import DEMO_MODEL, EngineConfig
from srm.engine.messages import Output, Request
from srm.engine.process.engine import Engine
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.weights import Weights
from tests.kit.bodies.edited import edited
from tests.kit.engines.making import floats, ints, request_of
from tests.kit.engines.numpy_runner import F64, SMALL, feed, in_float64, tiny_weights
from tests.kit.models.demo import afresh, engine_on_max

EOS = SMALL.end_id
CASES = ["float32", "bfloat16", pytest.param("gpu", marks=pytest.mark.gpu)]
"""A random model in float32; the demo model in bfloat16, on a CPU and on a GPU."""
TOLERANCE = {"float32": 2e-4, "bfloat16": 0.25, "gpu": 0.35}
"""Of log-probabilities. Weights and activations of 8 bits, on a GPU logits too."""

WANTED: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 2.0},
    {"frequency_penalty": -1.5},
    {"frequency_penalty": 1.0, "presence_penalty": -0.5, "repetition_penalty": 1.3},
    {"repetition_penalty": 0.5},
    {"logit_bias": {token: 4.0 for token in range(0, 97, 7)} | {96: 6.0}},
    {"allowed_token_ids": (1, 2, 5, 96), "min_tokens": 4, "frequency_penalty": 0.2},
    {"allowed_token_ids": (6, 7, 8, 9), "bad_words": ((8, 8), (7, 9, 7), (9, 9, 9, 9))},
    {"logit_bias": {EOS: 100.0, 4: 98.0}, "min_tokens": 5},
    {
        "logit_bias": {token: 5.0 for token in range(20)},
        "bad_words": ((3,), (4, 5), (6, 6), (0, 1, 2), (1, 1, 1)),
        "repetition_penalty": 1.1,
        "presence_penalty": 0.3,
        "min_tokens": 7,
    },
]
PROMPTS = [[7, 8, 9, 7], [5], list(range(60, 90)), [96] * 10]


@dataclass(frozen=True)
class Case:
    """A model that runs."""

    weights: Weights
    engine: Engine
    prompts: list[list[int]]
    tolerance: float

    def exact(self, prompt: list[int], tokens: list[int]) -> list[F64]:
        """The model's own logits that each of the tokens was sampled from."""
        state, rows = np.zeros(self.weights.config.state_width), []
        for position, token in enumerate([*prompt, *tokens[:-1]]):
            logits, state = feed(self.weights, token, position, state)
            rows.append(logits)
        return rows[len(prompt) - 1 :]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    if request.param == "gpu" and accelerator_count() == 0:
        pytest.skip("no device")
    device = "gpu" if request.param == "gpu" else "cpu"
    dtype = "float32" if request.param == "float32" else "bfloat16"
    weights = tiny_weights(3, SMALL) if dtype == "float32" else load_checkpoint(DEMO_MODEL)
    prompts = PROMPTS if dtype == "float32" else PROMPTS[:1]  # the larger model takes its time
    with engine_on_max(weights, device=device, dtype=dtype, num_slots=32) as engine:
        yield Case(in_float64(weights), engine, prompts, TOLERANCE[request.param])


def requests(case: Case, n: int) -> list[Request]:
    """Every wish with every prompt, greedy and drawn."""
    sampling = {"n": n, "max_tokens": 12, "logprobs": 3, "emit": "delta", "ignore_eos": False}
    return [
        request_of(
            f"{number} {place} {temperature}",
            prompt,
            temperature=temperature,
            seed=number,
            **sampling,
            **wanted,
        )
        for number, wanted in enumerate(WANTED)
        for place, prompt in enumerate(case.prompts)
        for temperature in (0.0, 0.8)
    ]


Outputs = dict[tuple[str, int], list[Output]]


def sampled(case: Case, n: int, rows: int = 16, overlaps: bool = True) -> Outputs:
    """All that is said of each sample of all requests, by id and index; not what was kept."""
    config = EngineConfig(num_slots=32, max_step_rows=rows, max_step_tokens=rows + 13)
    engine = afresh(case.engine, config)
    for request in requests(case, n):
        engine.add(request)
    entries: Outputs = {}
    while engine.has_work:
        for output in engine.step_overlapped() if overlaps else engine.step():
            one = msgspec.structs.replace(output, cached_tokens=0)
            entries.setdefault((output.id, output.index), []).append(one)
    return entries


@pytest.fixture(scope="module")
def of_one_sample(case: Case) -> Outputs:
    return sampled(case, n=1)


def test_tokens_are_drawn_and_scored_as_in_float64(case: Case, of_one_sample: Outputs) -> None:
    result, tolerance = of_one_sample, case.tolerance
    assert len(result) == len(requests(case, 1)) > 0
    for request in requests(case, 1):
        params, prompt = request.params, ints(request.prompt_token_ids)
        outputs = result[request.id, 0]
        assert outputs[-1].finish_reason in {"stop", "length"}
        (*tokens,) = (token for output in outputs for token in ints(output.token_ids))
        for at, (logits, output) in enumerate(
            zip(case.exact(prompt, tokens), outputs, strict=True)
        ):
            z = edited(logits, params, EOS, prompt, tokens[:at]) / (params.temperature or 1)
            logprobs = z - np.logaddexp.reduce(z)
            assert abs(logprobs[tokens[at]] - floats(output.logprobs)[0]) < tolerance
            if params.temperature == 0:
                assert logprobs[tokens[at]] > logprobs.max() - tolerance
            expected, given = logprobs[ints(output.top_ids)], np.array(floats(output.top_logprobs))
            is_possible = np.isfinite(expected)
            assert (np.isfinite(given) == is_possible).all()
            assert (np.abs(given - expected)[is_possible] < 2 * tolerance).all()


def test_they_are_the_same_in_any_batch_and_overlapped_or_not(
    case: Case, of_one_sample: Outputs
) -> None:
    """The first of two samples among them is the only one of one."""
    expected = sampled(case, n=2)
    assert {key: expected[key] for key in of_one_sample} == of_one_sample
    for rows, overlaps in ((1, True), (5, False), (32, True)):
        assert sampled(case, n=2, rows=rows, overlaps=overlaps) == expected
