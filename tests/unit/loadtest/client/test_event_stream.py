from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from srm.loadtest.client.event_stream import EventParser

SPECIAL = "||data|data:|data: |: comment|id: 7|event: x|data: [DONE]"
LINES = st.one_of(
    st.sampled_from(SPECIAL.split("|")),
    st.text(alphabet="aä€😀:{ \t", max_size=6).map("data: {}".format),
    st.text(alphabet="ad:t ", max_size=6),
).map(str.encode)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
STREAMS = st.tuples(
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
    st.lists(st.tuples(LINES, ENDS).map(b"".join), max_size=12).map(b"".join),
    LINES,
).map(b"".join)


def brute_force(data: bytes) -> list[bytes]:
    """The standard's description, line by line over the whole; the end ends an event."""
    results: list[bytes] = []
    event: list[bytes] | None = None
    for line in [*re.split(rb"\r\n|\n|\r", data.removeprefix(b"\xef\xbb\xbf")), b""]:
        name, _, value = line.partition(b":")
        if name == b"data":
            event = [*(event or []), value.removeprefix(b" ")]
        elif not line and event is not None:
            results.append(b"\n".join(event))
            event = None
    return results


@given(STREAMS, st.lists(st.integers(0, 80), max_size=12))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", [8, 9, 10])
@example(b"\xef\xbb\xbfdata: a\n\n", [1, 2])
@example(b"data: " + b"x" * 70 + b"\n\n", list(range(0, 80, 3)))
def test_events_are_those_of_the_standard_however_the_bytes_are_split(
    data: bytes, cuts: list[int]
) -> None:
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    events = EventParser()
    results = [event for a, b in pairwise(places) for event in events.parse(data[a:b])]
    assert results + events.finish() == brute_force(data)


def test_an_event_is_told_as_soon_as_it_is_whole() -> None:
    events = EventParser()
    pieces = [b"data: a\n", b"\nda", b"ta: b\r\n\r", b"\n"]
    assert [events.parse(piece) for piece in pieces] == [[], [b"a"], [b"b"], []]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_an_event_named_error_is_noticed(end: bytes) -> None:
    events = EventParser()
    events.parse(b"event: error" + end + b"data: {}" + end + end)
    assert events.named_error
