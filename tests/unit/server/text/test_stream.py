"""A completion cut at any token boundaries reads the same as in one piece."""

from __future__ import annotations

import codecs
from array import array
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import FinishReason, Output
from server.text.sample import Delta, Sample, StopStrings, join
from server.text.text import Text
from tests.serving import TEXT_MODEL

EOS = 1
ENDS: list[FinishReason] = ["stop", "length"]
tokens = st.lists(st.integers(0, TEXT_MODEL.vocab_size - 1), min_size=1, max_size=40)
cuts = st.lists(st.integers(0, 40))


def ints(ids: list[int]) -> bytes:
    return array("i", ids).tobytes()


def run(
    text: Text,
    ids: list[int],
    cuts: list[int],
    stops: list[str] | None = None,
    finish_reason: FinishReason = "length",
    stop_token_ids: tuple[int, ...] = (),
    echo: list[int] | None = None,
    **options: Any,
) -> list[Delta]:
    """The deltas of the tokens `ids`, delivered in pieces, each token with two alternatives."""
    options |= {"has_offsets": True, "echo": ints(echo or [])}
    sample = Sample(0, text, StopStrings(stops) if stops else None, stop_token_ids, **options)
    bounds = sorted({0, len(ids), *(cut for cut in cuts if 0 < cut < len(ids))})
    deltas = []
    for begin, end in pairwise(bounds):
        piece = ids[begin:end]
        output = Output(
            id="a",
            index=0,
            token_ids=ints(piece),
            logprobs=array("f", [-float(token) for token in piece]).tobytes(),
            top_ids=ints([token + i for token in piece for i in (0, 1)]),
            top_logprobs=array("f", [-token - i for token in piece for i in (0, 1)]).tobytes(),
            finish_reason=finish_reason if end == len(ids) else None,
        )
        deltas.append(sample.feed(output))
        if sample.finished:
            break
    assert sample.finished
    return deltas


@cache
def by_byte(text: Text) -> dict[bytes, int]:
    return {text.pieces(ints([i]))[0]: i for i in range(TEXT_MODEL.vocab_size)}


def ids_of(text: Text, data: str) -> list[int]:
    """One token per byte; the end of text if there is none."""
    return [by_byte(text)[bytes([byte])] for byte in data.encode()] or [EOS]


stops = st.none() | st.lists(st.text("ate é\ufffd", min_size=1, max_size=3), min_size=1)


@given(
    *(tokens, cuts, stops, tokens | st.just([])),
    *(st.booleans(), st.booleans(), st.sampled_from(ENDS)),
)
def test_cut_anywhere_it_reads_the_same(
    text: Text,
    ids: list[int],
    cuts: list[int],
    stops: list[str] | None,
    echo: list[int],
    with_special: bool,
    keeps_stop: bool,
    finish_reason: FinishReason,
) -> None:
    def read(cuts: list[int]) -> list[Delta]:
        options: dict[str, Any] = {"with_special": with_special, "keeps_stop": keeps_stop}
        return run(text, ids, cuts, stops, finish_reason, (), echo, **options)

    (whole,) = read([])
    pieces = read(list(range(len(ids))))
    assert join(pieces) == join(read(cuts)) == whole
    table = text.table(with_special).pieces(ints(echo) + whole.token_ids)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    counts = [len(decoder.decode(piece)) for piece in table]
    assert whole.text_offset == list(accumulate(counts, initial=0))[:-1]
    for delta in pieces:
        delta.text.encode()  # no half of a character
    if stops is None and (keeps_stop or finish_reason == "length"):
        assert whole.text == b"".join(table).decode("utf-8", "replace")
        assert whole.token_ids == ints(ids)


@given(
    *(st.text("abé", max_size=30) | st.text(), cuts),
    *(st.lists(st.text("abé", min_size=1, max_size=4)), st.booleans()),
)
def test_the_stop_string_complete_first_ends_it_however_delivered(
    text: Text, string: str, cuts: list[int], stops: list[str], keeps_stop: bool
) -> None:
    deltas = run(text, ids_of(text, string), cuts, stops, keeps_stop=keeps_stop)
    joined = join(deltas)
    found = [stop for stop in sorted(stops, key=len) if stop in string]
    if found:
        ends = {string.find(stop) + len(stop): stop for stop in found}
        end, stop = min(ends.items())
        assert (joined.finish_reason, joined.stop_reason) == ("stop", stop)
        assert joined.text + ("" if keeps_stop else stop) == string[:end]
        assert joined.num_tokens == len(string[:end].encode())
    else:
        assert (joined.text, joined.finish_reason, joined.stop_reason) == (string, "length", None)
        assert all(delta.text in string for delta in deltas), "half a character is shown"


@pytest.mark.parametrize("keeps_stop", [False, True])
@pytest.mark.parametrize("with_special", [False, True])
def test_the_token_that_stops_is_counted_and_may_be_kept(
    text: Text, with_special: bool, keeps_stop: bool
) -> None:
    a, b = ids_of(text, "ab")
    options: dict[str, Any] = {"with_special": with_special, "keeps_stop": keeps_stop}
    end = "<|end_of_text|>" if with_special else ""
    for last, name, reason in ((b, "b", b), (EOS, end, None)):
        delta = join(run(text, [a, last], [1], None, "stop", (b,), **options))
        assert delta.text == "a" + (name if keeps_stop else "")
        assert (delta.num_tokens, delta.stop_reason) == (2, reason)


def test_what_may_become_a_stop_string_is_held_back(text: Text) -> None:
    deltas = run(text, ids_of(text, "1##2##END3"), list(range(10)), ["##END"])
    assert [delta.text for delta in deltas] == ["1", "", "", "##2", "", "", "", "", ""]
    assert [delta.num_tokens for delta in deltas] == [1] * 9
    deltas = run(text, ids_of(text, "1##"), [1, 2], ["##END"])
    assert [delta.text for delta in deltas] == ["1", "", "##"]  # the last comes at the end


def test_a_stop_string_cuts_inside_a_token_and_takes_alternatives_along(text: Text) -> None:
    the = text.labels.index(" the")
    delta = join(run(text, [the, the], [], ["he"]))
    assert (delta.text, delta.num_tokens, delta.stop_reason) == (" t", 1, "he")
    ids = ids_of(text, "abcdef")
    (cut,), (whole,) = run(text, ids, [], ["cd"]), run(text, ids[:4], [])
    assert replace(cut, text="abcd", finish_reason="length", stop_reason=None) == whole


def test_stop_strings_are_not_looked_for_in_an_echoed_prompt(text: Text) -> None:
    prompt, ids = ids_of(text, "a stop b"), ids_of(text, "op c stop d")
    delta = join(run(text, ids, list(range(11)), ["stop"], echo=prompt))
    assert (delta.text, delta.stop_reason) == ("a stop bop c ", "stop")
