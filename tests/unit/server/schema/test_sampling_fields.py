"""Penalties, biases and bans: what a request may say of them, and what the engine is told."""

from __future__ import annotations

from typing import Any

from engine.messages import SamplingParams
from server.generation.sampling import sampling_params
from server.text.text import Text
from tests.bodies.refusals import completion, refusal
from tests.serving import TEXT_MODEL


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
    neutral = dict.fromkeys(("presence_penalty", "frequency_penalty", "min_tokens"), 0)
    none: dict[str, Any] = {"logit_bias": {}, "allowed_token_ids": None, "bad_words": []}
    assert params(text, **neutral, **none, repetition_penalty=1) == params(text)


def test_what_is_allowed_is_told_the_engine(text: Text) -> None:
    numbers = {"presence_penalty": -2.0, "frequency_penalty": 0.5, "repetition_penalty": 1.25}
    found = params(
        text,
        **numbers,
        logit_bias={"5": 100, "0": -1.5},
        allowed_token_ids=[7, 5, 7],
        min_tokens=16,
    )
    assert numbers == {name: getattr(found, name) for name in numbers}
    assert (found.logit_bias, found.min_tokens) == ({5: 100.0, 0: -1.5}, 16)
    assert found.allowed_token_ids == (7, 5)
    # No more tokens are asked for than there may be.
    assert params(text, max_tokens=500, min_tokens=400).min_tokens == TEXT_MODEL.n_ctx


def test_bad_words_are_spelled_with_and_without_a_space(text: Text) -> None:
    def ids(word: str) -> tuple[int, ...]:
        return tuple(memoryview(text.encode([word], adds_special=False)[0]).cast("i"))

    found = params(text, bad_words=["cat", "  the cat", "cat", "€"]).bad_words
    expected = ["cat", " cat", "the cat", " the cat", "€", " €"]
    assert found == tuple(ids(word) for word in expected)
    assert max(map(len, found)) > 2 and min(map(len, found)) == 1
