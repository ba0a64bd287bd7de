"""Tokens that are joined, selected, sliced or sent say of each completion what they said before."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srm.engine.messages import REASONS, Output
from srm.engine.steps.tokens import Tokens, from_outputs, from_wire, join, join_steps, step_tokens


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


def tokens_of(part: dict[int, list[int]], reason: int = 0) -> Tokens:
    """Tokens, each with a log-probability that tells it, and two alternatives."""
    own = dict(sorted(part.items()))
    ids = np.array([token for each in own.values() for token in each], np.int32)
    top_ids = (ids[:, None] + np.arange(2)).astype(np.int32)
    offsets = np.cumsum([0, *map(len, own.values())], dtype=np.int64)
    reasons, logprobs = np.full(len(own), reason, np.uint8), -ids.astype(np.float32)
    owners, top_logprobs = np.array([*own], np.int64), -top_ids.astype(np.float32)
    return Tokens(owners, offsets, ids, reasons, logprobs, top_ids, top_logprobs)


def read(tokens: Tokens, num_top: int = 0) -> dict[int, list[int]]:
    """The tokens of each completion, all of whose scores must be those that tell them."""
    ids = tokens.token_ids
    assert np.array_equal(tokens.logprobs, -ids.astype(np.float32))
    if num_top and len(ids):
        assert np.array_equal(tokens.top_ids, ids[:, None] + np.arange(num_top))
        assert np.array_equal(tokens.top_logprobs, -tokens.top_ids)
    else:
        assert not tokens.top_ids.size
    assert len(tokens.owners) == len(tokens.reasons) == len(tokens) == len(tokens.offsets) - 1
    return {index: ids[begin:end].tolist() for index, begin, end, _ in tokens.rows()}


completions = st.dictionaries(st.integers(0, 6), st.lists(st.integers(0, 99), max_size=4))


@settings(max_examples=50)
@given(st.lists(completions, min_size=1, max_size=50), st.integers(1, 4), st.data())
def test_joining_joins_what_each_says_and_selecting_keeps_it(
    parts: list[dict[int, list[int]]], size: int, data: st.DataObject
) -> None:
    joined = join([tokens_of(part, reason=i % len(REASONS)) for i, part in enumerate(parts)])
    names = sorted({index for part in parts for index in part})
    expected = {i: [token for part in parts for token in part.get(i, [])] for i in names}
    assert read(joined, 2) == expected
    assert joined.owners.tolist() == names
    last = [max(i for i, part in enumerate(parts) if name in part) for name in names]
    assert joined.reasons.tolist() == [i % len(REASONS) for i in last]
    pieces = list(joined.slices(size))
    assert all(len(piece) <= size for piece in pieces)
    assert {i: own for piece in pieces for i, own in read(piece, 2).items()} == expected
    chosen = data.draw(st.sets(st.sampled_from(names)) if names else st.just(set()))
    selected = joined.select(np.isin(joined.owners, [*chosen]))
    assert read(selected, 2) == {i: own for i, own in expected.items() if i in chosen}
    assert selected.reasons.tolist() == [
        i % len(REASONS) for i, name in zip(last, names, strict=True) if name in chosen
    ]


step_rows = st.dictionaries(st.integers(0, 6), st.integers(0, 99), min_size=1)
steps = st.tuples(step_rows, st.sampled_from([None, 0, 2]), st.randoms())


@given(st.lists(steps, min_size=1, max_size=5))
def test_steps_are_joined_with_the_scores_that_each_has(
    steps: list[tuple[dict[int, int], int | None, random.Random]],
) -> None:
    """`2`: its first row alone has two alternatives; None: nobody asked for scores."""
    tables, expected = [], dict[int, list[tuple[int, float, int]]]()
    for rows, num_top, rng in steps:
        owners = rng.sample([*rows], len(rows))
        ids = np.array([rows[owner] for owner in owners], np.int32)
        top = np.array([[ids[0], 7]], np.int32)
        scores: list[Any] = [-ids.astype(np.float32), top, -top.astype(np.float32)]
        count = 0 if num_top is None else 3 if num_top else 1
        reasons = np.zeros(len(ids), np.uint8)
        tables.append(step_tokens(np.array(owners), ids, reasons, *scores[:count]))
        for at, owner in enumerate(owners):
            logprob = -float(ids[at]) if count else 0.0
            other = 7 if count == 3 and not at else -1
            expected.setdefault(owner, []).append((int(ids[at]), logprob, other))
    joined = join_steps(tables)
    is_scored = any(num_top is not None for _, num_top, _ in steps)
    is_topped = any(num_top for _, num_top, _ in steps)
    if len(steps) == 1:
        assert joined is tables[0]
        return
    assert len(joined.logprobs) == (len(joined.token_ids) if is_scored else 0)
    for owner, begin, end, _ in joined.rows():
        assert joined.token_ids[begin:end].tolist() == [id for id, _, _ in expected[owner]]
        if is_scored:
            assert joined.logprobs[begin:end].tolist() == [p for _, p, _ in expected[owner]]
        if is_topped:
            assert joined.top_ids[begin:end, 1].tolist() == [top for *_, top in expected[owner]]
    assert sorted(joined.owners.tolist()) == sorted(expected)


def test_outputs_become_tokens_in_order_and_joined() -> None:
    top = ints(0, 1, 2, 3)
    one = Output("r", 1, ints(5), logprobs=b"abcd", top_ids=top[:8], top_logprobs=top[:8])
    first = Output("r", 3, ints(6), logprobs=b"1234", top_ids=top[:8], top_logprobs=top[:8])
    second = Output("r", 3, ints(7), logprobs=b"5678", top_ids=top[8:], top_logprobs=top[8:])
    end = Output("r", 3, finish_reason="length")
    tokens = from_outputs([(3, first), (1, one), (3, second), (3, end)])
    assert [*tokens.rows()] == [(1, 0, 1, 0), (3, 1, 3, REASONS.index("length"))]
    assert tokens.token_ids.tobytes() == ints(5, 6, 7)
    assert tokens.logprobs.tobytes() == b"abcd12345678"
    assert tokens.top_ids.tobytes() == tokens.top_logprobs.tobytes() == top[:8] + top
    assert tokens.top_ids.shape == tokens.top_logprobs.shape == (3, 2)


@pytest.mark.parametrize("num_top", [None, 0, 1, 3, 255, 256, 70_000])
def test_a_message_carries_what_a_step_says(num_top: int | None) -> None:
    ids, top = np.array([5, 6, 7], np.int32), np.full((1, num_top or 0), 8)
    scores = [-ids.astype("<f4"), top.astype("<i4"), top.astype("<f4")]  # of the first row
    sent = step_tokens(np.array([9, 2**40, 3]), ids, np.arange(3, dtype=np.uint8),
                       *scores[: 0 if num_top is None else 3 if num_top else 1])  # fmt: skip
    come = from_wire(sent.to_wire())
    assert [*come.rows()] == [(9, 0, 1, 0), (2**40, 1, 2, 1), (3, 2, 3, 2)]
    for name in ("token_ids", "logprobs", "top_ids", "top_logprobs"):
        assert getattr(come, name).tolist() == getattr(sent, name).tolist()
    with pytest.raises(ValueError, match="buffer size"):
        from_wire([bytes(7), *sent.to_wire()[1:]])
