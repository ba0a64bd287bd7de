"""Penalties, biases and bans over HTTP: what is sampled, scored and refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.serving import TEXT_MODEL, Server

EOS = TEXT_MODEL.eos_token_id
PROMPT = [5, 6, 7]


def tokens(server: Server, **fields: Any) -> list[list[int]]:
    """Token ids of each choice."""
    given = {"prompt": PROMPT, "return_token_ids": True, "seed": 1, "max_tokens": 12, **fields}
    reply = server.post(**given)
    assert reply.status_code == 200, reply.text
    return [choice["token_ids"] for choice in reply.json()["choices"]]


def test_only_allowed_tokens_are_sampled(server: Server) -> None:
    allowed = [9, 40, 300, 319]
    found = tokens(server, allowed_token_ids=allowed, n=20, temperature=5)
    assert {token for one in found for token in one} == set(allowed)


@pytest.mark.parametrize("fields", [{}, {"ignore_eos": True}, {"stop_token_ids": [9]}])
def test_nothing_ends_before_min_tokens(server: Server, fields: dict[str, Any]) -> None:
    wants = {"logit_bias": {str(EOS): 100, "9": 100, "30": 60}, "n": 10, **fields}
    ends = {EOS, *fields.get("stop_token_ids", [])}
    for least in (0, 1, 5, 12):
        for one in tokens(server, min_tokens=least, **wants):
            assert not ends & set(one[:least])
            if least < 12 and not fields.get("ignore_eos"):
                assert one[least] in ends or (9 not in ends and one[least] == 9)


def test_a_bias_is_added_and_the_scores_say_so(server: Server) -> None:
    wants = {"prompt": PROMPT, "max_tokens": 1, "logprobs": 20, "temperature": 1, "seed": 3}
    wants |= {"prompt_logprobs": 0, "return_tokens_as_token_ids": True}
    without, biased = (
        server.post(**wants, logit_bias=bias).json()["choices"][0] for bias in ({}, {"77": 60})
    )
    assert biased["logprobs"]["tokens"] == ["token_id:77"]
    assert biased["logprobs"]["token_logprobs"][0] > -0.01
    assert without["prompt_logprobs"] == biased["prompt_logprobs"]
    top = without["logprobs"]["top_logprobs"][0]
    other = biased["logprobs"]["top_logprobs"][0]
    shared = sorted((top.keys() & other.keys()) - {"token_id:77"})
    # What all others lose is the same: the logarithm of how much larger the sum is.
    losses = [top[name] - other[name] for name in shared]
    assert len(shared) > 15 and max(losses) - min(losses) < 1e-4 < losses[0]


def test_banned_tokens_have_no_likelihood(server: Server) -> None:
    reply = server.post(prompt=PROMPT, allowed_token_ids=[8, 9], logprobs=3, max_tokens=2)
    scores = reply.json()["choices"][0]["logprobs"]
    for top in scores["top_logprobs"]:
        assert sorted(top.values())[0] == -9999.0 < sorted(top.values())[1]


def test_penalties_keep_from_repeating(server: Server) -> None:
    few = {"allowed_token_ids": list(range(20, 40)), "max_tokens": 20, "temperature": 0}
    assert len(set(tokens(server, **few)[0])) < 20
    for fields in ({"frequency_penalty": 2}, {"presence_penalty": 2}):
        assert len(set(tokens(server, **few, **fields)[0])) > len(set(tokens(server, **few)[0]))
    (with_bonus,) = tokens(server, **few, frequency_penalty=-2)
    assert len(set(with_bonus[2:])) == 1


def test_the_prompt_counts_for_the_repetition_penalty_alone(server: Server) -> None:
    pair = {"allowed_token_ids": [30, 31], "logit_bias": {"30": 60, "31": 55}, "max_tokens": 1}
    for prompt in ([30, 5], [5, 30]):
        assert tokens(server, prompt=prompt, **pair) == [[30]]
        assert tokens(server, prompt=prompt, presence_penalty=2, **pair) == [[30]]
        assert tokens(server, prompt=prompt, repetition_penalty=2, **pair) == [[31]]


def test_bad_words_are_not_said(server: Server) -> None:
    spelled = {str(token): 9 for token in range(256, 300)}  # tokens of several letters
    wants = {"prompt": "the cat", "n": 50, "max_tokens": 30, "logit_bias": spelled, "seed": 4}
    words = ["the", "cat sat"]

    def texts(**fields: Any) -> str:
        return "|".join(c["text"] for c in server.post(**wants, **fields).json()["choices"])

    assert " the" in texts()
    assert " the" not in texts(bad_words=words)


def test_streams_and_many_samples_say_the_same(server: Server) -> None:
    wants = {"bad_words": ["a", "th"], "repetition_penalty": 1.5, "frequency_penalty": 0.5}
    found = tokens(server, n=5, **wants)
    assert found[0] == tokens(server, **wants)[0]
    reply = server.post(
        prompt=PROMPT, seed=1, max_tokens=12, n=5, stream=True, return_token_ids=True, **wants
    )
    streamed: dict[int, list[int]] = {}
    for line in reply.text.split("\n\n")[:-2]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            streamed.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert [streamed[index] for index in range(5)] == found


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [320]}, "allowed_token_ids"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"min_tokens": 17}, "min_tokens"),
        (
            {"min_tokens": 1, "stop_token_ids": [0], "allowed_token_ids": [0, EOS]},
            "allowed_token_ids",
        ),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_refusal_names_the_field(
    server: Server, fields: dict[str, Any], param: str, is_stream: bool
) -> None:
    reply = server.post(stream=is_stream, **fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == param and param in error["message"]
