"""What JSON and names cannot say of log-probabilities."""

from __future__ import annotations

import base64
from array import array
from dataclasses import replace
from math import inf, nan
from typing import Any

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import Output
from server.schema.completion_response import Logprobs
from server.text import packed
from server.text.logprobs import as_prompt_logprobs, of_delta, of_prompt
from server.text.sample import Delta


def output(
    tokens: list[int], logprobs: list[float], top: list[int], top_logprobs: list[float]
) -> Output:
    return Output(
        id="a",
        index=-1,
        token_ids=array("i", tokens).tobytes(),
        logprobs=array("f", logprobs).tobytes(),
        ranks=array("i", [9] * len(tokens)).tobytes(),
        top_ids=array("i", top).tobytes(),
        top_logprobs=array("f", top_logprobs).tobytes(),
    )


def name(token: int) -> str:
    return {3: "three", 5: "five"}.get(token, str(token))


@given(st.data(), st.integers(1, 4), st.integers(0, 4))
def test_tokens_have_their_own_alternatives_which_do_not_hide_each_other(
    data: st.DataObject, kept: int, alternatives: int
) -> None:
    """Where tokens read the same, the likeliest has the name."""
    names = ["a", "b", "a", "c", "b", "d"]
    tops = data.draw(st.lists(st.permutations(range(6)), min_size=1, max_size=6))
    fills = data.draw(st.booleans())
    tops = [[*top[: kept - 1], top[kept - 1] if fills else -1] for top in tops]
    tokens = data.draw(st.lists(st.integers(0, 5), min_size=len(tops), max_size=len(tops)))
    scores = [-9.0 - i for i in range(len(tokens))]
    top_logprobs = [-float(place) for _ in tops for place in range(kept)]
    scored = output(tokens, scores, [token for top in tops for token in top], top_logprobs)
    found = of_prompt(0, scored, alternatives, names.__getitem__)
    assert found.token_logprobs == [None, *scores]
    for i, (token, top, shown) in enumerate(zip(tokens, tops, found.top_logprobs[1:], strict=True)):
        pairs = [(one, float(-place)) for place, one in enumerate(top[:alternatives]) if one >= 0]
        if token not in dict(pairs):
            pairs.append((token, -9.0 - i))
        expected: dict[str, float] = {}
        for one, logprob in pairs:
            expected.setdefault(names[one], logprob)
            if expected[names[one]] != logprob:
                expected[f"token_id:{one}"] = logprob
        assert shown == expected


def test_minus_infinity_is_a_number_of_json() -> None:
    five = {"logprob": 0, "rank": 1, "decoded_token": "five"}
    for scores, alternatives, three in (
        (output([3], [-inf], [5, 3], [0, -inf]), 2, {"logprob": -9999, "rank": 2}),
        # A token beyond the alternatives has its own rank.
        (output([3], [-7], [5, 6], [0, -1]), 1, {"logprob": -7, "rank": 9}),
    ):
        (_, shown) = of_prompt(0, scores, alternatives, name).top_logprobs
        assert shown == {"five": 0, "three": three["logprob"]}
        (_, entry) = msgspec.json.decode(as_prompt_logprobs(scores, alternatives, name))
        assert entry == {"5": five, "3": {**three, "decoded_token": "three"}}
    # Places without a token are left out.
    (_, entry) = msgspec.json.decode(as_prompt_logprobs(output([5], [0], [5, -1], [0, 0]), 2, name))
    assert entry == {"5": five}


def test_a_delta_without_tokens_has_no_entries_of_its_own() -> None:
    nothing = Delta(0, True, "", b"", b"", b"", b"", [0, 4], "length", None)
    assert of_delta(nothing, 2, name, None) == Logprobs([], [], [], [0, 4])
    echoed = of_prompt(5, output([3], [-1], [], []), 0, name)
    assert of_delta(nothing, 2, name, echoed) == Logprobs(
        ["five", "three"], [None, -1], [None, {"three": -1}], [0, 4]
    )


# Packed arrays are the engine's own, and a prompt's begin with what its first token has not


def unpacked(encoded: bytes) -> dict[str, list[Any]]:
    kinds = {"token_ids": "<i4", "ranks": "<i4", "top_token_ids": "<i4"}
    return {
        name: np.frombuffer(base64.b64decode(value), kinds.get(name, "<f4")).tolist()
        for name, value in msgspec.json.decode(encoded).items()
    }


OUTPUT = output([5, 6], [-1, -inf], [7, 5, 8, -1], [-0.5, -1, 0, 0])


def test_packed_samples_have_what_is_asked_for_and_the_token_that_stops() -> None:
    delta = packed.PackedSample(3, ()).feed(OUTPUT)
    asked = {k: unpacked(msgspec.json.encode(packed.of_delta(delta, k))) for k in (None, 0, 2)}
    assert asked[None] == {"token_ids": [5, 6]}
    assert asked[0] == {"token_ids": [5, 6], "logprobs": [-1, -inf]}
    assert asked[2] == asked[0] | {"top_token_ids": [7, 5, 8, -1], "top_logprobs": [-0.5, -1, 0, 0]}
    for stop_token_ids, expected in (((6,), 6), ((9,), None)):
        sample = packed.PackedSample(3, stop_token_ids)
        assert (sample.feed(OUTPUT), sample.finished) == (delta, False)
        end = sample.feed(msgspec.structs.replace(OUTPUT, finish_reason="stop"))
        stopped = replace(delta, is_first=False, finish_reason="stop", stop_reason=expected)
        assert (end, sample.finished) == (stopped, True)


def test_a_packed_prompt_has_an_entry_for_every_token() -> None:
    prompt, ids = array("i", [4, 5, 6]).tobytes(), {"token_ids": [4, 5, 6]}
    assert unpacked(bytes(packed.of_prompt(prompt, OUTPUT, None))) == ids
    scores = ids | {"logprobs": [nan, -1, -inf], "ranks": [0, 9, 9]}
    tops = {"top_token_ids": [-1, -1, 7, 5, 8, -1], "top_logprobs": [nan, nan, -0.5, -1, 0, 0]}
    for alternatives, expected in ((0, scores), (2, scores | tops)):
        found = unpacked(bytes(packed.of_prompt(prompt, OUTPUT, alternatives)))
        np.testing.assert_equal(found, expected)
