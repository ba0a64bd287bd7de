"""A completion cut at any token boundaries reads the same as in one piece."""

from __future__ import annotations

import codecs
import random
from array import array
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.messages import REASONS, FinishReason
from srm.engine.steps.tokens import Tokens, step_tokens
from srm.engine.steps.tokens import join as join_tokens
from srm.server.generation.detokenize import ChoicePart, Detokenizer, join
from srm.server.text.stream import StopFinder
from srm.server.text.text import Text
from tests.kit.bodies.refusals import completion
from tests.kit.serving import TEXT_MODEL

EOS = 1
STOP = REASONS.index("stop")
ENDS: list[FinishReason] = ["stop", "length"]
tokens = st.lists(st.integers(0, TEXT_MODEL.vocab_size - 1), min_size=1, max_size=40)
cuts = st.lists(st.integers(0, 40))
KEPT: dict[str, Any] = {"include_stop_str_in_output": True}
SPECIAL: dict[str, Any] = {"skip_special_tokens": False}


def ints(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def detokenizer_of(
    text: Text, stops: list[str] | None = None, *stop_token_ids: int, **fields: Any
) -> Detokenizer:
    """Of a request with these fields, whose prompt is the tokens `prompt`."""
    request = completion(**{"prompt": [5], "logprobs": 2, "stop": stops or [], **fields})
    return Detokenizer(request, [ints(fields.get("prompt", [5]))], text, stop_token_ids)


def run(
    text: Text,
    ids: list[int],
    cuts: list[int],
    stops: list[str] | None = None,
    reason: FinishReason = "length",
    *stop_token_ids: int,
    **fields: Any,
) -> list[ChoicePart]:
    """The parts of the tokens `ids`, read in pieces, each token with two alternatives."""
    detokenizer = detokenizer_of(text, stops, *stop_token_ids, **fields)
    finder, rows, parts = detokenizer.finder, list[Tokens](), list[ChoicePart]()
    for place, token in enumerate(ids, 1):
        reasons = np.array([REASONS.index(reason) * (place == len(ids))], np.uint8)
        own = np.array([0]), np.array([token], np.int32)
        if finder is not None and finder.find(*own, reasons):
            reasons[:] = STOP
        top_ids = np.array([[token, token + 1]], np.int32)
        rows.append(
            step_tokens(*own, reasons, -own[1].astype("<f4"), top_ids, -top_ids.astype("<f4"))
        )
        if reasons.any():
            break
    bounds = {0, len(rows), *(cut for cut in cuts if 0 < cut < len(rows))}
    for begin, end in pairwise(sorted(bounds)):
        parts += detokenizer.decode(join_tokens(rows[begin:end]))
    assert parts[-1].finish_reason
    assert detokenizer.num_tokens == join(parts).num_tokens
    return parts


@cache
def by_byte(text: Text) -> dict[bytes, int]:
    return {text.pieces(ints([i]))[0]: i for i in range(TEXT_MODEL.vocab_size)}


def ids_of(text: Text, data: str) -> list[int]:
    """One token per byte; the end of text if there is none."""
    return [by_byte(text)[bytes([byte])] for byte in data.encode()] or [EOS]


stops = st.none() | st.lists(st.text("ate é\ufffd", min_size=1, max_size=3), min_size=1)


@given(
    *(tokens, cuts, stops, tokens | st.none()),
    *(st.booleans(), st.booleans(), st.sampled_from(ENDS)),
)
def test_cut_anywhere_it_reads_the_same(
    text: Text,
    ids: list[int],
    cuts: list[int],
    stops: list[str] | None,
    echo: list[int] | None,
    is_special: bool,
    is_kept: bool,
    reason: FinishReason,
) -> None:
    fields = (SPECIAL if is_special else {}) | (KEPT if is_kept else {})
    fields |= {"echo": True, "prompt": echo} if echo else {}

    def read(cuts: list[int]) -> list[ChoicePart]:
        return run(text, ids, cuts, stops, reason, **fields)

    (whole,) = read([])
    parts = read(list(range(len(ids))))
    assert join(parts) == join(read(cuts)) == whole
    pieces = text.table(is_special).pieces(ints(echo or []) + whole.token_ids)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    counts = [len(decoder.decode(piece)) for piece in pieces]
    assert whole.text_offset == list(accumulate(counts, initial=0))[:-1]
    for part in parts:
        part.text.encode()  # no half of a character
    if stops is None and (is_kept or reason == "length"):
        assert whole.text == b"".join(pieces).decode("utf-8", "replace")
        assert whole.token_ids == ints(ids)


@given(
    *(st.text("abé", max_size=30) | st.text(), cuts),
    *(st.lists(st.text("abé", min_size=1, max_size=4)), st.booleans()),
)
def test_the_stop_string_complete_first_ends_it(
    text: Text, string: str, cuts: list[int], stops: list[str], is_kept: bool
) -> None:
    parts = run(text, ids_of(text, string), cuts, stops, **KEPT if is_kept else {})
    joined = join(parts)
    results = [stop for stop in sorted(stops, key=len) if stop in string]
    if results:
        ends = {string.find(stop) + len(stop): stop for stop in results}
        end, stop = min(ends.items())
        assert (joined.finish_reason, joined.stop_reason) == ("stop", stop)
        assert joined.text + ("" if is_kept else stop) == string[:end]
        assert joined.num_tokens == len(string[:end].encode())
    else:
        assert (joined.text, joined.finish_reason, joined.stop_reason) == (string, "length", None)
        assert all(part.text in string for part in parts), "half a character is shown"


@pytest.mark.parametrize("entries", [{}, KEPT])
@pytest.mark.parametrize("special", [{}, SPECIAL])
def test_counts_a_stop_token(text: Text, special: dict[str, Any], entries: dict[str, Any]) -> None:
    a, b = ids_of(text, "ab")
    end = "<|end_of_text|>" if special else ""
    for last, name, reason in ((b, "b", b), (EOS, end, None)):
        part = join(run(text, [a, last], [1], None, "stop", b, **special, **entries))
        assert part.text == "a" + (name if entries else "")
        assert (part.num_tokens, part.stop_reason) == (2, reason)


def test_what_may_become_a_stop_string_is_held_back(text: Text) -> None:
    parts = run(text, ids_of(text, "1##2##END3"), list(range(10)), ["##END"])
    assert [part.text for part in parts] == ["1", "", "", "##2", "", "", "", "", ""]
    assert [part.num_tokens for part in parts] == [1] * 9
    parts = run(text, ids_of(text, "1##"), [1, 2], ["##END"])
    assert [part.text for part in parts] == ["1", "", "##"]  # the last comes at the end


def test_a_stop_string_cuts_inside_a_token(text: Text) -> None:
    the = text.labels.index(" the")
    part = join(run(text, [the, the], [], ["he"]))
    assert (part.text, part.num_tokens, part.stop_reason) == (" t", 1, "he")
    ids = ids_of(text, "abcdef")
    (cut,), (whole,) = run(text, ids, [], ["cd"]), run(text, ids[:4], [])
    assert replace(cut, text="abcd", finish_reason="length", stop_reason=None) == whole


def test_stop_strings_are_not_looked_for_in_an_echoed_prompt(text: Text) -> None:
    prompt, ids = ids_of(text, "a stop b"), ids_of(text, "op c stop d")
    part = join(run(text, ids, list(range(11)), ["stop"], echo=True, prompt=prompt))
    assert (part.text, part.stop_reason) == ("a stop bop c ", "stop")


@given(st.lists(st.text("abcé", max_size=20), min_size=1, max_size=6), st.randoms())
def test_each_completion_ends_at_its_own_stop_string(
    text: Text, strings: list[str], rng: random.Random
) -> None:
    stops = [stop.encode() for stop in ("ab", "bca", "é", "cc")]
    finder = StopFinder([stop.decode() for stop in stops], text.table(), len(strings), False)
    left = {index: ids_of(text, string) for index, string in enumerate(strings)}
    sizes = {index: len(ids) for index, ids in left.items()}
    ends = dict[int, int]()
    while left := {index: ids for index, ids in left.items() if ids and index not in ends}:
        indices = np.array(rng.sample([*left], rng.randint(1, len(left))))
        token_ids = np.array([left[index].pop(0) for index in indices.tolist()], np.int32)
        for place in finder.find(indices, token_ids, np.zeros(len(indices), np.uint8)):
            index = indices[place].item()
            ends[index] = sizes[index] - len(left[index])
    data = [string.encode() for string in strings]
    expected = {
        index: min(own.find(stop) + len(stop) for stop in stops if stop in own)
        for index, own in enumerate(data)
        if any(stop in own for stop in stops)
    }
    assert ends == expected
