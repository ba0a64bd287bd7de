from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loadtest.client.event_stream import EventParser

LINES = st.one_of(
    st.sampled_from(
        [
            b"",
            b"",
            b"data",
            b"data:",
            b"data: ",
            b": comment",
            b"id: 7",
            b"event: x",
            b"data: [DONE]",
        ]
    ),
    st.text(alphabet="aä€😀:{ \t", max_size=6).map(lambda text: b"data: " + text.encode()),
    st.text(alphabet="ad:t ", max_size=6).map(str.encode),
)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
STREAMS = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(LINES, ENDS).map(b"".join), max_size=12).map(b"".join),
    LINES,
).map(b"".join)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


def brute_force(data: bytes) -> list[bytes]:
    """The standard's description, line by line over the whole; the end ends an event."""
    found: list[bytes] = []
    event: list[bytes] | None = None
    for line in [*re.split(rb"\r\n|\n|\r", data.removeprefix(b"\xef\xbb\xbf")), b""]:
        if not line:
            if event is not None:
                found.append(b"\n".join(event))
            event = None
        elif line.split(b":", 1)[0] == b"data":
            value = line.split(b":", 1)[1] if b":" in line else b""
            event = [*(event or []), value[1:] if value[:1] == b" " else value]
    return found


@given(STREAMS, st.lists(st.integers(0, 80), max_size=12))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [8, 9, 10])
@example(b"\xef\xbb\xbfdata: a\n\n", [1, 2])
def test_events_are_those_of_the_standard_however_the_bytes_are_split(
    data: bytes, cuts: list[int]
) -> None:
    events = EventParser()
    found = [event for part in split(data, cuts) for event in events.feed(part)]
    assert found + events.finish() == brute_force(data)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_a_long_event_in_many_pieces(sizes: list[int]) -> None:
    body = b"x" * 200
    events = EventParser()
    found = []
    data = b"data: " + body + b"\n\n"
    place = 0
    while place < len(data):
        size = sizes[place % len(sizes)]
        found += events.feed(data[place : place + size])
        place += size
    assert found == [body]


def test_an_event_is_told_as_soon_as_it_is_whole() -> None:
    events = EventParser()
    assert events.feed(b"data: a\n") == []
    assert events.feed(b"\nda") == [b"a"]
    assert events.feed(b"ta: b\r\n\r") == [b"b"]
    assert events.feed(b"\n") == []


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_named_error_is_noticed(end: bytes) -> None:
    events = EventParser()
    events.feed(b"event: error" + end + b"data: {}" + end + end)
    assert events.named_error
