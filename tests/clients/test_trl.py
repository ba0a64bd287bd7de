"""TRL's VLLMClient: generation as its trainers do it, scores of given sequences, and chats."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from tests.clients.conftest import Printed
from tests.clients.expected import TOLERANCE, scores
from tests.serving import Server
from training.problems.drawn import problems


def test_generation_scores_and_chats(demo: Server, printed: Printed) -> None:
    prompts = [problem.prompt for problem in islice(problems("held-out", 5), 6)]
    found = printed("trl_client", demo.url, json.dumps(prompts))
    assert (found["model"], found["world_size"]) == ("demo", 1)
    generated, scored, chats = found["generated"], found["scored"], found["chats"]
    assert found["by_ids"] == generated
    assert len(generated["prompt_ids"]) == 6
    assert len(generated["completion_ids"]) == 24
    for index, completion in enumerate(generated["completion_ids"]):
        assert 1 <= len(completion) <= 24
        assert [ids[0] for ids in generated["logprob_token_ids"][index]] == completion
        expected, _ = scores(generated["prompt_ids"][index // 4], completion, temperature=0.9)
        told = [one[0] for one in generated["logprobs"][index]]
        assert told == pytest.approx(expected, abs=TOLERANCE)
    for i, prompt in enumerate(generated["prompt_ids"]):
        completion = generated["completion_ids"][4 * i]
        assert scored["actual_token_ids"][i] == [[token] for token in completion]
        expected, _ = scores(prompt, completion)
        told = [one for (one,) in scored["actual_logprobs"][i]]
        assert told == pytest.approx(expected, abs=TOLERANCE)
        assert [len(top) for top in scored["logprobs"][i]] == [5] * len(completion)
    assert len(chats["prompt_ids"]) == 2
    assert len(chats["completion_ids"]) == 4
    said = zip(chats["completion_ids"], chats["logprobs"], chats["logprob_token_ids"], strict=True)
    for completion, logprobs, ids in said:
        assert [one[0] for one in ids] == completion
        assert all(one[0] <= 0 for one in logprobs)
