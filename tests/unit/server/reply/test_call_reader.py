"""Calls are read from a text however it is cut."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from srm.server.reply.call_reader import CallReader

VALUES = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\{}[]é, :'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\{}'), inner),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from("fg"), st.dictionaries(st.text(), VALUES)), min_size=1, max_size=4
)


@given(calls=CALLS, cuts=st.lists(st.integers(1, 9), min_size=1), is_list=st.booleans())
def test_calls_are_read_however_their_text_is_cut(
    calls: list[tuple[str, Any]], cuts: list[int], is_list: bool
) -> None:
    texts = [(name, json.dumps(arguments)) for name, arguments in calls[: None if is_list else 1]]
    text = ",".join(f'{{"name":"{name}","arguments":{own}}}' for name, own in texts)
    text = f"[{text}]" if is_list else text
    reader, calls_read, at = CallReader(), list[list[str]](), 0
    while at < len(text):
        end = at + cuts[at % len(cuts)]
        for part in reader.read(text[at:end]):
            if part.name is not None:
                assert part.place == len(calls_read) and not part.arguments
                calls_read.append([part.name, ""])
            else:
                assert part.place == len(calls_read) - 1 and part.arguments
                calls_read[-1][1] += part.arguments
        at = end
    assert [tuple(call) for call in calls_read] == texts


def test_a_text_that_ends_early_has_what_was_written_of_its_calls() -> None:
    for text, expected in {
        '[{"name":"f","argu': [],
        '[{"name":"f","arguments":{"x": "a}': [(0, "f", ""), (0, None, '{"x": "a}')],
        '{"name":"f","arguments":{}}': [(0, "f", ""), (0, None, "{}")],
    }.items():
        assert CallReader().read(text) == expected
