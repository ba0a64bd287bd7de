"""Whatever comes and is read in whatever order: each completion gives its tokens, each once."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from srm.engine.client.unread import IS_DIRECT, MORE_PARTS, UNUSED_READERS, TokenTable, UnreadTokens
from srm.engine.messages import REASONS
from srm.engine.steps.batch import I64
from srm.engine.steps.tokens import Tokens, step_tokens
from tests.unit.engine.steps.test_tokens import read

WIDTH = 3
"""Alternatives in a step's rows. Those of token 7 are 7, 8, 9."""


def put(table: TokenTable, rows: dict[int, int], ends: set[int], num_asking: int) -> Tokens | None:
    """A token for each stream number, with a log-probability that tells it; the first `num_asking`
    rows have alternatives. Returns what is handed out."""
    tokens = np.array(list(rows.values()), np.int32)
    reasons = np.array([2 * (stream in ends) for stream in rows], np.uint8)
    top_ids = (tokens[:num_asking, None] + np.arange(WIDTH)).astype(np.int32)
    logprobs, top_logprobs = -tokens.astype(np.float32), -top_ids.astype(np.float32)
    owners = np.array(list(rows), np.int64)
    return table.put(step_tokens(owners, tokens, reasons, logprobs, top_ids, top_logprobs), 1)


def numbers(reader: UnreadTokens) -> range:
    return range(reader.number << 20, (reader.number << 20) + len(reader.state))


@settings(max_examples=50)
@given(st.integers(0, 2**32), st.integers(10, 60))
def test_readers_get_what_came_for_them(seed: int, num_actions: int) -> None:
    rng = random.Random(seed)
    table = TokenTable(counts=False)
    table.version = 1
    opened: list[UnreadTokens] = []
    direct: set[int] = set()  # numbers of readers whose tokens are handed out
    unread: dict[int, list[int]] = {}  # by stream number
    ended: set[int] = set()
    for _ in range(num_actions):
        kind = rng.choice(["open", "close", "end", "read", "read", "put", "put", "put"])
        if kind == "open" or not opened:
            opened.append(table.open(rng.choice([1, 1, 2, 5]), 1, rng.choice([0, 0, 2, WIDTH])))
            assert unread.keys().isdisjoint(numbers(opened[-1]))
            unread |= {stream: [] for stream in numbers(opened[-1])}
            continue
        reader = rng.choice(opened)
        first = numbers(reader)[0]
        if kind == "close":
            opened.remove(reader)
            table.close(reader.number)
            direct.discard(reader.number)
            for stream in numbers(reader):
                del unread[stream]
            assert put(table, {first: 1}, set(), 0) is None  # on its way when it was closed
        elif kind == "end":
            stopped = rng.sample(numbers(reader), rng.randint(0, len(reader.state)))
            dropped = table.end(reader, np.array(stopped, np.int64) - first)
            assert dropped == sum(len(unread[stream]) for stream in stopped)
            ended |= {*stopped}
            unread |= {stream: [] for stream in stopped}
        elif kind == "read":
            only_ended = rng.random() < 0.4
            content = read(reader.read(only_ended), reader.num_top or 0)
            for stream in numbers(reader):
                expected = unread[stream] if stream in ended or not only_ended else []
                assert content.get(stream - first, []) == expected
                unread[stream] = unread[stream][len(expected) :]
            assert not len(reader.read(only_ended))
            if rng.random() < 0.7 and not any(unread[stream] for stream in numbers(reader)):
                table.flags[IS_DIRECT, reader.number] = True
                direct.add(reader.number)
        else:
            for _ in range(rng.choice([1, 3, 40])):
                streams = [s for s in unread if rng.random() < 0.7]
                rng.shuffle(streams)
                num_top = {s: item.num_top for item in opened for s in numbers(item)}
                streams.sort(key=lambda stream: not num_top[stream])
                rows = {stream: rng.randrange(9_999) for stream in streams}
                ends = {s for s in streams if s not in ended and rng.random() < 0.01}
                out = put(table, rows, ends, sum(bool(num_top[s]) for s in streams))
                direct -= {stream >> 20 for stream in ends}
                handed_out = {s for s in rows if s >> 20 in direct and s not in ended}
                assert (out is None) == (not handed_out)
                if out is not None:
                    assert out.owners.tolist() == [s for s in rows if s in handed_out]
                    assert out.token_ids.tolist() == [rows[s] for s in out.owners.tolist()]
                    assert out.logprobs.tolist() == [-t for t in out.token_ids.tolist()]
                    firsts = [rows[s] for s in out.owners.tolist() if num_top[s]]
                    assert out.top_ids[:, 0].tolist() == firsts
                for stream in rows.keys() - ended - handed_out:
                    unread[stream].append(rows[stream])
                ended |= ends


def test_an_end_is_told_once_and_nothing_comes_behind_it() -> None:
    table = TokenTable(counts=False)
    reader = table.open(3, 1, 0)
    first, _, last = numbers(reader)
    put(table, {last: 6, first: 5}, {last}, 0)
    tokens = reader.read()
    assert (tokens.owners.tolist(), tokens.reasons.tolist()) == ([0, 2], [0, 2])
    put(table, {first: 8, last: 9}, {last}, 0)
    assert read(reader.read()) == {0: [8]}
    error = np.array([REASONS.index("error")], np.uint8)  # which is no token
    table.put(step_tokens(np.array([first]), np.array([-1], np.int32), error), 1)
    tokens = reader.read(only_ended=True)
    assert (len(tokens.token_ids), tokens.reasons.tolist()) == (0, [3])


def test_of_many_tokens_little_more_is_kept() -> None:
    """Whether they come of one completion or of many, and also what is left of steps."""
    for size in (1, 100):
        table = TokenTable(counts=False)
        slow, fast = table.open(size, 1, None), table.open(1000, 1, None)
        ids: I64 = np.array([*numbers(slow), *numbers(fast)])
        zeros = np.zeros(len(ids), np.int32)
        for step in range(2000):
            reasons = np.full(len(ids), 2 * (step == 1999), np.uint8)
            table.put(step_tokens(ids, zeros, reasons), 1)
            fast.read()
            assert len(slow._parts) <= MORE_PARTS + 12
        (merged,) = slow._parts  # nothing of the steps' tables, once all has ended
        base = merged.token_ids if merged.token_ids.base is None else merged.token_ids.base
        assert base.size == len(merged.token_ids) == 2000 * size
        assert len(slow.read(only_ended=True).token_ids) == 2000 * size and not slow._parts


def test_a_number_is_not_used_again_soon() -> None:
    table, used = TokenTable(counts=False), list[int]()
    for _ in range(UNUSED_READERS + 2):
        used.append(table.open(1, 1, 0).number)
        table.close(used[-1])
    *first, last = used
    assert len(set(first)) == UNUSED_READERS + 1 and last in first
