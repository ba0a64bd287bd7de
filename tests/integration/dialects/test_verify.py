"""`verify` over HTTP: each sample has the score that its text has, in every form of a reply.

What a rule gives a text, tests/unit/server/generation/test_verification.py says.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from typing import Any

import numpy as np

from tests.kit.serving import CHATS, Server, complete

N = 100
SAMPLING: dict[str, Any] = {"prompt": "the cat", "n": N, "max_tokens": 8, "seed": 5}
RULE: dict[str, Any] = {"sum": [{"match": "[aeiou]", "weight": 0.5}, {"match": "t"}]}
VOWEL = {"match": "[aeiou]"}


def score_of(text: str) -> float:
    return 0.5 * bool(re.search("[aeiou]", text)) + ("t" in text)


def test_each_choice_says_its_score_and_all_their_mean(server: Server) -> None:
    plain = complete(server, **SAMPLING)
    reply = complete(server, **SAMPLING, verify=RULE)
    texts = [choice["text"] for choice in plain["choices"]]
    assert [choice["text"] for choice in reply["choices"]] == texts
    scores = [score_of(text) for text in texts]
    assert [choice["score"] for choice in reply["choices"]] == scores
    assert len(set(scores)) > 2
    (samples,) = reply["samples"]
    assert samples["mean_score"] == sum(scores) / N
    assert samples["drawn"] == N and "matched" not in samples
    assert not any("score" in choice for choice in plain["choices"])


def test_counts_are_by_score_or_say_the_score(server: Server) -> None:
    texts = [choice["text"] for choice in complete(server, **SAMPLING)["choices"]]
    counts = {"verify": RULE, "return": "counts"}
    (by_text,) = complete(server, **SAMPLING, **counts)["samples"]
    entries = {entry["text"]: (entry["count"], entry["score"]) for entry in by_text["counts"]}
    assert entries == {text: (count, score_of(text)) for text, count in Counter(texts).items()}
    (by_score,) = complete(server, **SAMPLING, **counts, count_by="score")["samples"]
    scores = Counter(map(score_of, texts))
    assert {entry["score"]: entry["count"] for entry in by_score["counts"]} == scores
    assert all(entry["text"] is None for entry in by_score["counts"])
    assert by_score["distinct"] == len(scores)
    unique = complete(server, **SAMPLING, verify=RULE, count_by="score", **{"return": "unique"})
    firsts = {score_of(text): index for index, text in reversed([*enumerate(texts)])}
    assert {entry["score"]: entry["index"] for entry in unique["choices"]} == firsts


def test_until_a_score_is_reached(server: Server) -> None:
    texts = [choice["text"] for choice in complete(server, **SAMPLING)["choices"]]
    for until, enough in (({"score": 1}, 1), ({"score": 0.5, "match": "t"}, 0.5)):
        right = [score_of(text) >= enough and ("t" in text or enough == 1) for text in texts]
        end = [index for index, is_right in enumerate(right) if is_right][4] + 1
        reply = complete(server, **SAMPLING, verify=RULE, until={**until, "count": 5})
        assert [choice["text"] for choice in reply["choices"]] == texts[:end]
        assert [choice["matched"] for choice in reply["choices"]] == right[:end]
        assert reply["samples"][0]["reached"]


def test_each_prompt_has_its_own_rule(server: Server) -> None:
    prompts = {**SAMPLING, "prompt": ["the cat", "on the mat"]}
    reply = complete(server, **prompts, verify=[VOWEL, {"not": VOWEL}])
    for choice in reply["choices"]:
        has_vowel = re.search("[aeiou]", choice["text"]) is not None
        assert choice["score"] == (has_vowel if choice["index"] < N else not has_vowel)
    means = [samples["mean_score"] for samples in reply["samples"]]
    assert 0 < means[0] < 1 and 0 < means[1] < 1


def test_packed_replies_have_tokens_log_probabilities_and_scores(server: Server) -> None:
    fields = {**SAMPLING, "logprobs": 0, "stop": ["e", "tt"]}
    plain = complete(server, **fields, return_token_ids=True)
    reply = complete(server, **fields, verify=RULE, return_packed=True)
    for choice, packed in zip(plain["choices"], reply["choices"], strict=True):
        arrays = packed["packed"]
        token_ids = np.frombuffer(base64.b64decode(arrays["token_ids"]), "<i4")
        logprobs = np.frombuffer(base64.b64decode(arrays["logprobs"]), "<f4")
        assert token_ids.tolist() == choice["token_ids"]
        assert np.allclose(logprobs, choice["logprobs"]["token_logprobs"], atol=1e-5)
        assert packed["score"] == score_of(choice["text"])
        assert packed["text"] == "" and packed["stop_reason"] == choice["stop_reason"]
    until = complete(server, **fields, verify=RULE, return_packed=True, until={"score": 1})
    assert [entry["matched"] for entry in until["choices"]] == [
        entry["score"] >= 1 for entry in reply["choices"]
    ]


def test_chats_have_the_same(server: Server) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "the cat"}], "n": 60}
    chat |= {"max_completion_tokens": 6, "seed": 3, "verify": RULE}
    reply = server.http.post(CHATS, json=chat).json()
    for choice in reply["choices"]:
        assert choice["score"] == score_of(choice["message"]["content"])
    counts = server.http.post(CHATS, json={**chat, "return": "counts"}).json()
    assert counts["samples"][0]["mean_score"] == reply["samples"][0]["mean_score"]
    listed = server.http.post(CHATS, json={**chat, "verify": [RULE]}).json()
    assert listed["choices"] == reply["choices"]
