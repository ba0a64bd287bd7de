"""`srm bench samples` counts what the engine did, and its table says it."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer, models

from bench.model.many_samples import markdown, sample
from engine.messages import SamplingParams
from tests.conftest import MakeEngine
from training.evaluate import COMPLETION_TOKENS, pass_at_k
from training.tasks import Problem

SAMPLES, SEED, ANSWER = 24, 7, 2
PROBLEM = Problem("some", "What?", (), ANSWER)


def test_a_request_of_more_samples_than_slots_is_counted(make_engine: MakeEngine) -> None:
    """The tokenizer's token i, but for the first two, answers i % 3."""
    vocab = {"?": 0, "<|end_of_text|>": 1} | {f"####{i % 3}_{i}": i for i in range(2, 32)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.add_special_tokens(["?", "<|end_of_text|>"])
    prompt = tokenizer.encode(PROBLEM.prompt).ids
    params = SamplingParams(n=SAMPLES, max_tokens=COMPLETION_TOKENS, seed=SEED)
    (outputs,) = make_engine(num_slots=8).generate([prompt], params)
    samples = [np.frombuffer(output.token_ids, "<i4").tolist() for output in outputs]
    right = [[token % 3 for token in one if token > 1][:1] for one in samples].count([ANSWER])
    assert 0 < right < SAMPLES

    engine = make_engine(num_slots=8)
    found = sample(engine, tokenizer, PROBLEM, SAMPLES, SEED)

    assert found["samples"] == SAMPLES
    assert found["right"] == right
    assert found["prefilled_tokens"] == len(prompt) - 1
    assert found["generated_tokens"] == sum(map(len, samples))
    assert found["distinct"] == len(set(map(tuple, samples)))
    assert found["pass_at"] == {str(k): pass_at_k(SAMPLES, right, k) for k in (1, 10)}
    with pytest.raises(AssertionError, match=r"0 of \d+ tokens were prefilled"):
        sample(engine, tokenizer, PROBLEM, SAMPLES, SEED)


def test_the_table_has_every_problem_and_their_mean() -> None:
    names = ("prompt_tokens", "prefilled_tokens", "seconds", "generated_tokens", "tokens_per_s")
    run = dict.fromkeys(names, 9) | {"samples": 50, "kind": "some", "right": 10, "distinct": 5_000}
    runs = [
        run | {"pass_at": {"1": 0.25, "10": 0.5}},
        run | {"kind": "other", "right": 30, "pass_at": {"1": 0.75, "10": 1.0}},
    ]
    sizes = {"pool_bytes": 2e9, "most_memory_before_bytes": 3e9, "most_memory_bytes": 4e9}
    lines = markdown({"dtype": "float32", "num_slots": 8, "runs": runs} | sizes)
    assert "a pool of 2.00 GB. The process had 4.00 GB at most, 3.00 GB before" in lines[0]
    assert "| 1. some | 9 | 9 | 9.0 | 9 | 9 | 5,000 |" in lines
    assert lines[-5:] == [
        "| problem | right | pass@1 | pass@10 |",
        "|---|---|---|---|",
        "| 1. some | 10 | 0.2500 | 0.5000 |",
        "| 2. other | 30 | 0.7500 | 1.0000 |",
        "| mean | 20 | 0.5000 | 0.7500 |",
    ]
