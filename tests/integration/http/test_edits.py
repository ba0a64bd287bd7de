"""Penalties, biases and bans over HTTP: what is sampled and scored."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving import TEXT_MODEL, Server, choice_of, complete, events_of, parts_of

EOS = TEXT_MODEL.eos_token_id
PROMPT = [5, 6, 7]
SAMPLING = {"prompt": PROMPT, "return_token_ids": True, "seed": 1, "max_tokens": 12}


def tokens(server: Server, **fields: Any) -> list[list[int]]:
    """Token ids of each choice."""
    choices = complete(server, **{**SAMPLING, **fields})["choices"]
    return [choice["token_ids"] for choice in choices]


def test_only_allowed_tokens_are_sampled_and_others_have_no_likelihood(server: Server) -> None:
    allowed = [9, 40, 300, 319]
    found = tokens(server, allowed_token_ids=allowed, n=20, temperature=5)
    assert {token for one in found for token in one} == set(allowed)
    banned = choice_of(server, prompt=PROMPT, allowed_token_ids=[8, 9], logprobs=3, max_tokens=2)
    for top in banned["logprobs"]["top_logprobs"]:
        assert sorted(top.values())[0] == -9999.0 < sorted(top.values())[1]


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
    without, biased = (choice_of(server, **wants, logit_bias=bias) for bias in ({}, {"77": 60}))
    assert biased["logprobs"]["tokens"] == ["token_id:77"]
    assert biased["logprobs"]["token_logprobs"][0] > -0.01
    assert without["prompt_logprobs"] == biased["prompt_logprobs"]
    top = without["logprobs"]["top_logprobs"][0]
    other = biased["logprobs"]["top_logprobs"][0]
    shared = sorted((top.keys() & other.keys()) - {"token_id:77"})
    # What all others lose is the same: the logarithm of how much larger the sum is.
    losses = [top[name] - other[name] for name in shared]
    assert len(shared) > 15 and max(losses) - min(losses) < 1e-4 < losses[0]


def test_penalties_keep_from_repeating(server: Server) -> None:
    few = {"allowed_token_ids": list(range(20, 40)), "max_tokens": 20, "temperature": 0}
    kinds = len(set(tokens(server, **few)[0]))
    assert kinds < 20
    for fields in ({"frequency_penalty": 2}, {"presence_penalty": 2}):
        assert len(set(tokens(server, **few, **fields)[0])) > kinds
    (with_bonus,) = tokens(server, **few, frequency_penalty=-2)
    assert len(set(with_bonus[2:])) == 1
    # The prompt counts for the repetition penalty alone.
    pair = {"allowed_token_ids": [30, 31], "logit_bias": {"30": 60, "31": 55}, "max_tokens": 1}
    for prompt in ([30, 5], [5, 30]):
        for edit, expected in (({}, 30), ({"presence_penalty": 2}, 30),
                               ({"repetition_penalty": 2}, 31)):  # fmt: skip
            assert tokens(server, prompt=prompt, **edit, **pair) == [[expected]]


def test_bad_words_are_not_said(server: Server) -> None:
    spelled = {str(token): 9 for token in range(256, 300)}  # tokens of several letters
    wants = {"prompt": "the cat", "n": 50, "max_tokens": 30, "logit_bias": spelled, "seed": 4}
    for words, says_them in (([], True), (["the", "cat sat"], False)):
        choices = complete(server, **wants, bad_words=words)["choices"]
        assert any(" the" in choice["text"] for choice in choices) == says_them


def test_streams_and_many_samples_say_the_same(server: Server) -> None:
    wants = {"bad_words": ["a", "th"], "repetition_penalty": 1.5, "frequency_penalty": 0.5}
    found = tokens(server, n=5, **wants)
    assert found[0] == tokens(server, **wants)[0]
    events = events_of(server, **SAMPLING, n=5, **wants)
    for index, expected in enumerate(found):
        parts = parts_of(events, index)
        assert [token for part in parts for token in part["token_ids"]] == expected
