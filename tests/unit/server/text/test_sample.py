"""A completion cut at any token boundaries reads the same as in one piece."""

from __future__ import annotations

import codecs
from array import array
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import FinishReason, Output
from server.text.sample import Delta, Sample, StopStrings, join
from server.text.text import Text
from tests.serving import TEXT_MODEL

EOS = 1
ENDS: list[FinishReason] = ["stop", "length"]


@pytest.fixture(scope="module")
def text(text_model: Path) -> Text:
    return Text(text_model)


def run(
    text: Text,
    ids: list[int],
    cuts: list[int],
    stops: list[str] | None = None,
    finish_reason: FinishReason = "length",
    stop_token_ids: tuple[int, ...] = (),
    echo: list[int] | None = None,
    with_special: bool = False,
    keeps_stop: bool = False,
) -> list[Delta]:
    """The deltas of the tokens `ids`, delivered in pieces, each token with two alternatives."""
    sample = Sample(
        0,
        text,
        StopStrings(stops) if stops else None,
        stop_token_ids,
        has_offsets=True,
        echo=array("i", echo or []).tobytes(),
        with_special=with_special,
        keeps_stop=keeps_stop,
    )
    bounds = sorted({0, len(ids), *(cut for cut in cuts if 0 < cut < len(ids))})
    deltas = []
    for begin, end in pairwise(bounds):
        piece = ids[begin:end]
        output = Output(
            id="a",
            index=0,
            token_ids=array("i", piece).tobytes(),
            logprobs=array("f", [-float(token) for token in piece]).tobytes(),
            top_ids=array("i", [token + i for token in piece for i in (0, 1)]).tobytes(),
            top_logprobs=array("f", [-token - i for token in piece for i in (0, 1)]).tobytes(),
            finish_reason=finish_reason if end == len(ids) else None,
        )
        deltas.append(sample.feed(output))
        if sample.finished:
            break
    assert sample.finished
    return deltas


def ids_of(text: Text, data: bytes) -> list[int]:
    """One token per byte."""
    by_byte = {text.pieces(array("i", [i]).tobytes())[0]: i for i in range(TEXT_MODEL.vocab_size)}
    return [by_byte[data[i : i + 1]] for i in range(len(data))]


tokens = st.lists(st.integers(0, TEXT_MODEL.vocab_size - 1), min_size=1, max_size=40)
cuts = st.lists(st.integers(0, 40))


@given(tokens, cuts)
def test_cut_anywhere_it_reads_the_same(text: Text, ids: list[int], cuts: list[int]) -> None:
    (whole,) = run(text, ids, [])
    joined = join(run(text, ids, cuts))
    assert joined == whole
    assert whole.text == text.decode(array("i", ids).tobytes()).decode("utf-8", "replace")
    assert whole.token_ids == array("i", ids).tobytes()


stops = st.none() | st.lists(st.text("ate é\ufffd", min_size=1, max_size=3), min_size=1)


@given(tokens, stops, tokens | st.just([]), st.booleans(), st.booleans(), st.sampled_from(ENDS))
def test_cut_at_every_token_it_reads_the_same(
    text: Text,
    ids: list[int],
    stops: list[str] | None,
    echo: list[int],
    with_special: bool,
    keeps_stop: bool,
    finish_reason: FinishReason,
) -> None:
    def read(cuts: list[int]) -> list[Delta]:
        return run(text, ids, cuts, stops, finish_reason, (), echo, with_special, keeps_stop)

    (whole,) = read([])
    pieces = read(list(range(len(ids))))
    assert join(pieces) == whole
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    counts = [
        len(decoder.decode(piece))
        for piece in text.table(with_special).pieces(array("i", echo).tobytes() + whole.token_ids)
    ]
    assert whole.text_offset == list(accumulate(counts, initial=0))[:-1]
    for delta in pieces:
        delta.text.encode()  # no half of a character


@given(tokens, cuts)
def test_with_special_tokens_nothing_is_left_out(
    text: Text, ids: list[int], cuts: list[int]
) -> None:
    names = {0: b"<|begin_of_text|>", 1: b"<|end_of_text|>"}
    pieces = [names.get(i) or text.pieces(array("i", [i]).tobytes())[0] for i in ids]
    whole = join(run(text, ids, cuts, with_special=True))
    assert whole.text == b"".join(pieces).decode("utf-8", "replace")


@given(st.text("abé", max_size=30), cuts, st.text("abé", min_size=1, max_size=3))
def test_the_stop_string_may_be_kept(text: Text, string: str, cuts: list[int], stop: str) -> None:
    ids = ids_of(text, string.encode()) or [EOS]
    before, found, _ = string.partition(stop)
    delta = join(run(text, ids, cuts, [stop], keeps_stop=True))
    assert (delta.text, delta.stop_reason) == (before + found, found or None)


@pytest.mark.parametrize("keeps_stop", [False, True])
@pytest.mark.parametrize("with_special", [False, True])
def test_the_token_that_stops_may_be_kept(text: Text, with_special: bool, keeps_stop: bool) -> None:
    a, b = ids_of(text, b"ab")
    for last, name in ((b, "b"), (EOS, "<|end_of_text|>" if with_special else "")):
        delta = join(
            run(
                *(text, [a, last], [1], None, "stop", (b,)),
                with_special=with_special,
                keeps_stop=keeps_stop,
            )
        )
        assert delta.text == "a" + (name if keeps_stop else "")


@given(st.text(), cuts)
def test_no_piece_shows_half_a_character(text: Text, string: str, cuts: list[int]) -> None:
    ids = ids_of(text, string.encode()) or [EOS]
    deltas = run(text, ids, cuts)
    assert "".join(delta.text for delta in deltas) == string
    assert all(delta.text in string for delta in deltas)


@given(st.text("ab", max_size=30), cuts, st.lists(st.text("ab", min_size=1, max_size=4)))
def test_the_stop_string_complete_first_ends_it_however_delivered(
    text: Text, string: str, cuts: list[int], stops: list[str]
) -> None:
    ids = ids_of(text, string.encode()) or [EOS]
    joined = join(run(text, ids, cuts, stops))
    found = [stop for stop in sorted(stops, key=len) if stop in string]
    if found:
        ends = {string.find(stop) + len(stop): stop for stop in found}
        end, stop = min(ends.items())
        assert (joined.finish_reason, joined.stop_reason) == ("stop", stop)
        assert joined.text + stop == string[:end]
        assert joined.num_tokens == end
    else:
        assert (joined.text, joined.finish_reason, joined.stop_reason) == (string, "length", None)


@given(st.text("ab", max_size=30), cuts, st.text("abé", min_size=1, max_size=4))
def test_one_stop_string_gives_the_text_before_it(
    text: Text, string: str, cuts: list[int], stop: str
) -> None:
    ids = ids_of(text, string.encode()) or [EOS]
    assert join(run(text, ids, cuts, [stop])).text == string.partition(stop)[0]


def test_what_may_become_a_stop_string_is_held_back(text: Text) -> None:
    deltas = run(text, ids_of(text, b"1##2##END3"), list(range(10)), ["##END"])
    assert [delta.text for delta in deltas] == ["1", "", "", "##2", "", "", "", "", ""]
    assert [delta.num_tokens for delta in deltas] == [1] * 9
    assert deltas[-1].finish_reason == "stop"


def test_what_was_held_back_comes_when_the_completion_ends(text: Text) -> None:
    deltas = run(text, ids_of(text, b"1##"), [1, 2], ["##END"])
    assert [delta.text for delta in deltas] == ["1", "", "##"]


def test_a_stop_string_inside_a_token_cuts_inside_it(text: Text) -> None:
    (the,) = [i for i, label in enumerate(text.labels) if label == " the"]
    delta = join(run(text, [the, the], [], ["he"]))
    assert (delta.text, delta.num_tokens, delta.stop_reason) == (" t", 1, "he")


def test_the_token_that_stops_is_counted_and_not_read(text: Text) -> None:
    a, b = ids_of(text, b"ab")
    delta = join(run(text, [a, b], [1], finish_reason="stop", stop_token_ids=(b,)))
    assert (delta.text, delta.num_tokens, delta.stop_reason) == ("a", 2, b)
    delta = join(run(text, [a, EOS], [1], finish_reason="stop"))
    assert (delta.text, delta.num_tokens, delta.stop_reason) == ("a", 2, None)


def test_offsets_count_characters(text: Text) -> None:
    ids = ids_of(text, "aé€b".encode())
    joined = join(run(text, ids, [2, 3]))
    assert joined.text_offset == [0, 1, 1, 2, 2, 2, 3]
    assert joined.logprobs == array("f", [-float(token) for token in ids]).tobytes()


@given(tokens, tokens, cuts)
def test_an_echoed_prompt_comes_first_however_delivered(
    text: Text, prompt: list[int], ids: list[int], cuts: list[int]
) -> None:
    deltas = run(text, ids, cuts, echo=prompt)
    (together,) = run(text, prompt + ids, [])
    whole = join(deltas)
    assert (whole.text, whole.text_offset) == (together.text, together.text_offset)
    assert whole.token_ids == array("i", ids).tobytes()
    assert len(deltas[0].text_offset) == len(prompt) + deltas[0].num_tokens


def test_stop_strings_are_not_looked_for_in_an_echoed_prompt(text: Text) -> None:
    prompt, ids = ids_of(text, b"a stop b"), ids_of(text, b"op c stop d")
    delta = join(run(text, ids, list(range(11)), ["stop"], echo=prompt))
    assert (delta.text, delta.stop_reason) == ("a stop bop c ", "stop")


def test_a_stop_string_takes_its_alternatives_along(text: Text) -> None:
    ids = ids_of(text, b"abcdef")
    (delta,) = run(text, ids, [], ["cd"])
    assert delta.num_tokens == 4
    assert delta.top_ids == array("i", [token + i for token in ids[:4] for i in (0, 1)]).tobytes()
    assert len(delta.top_logprobs) == len(delta.top_ids)
