"""Events of at least so many tokens, and nothing lost or late at the ends."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine.messages import FinishReason
from server.generation.pacing import Pacing
from server.text.sample import Delta, join


def delta(index: int, ids: list[int], is_first: bool, finish: FinishReason | None = None) -> Delta:
    token_ids = array("i", ids).tobytes()
    return Delta(index, is_first, str(ids), token_ids, b"", b"", b"", [], finish, None)


sizes = st.lists(st.integers(0, 4), min_size=1, max_size=20)


@given(st.integers(1, 9), st.lists(sizes, min_size=1, max_size=3))
def test_events_have_enough_tokens_and_miss_none(interval: int, choices: list[list[int]]) -> None:
    pacing = Pacing(interval)
    sent: list[list[Delta]] = [[] for _ in choices]
    whole: list[list[Delta]] = [[] for _ in choices]
    for turn in range(max(map(len, choices))):
        news = [
            delta(i, [turn] * lens[turn], turn == 0, "length" if turn == len(lens) - 1 else None)
            for i, lens in enumerate(choices)
            if turn < len(lens)
        ]
        for one in news:
            whole[one.index].append(one)
        for one in pacing.take(news):
            sent[one.index].append(one)
    for parts, expected in zip(sent, whole, strict=True):
        assert join(parts) == join(expected)
        assert all(part.num_tokens >= interval for part in parts[1:-1])
        assert parts[0] == expected[0]
    if interval == 1:
        assert [len(parts) for parts in sent] == [
            len([i for i, n in enumerate(lens) if n or i in (0, len(lens) - 1)]) for lens in choices
        ]
