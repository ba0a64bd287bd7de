"""Penalties, biases and bans: what a request may say of them, and what the engine is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.messages import SamplingParams
from server.generation.sampling import sampling_params
from server.text.text import Text
from tests.bodies.refusals import completion, refusal
from tests.serving import TEXT_MODEL


@pytest.fixture(scope="module")
def text(text_model: Path) -> Text:
    return Text(text_model)


def params(text: Text, **fields: Any) -> SamplingParams:
    return sampling_params(completion(**fields), text)


def test_what_does_not_fit_the_model_or_the_request_is_named(text: Text) -> None:
    for field, bad in (
        ("logit_bias", {str(TEXT_MODEL.vocab_size): 1}),
        ("allowed_token_ids", [5, TEXT_MODEL.vocab_size]),
        ("min_tokens", 17),
    ):
        assert refusal(params, text, **{field: bad}).param == field


def test_what_asks_for_nothing_is_nothing(text: Text) -> None:
    neutral: dict[str, Any] = {
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1,
    }
    neutral |= {"logit_bias": {}, "allowed_token_ids": None, "bad_words": [], "min_tokens": 0}
    assert params(text, **neutral) == params(text)


def test_what_is_allowed_is_told_the_engine(text: Text) -> None:
    found = params(
        text,
        presence_penalty=-2,
        frequency_penalty=0.5,
        repetition_penalty=1.25,
        logit_bias={"5": 100, "0": -1.5},
        allowed_token_ids=[7, 5, 7],
        min_tokens=16,
    )
    assert (found.presence_penalty, found.frequency_penalty) == (-2.0, 0.5)
    assert found.repetition_penalty == 1.25
    assert found.logit_bias == {5: 100.0, 0: -1.5}
    assert found.allowed_token_ids == (7, 5)
    assert found.min_tokens == 16


def test_no_more_tokens_are_asked_for_than_there_may_be(text: Text) -> None:
    assert params(text, max_tokens=500, min_tokens=400).min_tokens == TEXT_MODEL.n_ctx


def test_bad_words_are_spelled_with_and_without_a_space(text: Text) -> None:
    def ids(word: str) -> tuple[int, ...]:
        return tuple(memoryview(text.encode([word], adds_special=False)[0]).cast("i"))

    found = params(text, bad_words=["cat", "  the cat", "cat", "€"]).bad_words
    expected = ["cat", " cat", "the cat", " the cat", "€", " €"]
    assert found == tuple(ids(word) for word in expected)
    assert max(map(len, found)) > 2 and min(map(len, found)) == 1
