"""Requests are checked once, at the door: every field and value that is refused is named."""

from __future__ import annotations

from typing import Any

import pytest

from srm.engine.messages import NAMED, Request, SamplingParams
from srm.engine.scheduler.accept import accept
from srm.engine.state.sequence import SequenceGroup
from srm.errors import ContextTooLong, InvalidRequest
from tests.kit.engines.making import request_of
from tests.kit.engines.numpy_runner import TINY

EOS, V = TINY.eos_token_id, TINY.vocab_size
NAN, INF = float("nan"), float("inf")


def accepted(**settings: Any) -> SequenceGroup:
    return accept(request_of(**settings), TINY, 0)


BAD: dict[str, tuple[object, ...]] = {
    "max_tokens": (0, -1),
    "n": (0, -3),
    "temperature": (-0.1, 101, 1e39, NAN, INF),
    "top_k": (-1, 2**31),
    "top_p": (-0.1, 1.01, NAN),
    "min_p": (-0.01, 1.5),
    "seed": (-1, 2**64),
    "logprobs": (-1, 21),
    "prompt_logprobs": (-1, 21),
    "stop_token_ids": ((3, V), (-1,)),
    "presence_penalty": (2.1, -3, NAN),
    "frequency_penalty": (2.1, -3, NAN),
    "repetition_penalty": (0.0, -1.0, 0.001, 101.0, NAN, INF),
    "logit_bias": ({V: 1.0}, {-1: 1.0}, {0: 100.5}, {0: NAN}, {0: -INF}),
    "allowed_token_ids": ((V,), (0, -1)),
    "bad_words": (((V,),), ((1, -1),), ((1,), ())),
    "min_tokens": (-1, 17),
    # No sum of floats would notice these.
    "weight": (5e-324, 0.0, -1.0, 0.000999, 1000.1, NAN, INF, -INF),
}
GOOD: dict[str, tuple[object, ...]] = {
    "temperature": (0, 1e-9, 100),
    "top_k": (2**31 - 1,),
    "top_p": (0,),
    "min_p": (1.0,),
    "seed": (2**64 - 1,),
    "max_tokens": (2**62,),
    "logprobs": (0,),
    "prompt_logprobs": (20,),
    "stop_token_ids": (tuple(range(32)) * 3,),
    "weight": (0.001, 1000.0),
}
EDITS: dict[str, tuple[object, ...]] = {
    "presence_penalty": (2.0, -2.0),
    "frequency_penalty": (2.0, -2.0),
    "repetition_penalty": (0.01, 100.0),
    "logit_bias": ({0: 100.0, V - 1: -100.0},),
    "allowed_token_ids": ((V - 1,),),
    "bad_words": (tuple((token,) for token in range(1, V)),),
    "min_tokens": (16,),
}


NO_TOKEN_LEFT: list[tuple[str, dict[str, Any]]] = [
    ("bad_words", {"bad_words": tuple((token,) for token in range(V))}),
    ("bad_words", {"bad_words": tuple((3, token) for token in range(V))}),
    ("allowed_token_ids", {"allowed_token_ids": (4, 4), "bad_words": ((4, 4),)}),
    ("allowed_token_ids", {"allowed_token_ids": (EOS,), "min_tokens": 1}),
    ("allowed_token_ids", {"allowed_token_ids": (EOS, 5), "min_tokens": 1, "stop_token_ids": (5,)}),
    ("min_tokens", {"min_tokens": 1, "stop_token_ids": tuple(range(V))}),
    ("bad_words", {"min_tokens": 1, "bad_words": tuple((t,) for t in range(V) if t != EOS)}),
]


@pytest.mark.parametrize(
    ("named", "params", "message"),
    [
        *((name, {name: item}, name) for name in BAD for item in BAD[name]),
        *((name, params, f"^{name}.* must leave a token") for name, params in NO_TOKEN_LEFT),
        ("max_tokens", {"max_tokens": 0, "prompt_logprobs": 0, "prompt": [5]}, "max_tokens"),
        ("logprobs", {"logprobs": 1}, "logprobs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    named: str, params: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        accepted(**params)
    assert error.value.param == named


def test_the_ends_of_a_range_are_in_it_and_who_wants_no_edits_has_no_plan() -> None:
    for name, values in GOOD.items():
        assert all(accepted(**{name: value}).edits is None for value in values), name
    for name, values in EDITS.items():
        assert all(accepted(**{name: value}).edits for value in values), name
    penalties = {"presence_penalty": -0.0, "frequency_penalty": 0, "repetition_penalty": 1}
    lists: dict[str, Any] = {"logit_bias": {}, "allowed_token_ids": (), "bad_words": ()}
    assert accepted(**penalties, **lists, min_tokens=0).edits is None


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("most", [1, 20, 21, V])
def test_alternatives_go_up_to_the_setting(name: str, most: int) -> None:
    def ask(count: int) -> SequenceGroup:
        fields: dict[str, Any] = {name: count}
        request = request_of(**fields, emit="tokens")
        return accept(request, TINY, 0, max_logprobs=most)

    assert getattr(ask(most).request.params, name) == most
    for count in (most + 1, 2**31 - 1):
        with pytest.raises(InvalidRequest, match=f"0 … {most}, the setting max_logprobs") as error:
            ask(count)
        assert error.value.param == name


@pytest.mark.parametrize(("count", "name"), NAMED.items())
def test_named_tokens_are_in_the_vocabulary_each_once_and_as_many_as_the_setting(
    count: str, name: str
) -> None:
    def ask(ids: tuple[int, ...], size: int | None = None, most: int = 3) -> SequenceGroup:
        fields: dict[str, Any] = {name: ids, count: len(ids) if size is None else size}
        return accept(request_of(**fields, emit="tokens"), TINY, 0, max_logprobs=most)

    for ids in ((), (0,), (V - 1, 0, 5)):
        assert getattr(ask(ids).request.params, name) == ids
    refused: list[tuple[str, str, tuple[int, ...], int | None]] = [
        (name, "at most 3 token ids, the setting max_logprobs, got 4", (1, 2, 3, 4), None),
        (name, f"holds {V}; ids are 0", (1, V), None),
        (name, "holds -1; ids are 0", (-1,), None),
        (name, "holds 7 more than once", (7, 2, 7), None),
        (count, "must be 2 beside as many", (7, 2), 1),
    ]
    for field, message, wrong, size in refused:
        with pytest.raises(InvalidRequest, match=message) as error:
            ask(wrong, size)
        assert error.value.param == field
    assert len(getattr(ask(tuple(range(V)), most=V).request.params, name)) == V


def test_where_scores_begin_is_a_place_in_the_prompt() -> None:
    prompt = [3, 4, 5]
    for start, first in ((0, 1), (1, 1), (2, 2), (3, 3), (-1, 2), (-3, 1), (-(2**31), 1)):
        asked = accepted(prompt=prompt, prompt_logprobs=0, prompt_logprobs_start=start)
        assert asked.first_scored == first
    assert accepted(prompt=prompt).first_scored == 3
    with pytest.raises(InvalidRequest, match="after the last of the prompt's 3 tokens") as error:
        accepted(prompt=prompt, prompt_logprobs=0, prompt_logprobs_start=4)
    assert error.value.param == "prompt_logprobs_start"
    with pytest.raises(InvalidRequest, match="only with prompt_logprobs"):
        accepted(prompt=prompt, prompt_logprobs_start=1)
    with pytest.raises(InvalidRequest, match="max_tokens must be"):
        accepted(prompt=prompt, prompt_logprobs=0, prompt_logprobs_start=3, max_tokens=0)


def test_prompts_are_token_ids_that_fit_the_context() -> None:
    for data in (b"", b"\1\0\0", b"\1\0\0\0\0"):
        with pytest.raises(InvalidRequest, match="int32"):
            accept(Request("a", data, SamplingParams()), TINY, 0)
    for token in (-1, 32, 2**31 - 1):
        with pytest.raises(InvalidRequest, match=f"holds {token}; ids are 0 … 31") as error:
            accepted(prompt=[1, token, 2])
        assert error.value.param == "prompt_token_ids"
    with pytest.raises(ContextTooLong, match=r"64 tokens.*65 tokens"):
        accepted(prompt=[3] * 65)
    for length, max_tokens, expected in ((64, 9, 1), (63, 9, 2), (1, 100, 64), (10, 9, 9)):
        assert accepted(prompt=[3] * length, max_tokens=max_tokens).max_outputs == expected


def test_end_of_text_is_a_stop_token_unless_ignored() -> None:
    assert accepted(stop_token_ids=(4, 5), ignore_eos=False).stop_ids == {1, 4, 5}
    assert accepted(stop_token_ids=(4, 5)).stop_ids == {4, 5}
