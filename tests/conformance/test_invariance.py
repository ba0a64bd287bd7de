"""A token depends on weights, prompt, parameters, seed, index and position alone.

Not on how many sequences share its step, how its prompt was cut, which slot it has, or when and in
which process the engine was started. On a GPU too, where the products are MAX's.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from srm.engine.messages import SamplingParams
from tests.kit.models.demo import engine_on_max, prompts

SETTINGS = [
    {"max_step_rows": 1, "max_step_tokens": 2},  # every prompt token in a step of its own
    {"max_step_rows": 7, "max_step_tokens": 20},
    {"max_step_rows": 200, "max_step_tokens": 300, "prefill_step_tokens": 31},
    {"max_step_rows": 256, "max_step_tokens": 300},
    {"max_step_rows": 4_096, "max_step_tokens": 10_000, "num_slots": 16_384},
]
"""Batch and chunk sizes; the first is the one that the others are compared with."""


def sampled(device: str, settings: dict[str, int], n: int) -> list[list[bytes]]:
    """The tokens of `n` samples of each of 25 prompts, from an engine of its own."""
    params = SamplingParams(n=n, max_tokens=8, temperature=1.0, top_p=0.9, seed=5)
    with engine_on_max(**{"device": device, "num_slots": 512, **settings}) as engine:
        outputs = engine.generate(prompts(25, seed=17), params)
    return [[output.token_ids for output in samples] for samples in outputs]


@pytest.mark.parametrize("n", [4, pytest.param(400, marks=pytest.mark.slow)])
def test_25_n_sequences_are_the_same_in_any_batch_and_chunk_and_after_a_restart(
    device: str, n: int
) -> None:
    expected = sampled(device, SETTINGS[0], n)
    assert len({tokens for samples in expected for tokens in samples}) > n, "nothing was random"
    for settings in SETTINGS[1:]:
        assert sampled(device, settings, n) == expected, settings
    with ProcessPoolExecutor(1, get_context("spawn")) as after_restart:
        assert after_restart.submit(sampled, device, SETTINGS[2], n).result() == expected
