"""Events of at least so many tokens, and nothing lost or late at the ends."""

from __future__ import annotations

import json
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from srm.engine.messages import FinishReason, Output
from srm.server.generation.detokenize import ChoicePart, join
from srm.server.http.responses import frame
from srm.server.reply.format import encode_json, escape
from srm.server.reply.renderer import Pacing

sizes = st.lists(st.integers(0, 4), min_size=1, max_size=20)


@given(st.integers(1, 9), st.lists(sizes, min_size=1, max_size=3))
def test_events_have_enough_tokens_and_miss_none(interval: int, choices: list[list[int]]) -> None:
    def part_of(index: int, turn: int) -> ChoicePart:
        size, is_end = choices[index][turn], turn + 1 == len(choices[index])
        reason: FinishReason | None = "length" if is_end else None
        tokens = Output("", index, bytes([turn]) * 4 * size)
        return ChoicePart(index, turn == 0, f"{turn} " * size, tokens, [], reason, None)

    pacing, sent = Pacing(interval), defaultdict[int, list[ChoicePart]](list)
    for turn in range(max(map(len, choices))):
        parts = [part_of(i, turn) for i, own in enumerate(choices) if turn < len(own)]
        for part in pacing.release(parts):
            sent[part.index].append(part)
    for index, own in enumerate(choices):
        whole, parts = [part_of(index, turn) for turn in range(len(own))], sent[index]
        assert join(parts) == join(whole)
        assert parts[0] == whole[0]
        assert all(part.num_tokens >= interval for part in parts[1:-1])
        if interval == 1:
            assert parts == [item for item in whole if item.text or item in (whole[0], whole[-1])]


def test_no_reader_that_splits_lines_by_unicode_cuts_an_event() -> None:
    text = "a\x85b\u2028c\u2029d"
    event = frame([encode_json(text), b'"%b"' % escape(text)]).decode()
    assert len(event.splitlines()) == 4  # two events, each with an empty line behind it
    assert [json.loads(line[6:]) for line in event.splitlines() if line] == [text, text]
