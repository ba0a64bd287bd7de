"""TRL's VLLMClient: generation as its trainers do it, and scores of given sequences."""

from __future__ import annotations

import json
from itertools import islice

import pytest
import torch

from engine.config import DEMO_MODEL
from tests.clients.conftest import Printed
from tests.serving import Server
from training.checkpoint import load_model
from training.tasks import problems

TOLERANCE = 1e-4


def test_generation_and_scores(demo: Server, printed: Printed) -> None:
    prompts = [problem.prompt for problem in islice(problems("held-out", 5), 6)]
    found = printed("trl_generation", demo.url, json.dumps(prompts))
    assert found["model"] == "demo"
    generated = found["generated"]
    assert found["by_ids"] == generated
    assert len(generated["prompt_ids"]) == 6
    assert len(generated["completion_ids"]) == 24
    model = load_model(DEMO_MODEL).double()
    for index, completion in enumerate(generated["completion_ids"]):
        assert 1 <= len(completion) <= 24
        assert [ids[0] for ids in generated["logprob_token_ids"][index]] == completion
        prompt = generated["prompt_ids"][index // 4]
        expected = logprobs(prompt, completion, model, temperature=0.9)
        assert [one[0] for one in generated["logprobs"][index]] == pytest.approx(
            expected, abs=TOLERANCE
        )
    scored = found["scored"]
    for i, prompt in enumerate(generated["prompt_ids"]):
        completion = generated["completion_ids"][4 * i]
        assert scored["actual_token_ids"][i] == [[token] for token in completion]
        expected = logprobs(prompt, completion, model, temperature=1)
        for actual, top, logprob in zip(
            scored["actual_logprobs"][i], scored["logprobs"][i], expected, strict=True
        ):
            assert len(top) == 5
            assert actual == [pytest.approx(logprob, abs=TOLERANCE)]


def logprobs(
    prompt: list[int], completion: list[int], model: torch.nn.Module, temperature: float
) -> list[float]:
    """Of each token of a completion, under the distribution it was drawn from."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion]))[0][len(prompt) - 1 : -1]
    scores = (logits / temperature).log_softmax(-1)
    chosen: list[float] = scores[torch.arange(len(completion)), torch.tensor(completion)].tolist()
    return chosen


def test_the_number_of_workers(demo: Server, printed: Printed) -> None:
    found = printed("trl_generation", demo.url, '["Question:"]', "with-world-size")
    assert found["world_size"] == 1


def test_chats(demo: Server, printed: Printed) -> None:
    found = printed("trl_chat", demo.url)
    assert len(found["prompt_ids"]) == 2
    assert len(found["completion_ids"]) == 4
    for completion, scores, ids in zip(
        found["completion_ids"], found["logprobs"], found["logprob_token_ids"], strict=True
    ):
        assert [one[0] for one in ids] == completion
        assert all(one[0] <= 0 for one in scores)
