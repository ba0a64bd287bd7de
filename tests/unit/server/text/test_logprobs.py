"""What JSON and names cannot say of log-probabilities."""

from __future__ import annotations

import base64
from array import array
from dataclasses import replace
from math import inf, isnan
from typing import Any

import msgspec
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


def scored(top: list[int], top_logprobs: list[float], token: int, logprob: float) -> Output:
    return output([token], [logprob], top, top_logprobs)


def name(token: int) -> str:
    """Tokens 3 and 4 read the same."""
    return "three" if token == 4 else {3: "three", 5: "five"}.get(token, str(token))


def only(output: Output, alternatives: int) -> dict[str, float]:
    """The alternatives to the one token."""
    (_, top) = of_prompt(0, output, alternatives, name).top_logprobs
    assert top is not None
    return top


def test_tokens_that_read_the_same_do_not_hide_each_other() -> None:
    output = scored([3, 4, 5], [-0.5, -1, -2], 4, -1)
    assert only(output, 3) == {"three": -0.5, "token_id:4": -1, "five": -2}
    assert only(output, 1) == {"three": -0.5, "token_id:4": -1}
    assert only(output, 0) == {"three": -1}


@given(st.permutations(range(6)), st.integers(1, 6), st.integers(0, 5))
def test_the_maximum_stays_the_maximum_whatever_reads_the_same(
    order: list[int], alternatives: int, token: int
) -> None:
    logprobs = [-0.25 * (1 + place) for place in range(6)]
    output = scored(order, logprobs, token, logprobs[order.index(token)])
    found = of_prompt(0, output, alternatives, lambda i: "same" if i % 2 else "other")
    (_, top), (_, logprob) = found.top_logprobs, found.token_logprobs
    assert top is not None
    shown = set(order[:alternatives]) | {token}
    assert sorted(top.values()) == sorted(logprobs[order.index(one)] for one in shown)
    assert (logprob == max(top.values())) == (order[0] == token)


@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_every_token_has_its_own_alternatives(
    data: st.DataObject, kept: int, alternatives: int
) -> None:
    names = ["a", "b", "a", "c", "b", "d"]
    tops = data.draw(st.lists(st.permutations(range(6)), min_size=1, max_size=6))
    fills = data.draw(st.booleans())
    tops = [[*top[: kept - 1], top[kept - 1] if fills else -1] for top in tops]
    tokens = data.draw(st.lists(st.integers(0, 5), min_size=len(tops), max_size=len(tops)))
    scores = [-9.0 - i for i in range(len(tokens))]
    top_logprobs = [-float(place) for _ in tops for place in range(kept)]
    scored = output(tokens, scores, [token for top in tops for token in top], top_logprobs)
    found = of_prompt(0, scored, alternatives, names.__getitem__).top_logprobs[1:]
    for i, (token, top, shown) in enumerate(zip(tokens, tops, found, strict=True)):
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
    output = scored([5, 3], [0, -inf], 3, -inf)
    assert only(output, 2) == {"five": 0, "three": -9999}
    (_, entry) = msgspec.json.decode(as_prompt_logprobs(output, 2, name))
    five = {"logprob": 0, "rank": 1, "decoded_token": "five"}
    assert entry == {"5": five, "3": {"logprob": -9999, "rank": 2, "decoded_token": "three"}}
    # A token beyond the alternatives has its own rank; places without a token are left out.
    (_, entry) = msgspec.json.decode(as_prompt_logprobs(scored([5, 6], [0, -1], 3, -7), 1, name))
    assert entry == {"5": five, "3": {"logprob": -7, "rank": 9, "decoded_token": "three"}}
    output = scored([5, -1], [0, 0], 5, 0)
    assert only(output, 2) == {"five": 0}
    assert list(msgspec.json.decode(as_prompt_logprobs(output, 2, name))[1]) == ["5"]


def test_a_delta_without_tokens_has_no_entries_of_its_own() -> None:
    nothing = Delta(0, True, "", b"", b"", b"", b"", [], "length", None)
    assert of_delta(nothing, 2, name, None) == Logprobs([], [], [], [])
    echoed = of_prompt(5, scored([], [], 3, -1), 0, name)
    assert of_delta(replace(nothing, text_offset=[0, 4]), 2, name, echoed) == Logprobs(
        ["five", "three"], [None, -1], [None, {"three": -1}], [0, 4]
    )


# Packed arrays are the engine's own, and a prompt's begin with what its first token has not


def unpacked(encoded: bytes) -> dict[str, list[Any]]:
    kinds = {"token_ids": "i", "ranks": "i", "top_token_ids": "i"}
    return {
        name: memoryview(base64.b64decode(value)).cast(kinds.get(name, "f")).tolist()  # type: ignore[call-overload]
        for name, value in msgspec.json.decode(encoded).items()
    }


OUTPUT = output([5, 6], [-1, -inf], [7, 5, 8, -1], [-0.5, -1, 0, 0])


def test_only_what_is_asked_for_is_sent() -> None:
    sample = packed.PackedSample(3, ())
    delta = sample.feed(OUTPUT)
    assert (delta.index, delta.is_first, delta.text, sample.finished) == (3, True, "", False)
    asked = {k: unpacked(msgspec.json.encode(packed.of_delta(delta, k))) for k in (None, 0, 2)}
    assert asked[None] == {"token_ids": [5, 6]}
    assert asked[0] == {"token_ids": [5, 6], "logprobs": [-1, -inf]}
    assert asked[2] == asked[0] | {"top_token_ids": [7, 5, 8, -1], "top_logprobs": [-0.5, -1, 0, 0]}


def test_the_token_that_stops_is_told() -> None:
    for stop_token_ids, expected in (((6,), 6), ((9,), None)):
        sample = packed.PackedSample(0, stop_token_ids)
        delta = sample.feed(msgspec.structs.replace(OUTPUT, finish_reason="stop"))
        assert (delta.finish_reason, delta.stop_reason, sample.finished) == ("stop", expected, True)
        assert delta.token_ids == OUTPUT.token_ids


def test_a_prompts_arrays_have_an_entry_for_every_token() -> None:
    prompt = array("i", [4, 5, 6]).tobytes()
    assert unpacked(bytes(packed.of_prompt(prompt, OUTPUT, None))) == {"token_ids": [4, 5, 6]}
    found = unpacked(bytes(packed.of_prompt(prompt, OUTPUT, 2)))
    assert found["token_ids"] == [4, 5, 6]
    assert found["ranks"] == [0, 9, 9]
    assert found["top_token_ids"] == [-1, -1, 7, 5, 8, -1]
    assert isnan(found["logprobs"][0]) and found["logprobs"][1:] == [-1, -inf]
    assert found["top_logprobs"][2:] == [-0.5, -1, 0, 0]
    assert all(map(isnan, found["top_logprobs"][:2]))
    assert set(unpacked(bytes(packed.of_prompt(prompt, OUTPUT, 0)))) == {
        "token_ids",
        "logprobs",
        "ranks",
    }
