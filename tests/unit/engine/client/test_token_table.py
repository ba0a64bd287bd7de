"""Whatever is appended and read in whatever order: each row gives its tokens, each once."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client.token_queues import PAGE
from engine.client.token_table import NOBODY, UNUSED_READERS, Arrived, Stretches, TokenTable
from engine.steps.tokens import step_tokens
from tests.unit.engine.steps.test_tokens import read

WIDTH = 3
"""Alternatives in a step's rows. Those of token 7 are 7, 8, 9."""


def put(table: TokenTable, rows: dict[int, int], ends: set[int] | None = None) -> list[int]:
    """A token for each stream, with a log-probability that tells it; who reads them."""
    readers: list[int] = put_all(table, rows, ends).readers.tolist()
    return readers


def put_all(
    table: TokenTable, rows: dict[int, int], ends: set[int] | None, num_asking: int = 0
) -> Arrived:
    """The first `num_asking` rows have alternatives."""
    tokens = np.array(list(rows.values()), np.int32)
    reasons = np.array([2 * (stream in (ends or ())) for stream in rows], np.uint8)
    streams = np.array(list(rows), np.int64)
    top_ids = (tokens[:num_asking, None] + np.arange(WIDTH)).astype(np.int32)
    logprobs, top_logprobs = -tokens.astype(np.float32), -top_ids.astype(np.float32)
    return table.put(step_tokens(streams, tokens, reasons, logprobs, top_ids, top_logprobs))


def test_tokens_of_many_completions_of_a_closed_reader_are_dropped() -> None:
    """Row -2, which stands for none, and a completion's index were a row: IndexError, or a row of
    somebody else."""
    table = TokenTable()
    for size in (1, 5, 64, 66, 200, 5000):
        for has_rows in (False, True):
            left, stays = table.open(size, 1), table.open(2, 2)
            every = {left + index: 3 for index in range(size)}
            if has_rows:
                put(table, every)
            table.close(left, size)
            assert put(table, every) == []
            assert put_all(table, every | {stays + 1: 4}, None).readers.tolist() == [2]
            assert read(table.read_new(stays, 2)) == {1: [4]}
            assert table.reader(left + size - 1) == NOBODY
            table.close(stays, 2)


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(10, 60))
def test_rows_give_what_was_put_there(rng: random.Random, num_actions: int) -> None:
    table = TokenTable()
    direct: set[int] = set()  # first completions of those whose tokens are handed out
    opened: list[tuple[int, int]] = []
    num_top: dict[int, int] = {}  # by stream
    unread: dict[int, list[int]] = {}
    ended: set[int] = set()
    for action in range(num_actions):
        kind = rng.choice(["open", "close", "take", "take", "put", "put", "put"])
        if kind == "open" or not opened:
            size = rng.choice([1, 1, 2, 5])
            first = table.open(size, action, asked := rng.choice([0, 0, 2, WIDTH]))
            num_top |= dict.fromkeys(range(first, first + size), asked)
            assert unread.keys().isdisjoint(range(first, first + size))
            opened.append((first, size))
            unread |= {first + i: [] for i in range(size)}
        elif kind == "close":
            first, size = opened.pop(rng.randrange(len(opened)))
            table.close(first, size)
            direct.discard(first)
            late = put_all(table, {first: 1}, None)  # on its way when it was closed
            assert not len(late.readers) and late.direct is None
            for i in range(size):
                del unread[first + i]
        elif kind == "take":
            first, size = rng.choice(opened)
            content = read(table.read_new(first, size), num_top[first])
            assert all(unread[first + i] == content.get(i, []) for i in range(size))
            unread |= {first + i: [] for i in range(size)}
            assert not len(table.read_new(first, size))
            if rng.random() < 0.7:
                table.set_direct(first, True)
                direct.add(first)
        else:
            for _ in range(rng.choice([1, 3, PAGE, 40])):
                rows = {
                    s: rng.randrange(9_999) for s in unread if s not in ended and rng.random() < 0.7
                }
                asking = [stream for stream in rows if num_top[stream]]
                rows = {stream: rows[stream] for stream in asking} | rows
                ends = {stream for stream in rows if rng.random() < 0.01}
                arrived = put_all(table, rows, ends, len(asking))
                handed_out = {}
                if (out := arrived.direct) is not None:
                    handed_out = dict(zip(out.owners.tolist(), out.token_ids.tolist(), strict=True))
                    assert out.logprobs.tolist() == [-token for token in handed_out.values()]
                    firsts = [s for s in handed_out if num_top[s]]
                    assert [*handed_out][: len(firsts)] == firsts
                    assert out.top_ids[:, 0].tolist() == [handed_out[s] for s in firsts]
                ended |= ends
                direct -= {first for first, size in opened if ends & {*range(first, first + size)}}
                for stream, token in rows.items():
                    first = max(first for first, _ in opened if first <= stream)
                    if first in direct:
                        assert handed_out.pop(stream) == token
                    else:
                        unread[stream].append(token)
                assert not handed_out
    for first, size in opened:
        table.close(first, size)
    assert table.num_pages == 0 and table.num_alternatives == 0


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99))))
def test_stretches_never_overlap_and_gaps_that_touch_are_one(
    actions: list[tuple[int, int]],
) -> None:
    stretches, taken = Stretches(), list[tuple[int, int]]()
    for size, place in actions:
        if place % 3 or not taken:
            begin = stretches.allocate(size)
            used = {at for first, count in taken for at in range(first, first + count)}
            assert used.isdisjoint(range(begin, begin + size))
            gaps = "".join(" x"[at in used] for at in range(begin)).split("x")
            assert all(len(gap) < size for gap in gaps), "a gap before it had room"
            taken.append((begin, size))
        else:
            stretches.give_back(*taken.pop(place % len(taken)))
        assert stretches.end == max((first + count for first, count in taken), default=0)


def test_an_end_is_told_once_and_nothing_comes_behind_it() -> None:
    table = TokenTable()
    first = table.open(3, 7)
    assert put(table, {first: 5, first + 2: 6}, {first + 2}) == [7, 7]
    tokens = table.read_new(first, 3)
    assert (tokens.owners.tolist(), tokens.reasons.tolist()) == ([0, 2], [0, 2])
    assert put(table, {first: 8, first + 2: 9}) == [7]
    assert read(table.read_new(first, 3)) == {0: [8]}
    assert table.ended(first, 3).tolist() == [False, False, True]
    table = TokenTable()
    first = table.open(1, 0)
    error = np.array([3], np.uint8)  # which is no token
    table.put(step_tokens(np.array([first]), np.array([-1], np.int32), error))
    tokens = table.read_new(first, 1)
    assert (len(tokens.token_ids), tokens.reasons.tolist()) == (0, [3])


def test_what_is_muted_is_forgotten() -> None:
    table = TokenTable()
    first = table.open(4, 0)
    for _ in range(3 * PAGE):
        put(table, {first + i: i for i in range(4)})
    table.mute(first, np.array([1, 3]))
    assert put(table, {first + 1: 1, first + 2: 2}) == [0]
    assert read(table.read_new(first, 4)) == {0: [0] * 3 * PAGE, 2: [2] * (3 * PAGE + 1)}
    for step in range(500):  # what is read takes no memory
        put(table, {first: step})
        if step % 5 == 0:
            table.read_new(first, 4)
    assert table.num_pages <= 3
    table.close(first, 4)
    alone = table.open(1, 0)
    for tokens in (range(3 * PAGE + 2), range(PAGE - 2), range(1)):  # page by page, to a page's end
        for token in tokens:
            put(table, {alone: token})
        assert read(table.read_new(alone, 1)) == {0: [*tokens]}
    table.close(alone, 1)
    assert table.num_pages == 0


def test_a_number_is_not_used_again_soon() -> None:
    table, used = TokenTable(), list[int]()
    for _ in range(UNUSED_READERS + 2):
        used.append(table.open(1, 0))
        table.close(used[-1], 1)
    *first, last = used
    assert len(set(first)) == UNUSED_READERS + 1 and last in first
