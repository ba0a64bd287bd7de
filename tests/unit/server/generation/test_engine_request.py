"""What the engine is asked for, and no more than is needed."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from srm.engine.messages import Request, SamplingParams
from srm.server.generation.engine_request import (
    RequestOwner,
    engine_requests,
    sampling_params,
)
from srm.server.generation.generation import Generation
from srm.server.text.text import Text
from tests.kit.bodies.refusals import completion
from tests.kit.serving import TEXT_MODEL

NOBODY = RequestOwner()


def asked(text: Text, owner: RequestOwner = NOBODY, **fields: Any) -> list[Request]:
    request = completion(prompt=[[5, 6], [7]], **fields)
    prompts = [array("i", ids).tobytes() for ids in ([5, 6], [7])]
    made = Generation("made", request, prompts, text, owner)
    assert owner.created_unix in {None, made.created_unix}
    params = sampling_params(request, text)
    return engine_requests("made", request, params, owner, made.prompts, range(2), [None, 7])


@pytest.mark.parametrize(
    ("fields", "emit", "logprobs"),
    [
        ({}, "final", None),
        ({"best_of": 4}, "final", 0),
        ({"best_of": 4, "logprobs": 3}, "tokens", 3),
        ({"n": 2, "best_of": 2}, "final", None),
        ({"return_packed": True, "logprobs": 0}, "final", 0),
        ({"stop": "a", "priority": -7}, "tokens", None),
        ({"stream": True, "priority": 7, "request_id": "again"}, "tokens", None),
    ],
)
def test_asks_no_more_than_is_needed_under_an_id_of_our_own(
    text: Text, fields: dict[str, Any], emit: str, logprobs: int | None
) -> None:
    requests = asked(text, **fields)
    assert [request.id for request in requests] == ["made-0", "made-1"]
    assert [request.first_wave for request in requests] == [None, 7]
    for request in requests:
        assert (request.emit, request.params.logprobs) == (emit, logprobs)
        assert request.params.n == fields.get("best_of", fields.get("n", 1))
        assert request.precedence == -fields.get("priority", 0), "larger is earlier"
        assert request.priority == 0, "a body decides nothing between owners"


def test_what_lasts_is_drawn_from_its_id(text: Text) -> None:
    owner = RequestOwner(share="a", weight=2.0, priority=-5, durable=True, created_unix=77)
    first, second = asked(text, owner)
    assert asked(text, owner) == [first, second]
    assert first.params.seed != second.params.seed
    assert (first.share, first.weight, first.priority, first.durable) == ("a", 2.0, -5, True)
    assert first.emit == "final"
    for request in asked(text, owner, stop=["x"], seed=-1):
        assert (request.emit, request.params.seed) == ("delta", 2**64 - 1)


# Penalties, biases and bans


def params(text: Text, **fields: Any) -> SamplingParams:
    return sampling_params(completion(**fields), text)


def test_edits_of_logits_are_told_the_engine(text: Text) -> None:
    numbers = {"presence_penalty": -2.0, "frequency_penalty": 0.5, "repetition_penalty": 1.25}
    more = {"logit_bias": {"5": 100, "0": -1.5}, "allowed_token_ids": [7, 5, 7], "min_tokens": 16}
    result = params(text, **numbers, **more)
    assert numbers == {name: getattr(result, name) for name in numbers}
    assert (result.logit_bias, result.min_tokens) == ({5: 100.0, 0: -1.5}, 16)
    assert result.allowed_token_ids == (7, 5)
    # No more tokens are asked for than there may be.
    assert params(text, max_tokens=500, min_tokens=400).min_tokens == TEXT_MODEL.n_ctx
    neutral: dict[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0, "min_tokens": 0}
    neutral |= {"logit_bias": {}, "allowed_token_ids": None, "bad_words": []}
    assert params(text, **neutral, repetition_penalty=1) == params(text)


def test_bad_words_are_spelled_with_and_without_a_space(text: Text) -> None:
    bad_words = params(text, bad_words=["cat", "  the cat", "cat", "€"]).bad_words
    expected = text.encode(["cat", " cat", "the cat", " the cat", "€", " €"], adds_special=False)
    assert [array("i", ids).tobytes() for ids in bad_words] == expected
    assert max(map(len, bad_words)) > 2 and min(map(len, bad_words)) == 1
