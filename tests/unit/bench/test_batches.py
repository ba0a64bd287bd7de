"""Batches that benchmarks make by hand do the same work as the engine's, and keep its promises."""

from __future__ import annotations

import numpy as np

from research.bench.engine.decode import decode_rows, prefill_rows
from srm.engine.steps.batch import Batch
from tests.kit.engines.numpy_runner import TINY, NumpyRunner, tiny_weights

PROMPTS = np.arange(15, dtype=np.int32).reshape(3, 5)


def sampled(batches: list[Batch]) -> tuple[list[int], list[float]]:
    """Tokens and log-probabilities of the last of the batches, run on a pool of rubbish."""
    runner = NumpyRunner(tiny_weights(), num_slots=len(PROMPTS))
    result = [runner.launch(batch) for batch in batches][-1].wait()
    return result.token_ids.tolist(), result.logprobs.tolist()


def test_a_prompt_is_the_same_in_one_step_and_token_by_token_either_way() -> None:
    last = decode_rows(PROMPTS[:, -1], 4)
    at_once = sampled([prefill_rows(PROMPTS[:, :4]), last])
    assert sampled([*(prefill_rows(PROMPTS[:, i : i + 1], i) for i in range(4)), last]) == at_once
    assert sampled([*(decode_rows(PROMPTS[:, i], i) for i in range(4)), last]) == at_once
    assert sampled([prefill_rows(PROMPTS[:, :3]), last]) != at_once


def test_the_work_of_a_step_is_what_it_says() -> None:
    prefill, decode = prefill_rows(PROMPTS), decode_rows(PROMPTS[:, 0], TINY.n_ctx - 1)
    assert (prefill.num_tokens, prefill.num_rows, prefill.num_decode) == (15, 3, 0)
    assert (decode.num_tokens, decode.num_rows, decode.num_decode) == (3, 3, 3)
    assert decode.new["sampling"]["temperature"].tolist() == [1, 1, 1]
