"""TRL's VLLMClient: generation as its trainers do it, scores of given sequences, and chats."""

from __future__ import annotations

import json
import re
from itertools import islice

import pytest

from srm.training.problems.drawn import problems
from tests.clients.conftest import Noted, Printed
from tests.clients.expected import TOLERANCE, scores, tokenizer
from tests.serving import Server


def test_generation_scores_and_chats(demo: Server, printed: Printed, noted: Noted) -> None:
    prompts = [problem.prompt for problem in islice(problems("held-out", 5), 6)]
    result = printed("trl_client", demo.url, json.dumps(prompts))
    assert (result["model"], result["world_size"]) == ("demo", 1)
    generated, scored, chats = result["generated"], result["scored"], result["chats"]
    assert result["by_ids"] == generated
    assert len(generated["prompt_ids"]) == 6
    assert len(generated["completion_ids"]) == 24
    for index, completion in enumerate(generated["completion_ids"]):
        assert 1 <= len(completion) <= 24
        assert [ids[0] for ids in generated["logprob_token_ids"][index]] == completion
        expected, _ = scores(generated["prompt_ids"][index // 4], completion, temperature=0.9)
        results = [logprob[0] for logprob in generated["logprobs"][index]]
        assert results == pytest.approx(expected, abs=TOLERANCE)
    for i, prompt in enumerate(generated["prompt_ids"]):
        completion = generated["completion_ids"][4 * i]
        assert scored["actual_token_ids"][i] == [[token] for token in completion]
        expected, _ = scores(prompt, completion)
        results = [item for (item,) in scored["actual_logprobs"][i]]
        assert results == pytest.approx(expected, abs=TOLERANCE)
        assert [len(top) for top in scored["logprobs"][i]] == [5] * len(completion)
    assert len(chats["prompt_ids"]) == 2
    assert len(chats["completion_ids"]) == 4
    message = zip(
        chats["completion_ids"], chats["logprobs"], chats["logprob_token_ids"], strict=True
    )
    for completion, logprobs, ids in message:
        assert [own_id[0] for own_id in ids] == completion
        assert all(logprob[0] <= 0 for logprob in logprobs)
    noted("trl", "`VLLMClient.generate`", "`.chat`", "`.get_sequence_logprobs`")
    texts = tokenizer().decode_batch(result["by_regex"])
    assert len(texts) == 8 and all(re.fullmatch(r"#### \d{1,3}", text) for text in texts)
    noted("trl", "`.generate(structured_outputs_regex=…)`", "`.chat(structured_outputs_regex=…)`")
    assert result["with_tools"] == chats  # tool_choice is none, and the template shows no tools
    noted("trl", "`.chat(tools=…)`")
