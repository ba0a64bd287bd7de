"""`srm_edit` against the oracle: biases, penalties and bans, on rows of any order and length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from engine.device.linear import round_bfloat16
from engine.steps.batch import F32, I32, Span
from tests.kernels import oracle
from tests.kernels.harness import Ops, untouched, widened

TILE = 8192
"""Tokens that the op counts at a time."""
VOCABULARIES = [1, 2, 33, 256, TILE - 1, TILE, TILE + 1, 2 * TILE + 300]


class Rows(NamedTuple):
    """What the op is asked, after the logits, in its order."""

    last_token: I32
    token_ids: I32
    read_slots: I32
    rows: I32
    spans: I32
    penalties: F32
    tokens: I32
    biases: F32

    def last(self, place: int) -> int:
        row = self.rows[place]
        return -1 if self.token_ids[row] >= 0 else int(self.last_token[self.read_slots[row]])


def run(ops: Ops, logits: npt.NDArray[np.generic], asked: Rows, name: str = "edit") -> None:
    """Changes the logits."""
    ops.run(name, asked.last_token, logits, *asked[1:])


def draw(rng: np.random.Generator, vocab: int, decode: int = 12, head: int = 15) -> Rows:
    """Edits of two thirds of the decode rows, with tokens twice and at both ends."""
    rows = np.sort(rng.permutation(decode)[: 2 * decode // 3]).astype(np.int32)
    ends = np.array([0, vocab - 1])

    def some(most: int) -> I32:
        ids = np.concatenate([rng.integers(vocab, size=rng.integers(most)), ends])
        return ids[rng.integers(len(ids), size=rng.integers(most))].astype(np.int32)

    biased = [np.unique(some(9)) for _ in range(3)]
    parts, spans = list(biased), np.zeros((len(rows), len(Span), 2), np.int32)
    bounds = np.cumsum([0, *(len(part) for part in biased)])
    last_token = rng.integers(vocab, size=40, dtype=np.int32)
    read_slots = rng.permutation(40)[:20].astype(np.int32)
    for place, row in enumerate(rows):
        last = last_token[read_slots[row]]
        pairs = np.array([last, rng.integers(vocab), rng.integers(vocab), vocab // 2], np.int32)
        lists = {
            Span.ALLOWED: some(40),
            Span.BANNED: some(5),
            Span.PAIRS: pairs,
            Span.PROMPT: some(30),
            Span.SAMPLED: some(600),
        }
        which = rng.integers(3)
        spans[place, Span.BIASED] = bounds[which], bounds[which + 1]
        for span, ids in lists.items():
            if rng.random() < 0.6:
                start = sum(map(len, parts))
                spans[place, span] = start, start + len(ids)
                parts.append(ids)
    count = len(rows)
    return Rows(
        last_token,
        rng.choice([-1, -1, 0], head).astype(np.int32),
        read_slots,
        rows,
        spans.reshape(count, -1),
        np.stack(
            [
                rng.choice([1, 0.5, 1.7], count),
                rng.choice([0, 0.25, -1.5], count),
                rng.choice([0, 2, -0.5], count),
            ],
            axis=1,
        ).astype(np.float32),
        np.concatenate(parts),
        rng.uniform(-100, 100, bounds[-1]).astype(np.float32),
    )


def expect(logits: npt.NDArray[np.float64], asked: Rows) -> npt.NDArray[np.float64]:
    new = logits.copy()
    for place, row in enumerate(asked.rows):
        spans, penalties = asked.spans[place], asked.penalties[place]
        new[row] = oracle.edit(
            logits[row], asked.last(place), spans, penalties, asked.tokens, asked.biases
        )
    return new


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_are_the_oracles_and_do_not_depend_on_others(ops: Ops, vocab: int, seed: int) -> None:
    rng = np.random.default_rng([vocab, seed])
    asked = draw(rng, vocab)
    before = rng.normal(0, 4, (15, vocab)).astype(np.float32)
    together = before.copy()
    run(ops, together, asked)
    expected = expect(before.astype(np.float64), asked)
    np.testing.assert_allclose(together, expected, rtol=1e-6, atol=2e-5)
    others = np.setdiff1d(np.arange(15), asked.rows)
    np.testing.assert_array_equal(together[others], before[others])
    for place, row in enumerate(asked.rows):
        alone = before.copy()
        run(ops, alone, only(asked, slice(place, place + 1)))
        np.testing.assert_array_equal(alone[row], together[row])
    alone = before.copy()
    run(ops, alone, only(asked, slice(0)))
    np.testing.assert_array_equal(alone, before)


def only(asked: Rows, part: slice) -> Rows:
    """The same edits of fewer rows."""
    return asked._replace(
        rows=asked.rows[part], spans=asked.spans[part], penalties=asked.penalties[part]
    )


@pytest.mark.parametrize("vocab", [33, TILE + 1])
def test_bfloat16_is_rounded_after_the_bias_and_after_the_penalties(ops: Ops, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    asked = draw(rng, vocab)
    bits = round_bfloat16(rng.normal(0, 4, (15, vocab)).astype(np.float32))
    expected = expect(widened(bits).astype(np.float64), asked)
    run(ops, bits, asked, "edit_bfloat16")
    finite = np.isfinite(expected)
    assert (np.isfinite(widened(bits)) == finite).all()
    # Half a unit of 8 bits each time, of numbers up to the bias.
    size = np.abs(expected[finite]) + 100 * (np.abs(expected[finite]) > 50)
    assert (np.abs(widened(bits)[finite] - expected[finite]) <= size * 2**-7 + 2**-4).all()


def test_many_rows_that_share_their_lists(ops: Ops) -> None:
    """More than a core's share of work."""
    rng, vocab, count = np.random.default_rng(0), 700, 300
    asked = draw(rng, vocab)
    all_rows, zeros = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
    asked = asked._replace(
        token_ids=zeros,
        read_slots=zeros,
        rows=all_rows,
        spans=np.tile(asked.spans[:1], (count, 1)),
        penalties=np.tile(asked.penalties[:1], (count, 1)),
    )
    logits = np.tile(rng.normal(0, 4, vocab).astype(np.float32), (count, 1))
    expected = expect(logits[:1].astype(np.float64), asked._replace(rows=all_rows[:1]))
    run(ops, logits, asked)
    np.testing.assert_allclose(logits, np.tile(expected, (count, 1)), rtol=1e-6, atol=2e-5)


def test_rows_that_are_no_distribution_stay_so(ops: Ops) -> None:
    """A broken model is not hidden by edits, but where they ban."""
    asked = draw(np.random.default_rng(0), 50)
    logits = np.full((15, 50), np.nan, np.float32)
    run(ops, logits, asked)
    assert (np.isnan(logits) | np.isneginf(logits)).all()
    banned = np.isneginf(expect(np.zeros((15, 50)), asked))
    np.testing.assert_array_equal(np.isneginf(logits), banned)


def test_offsets_are_64_bit(cpu_ops: Ops) -> None:
    """Logits of more than 2^31 values, of which two rows are edited."""
    vocab, count = TILE, 2**31 // TILE + 1
    logits = untouched((count, vocab), np.float32)
    no_ids, spans = np.zeros(count, np.int32), np.zeros((2, 2 * len(Span)), np.int32)
    spans[:, 2 * Span.BIASED + 1], spans[:, 2 * Span.SAMPLED + 1] = 1, 2
    asked = Rows(
        *(np.zeros(1, np.int32), no_ids, no_ids, np.array([0, count - 1], np.int32), spans),
        np.array([[1, 0.5, 2]] * 2, np.float32),
        np.array([7, vocab - 1], np.int32),
        np.array([4], np.float32),
    )
    run(cpu_ops, logits, asked)
    for row in (0, count - 1):
        assert (logits[row, 7], logits[row, -1], logits[row, 8]) == (1.5, -2.5, 0)
