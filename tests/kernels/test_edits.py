"""`srm_edit` against the oracle: biases, penalties and bans, on rows of any order and length."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from srm.engine.device.linear import round_bfloat16
from srm.engine.steps.batch import F32, I32, Span
from tests.kernels import oracle
from tests.kernels.harness import Ops, untouched, widened

TILE = 8192
"""Tokens that the op counts at a time."""
SHAPES = [(vocab, 12) for vocab in (1, 2, 33, 256, TILE - 1, TILE, TILE + 1, 2 * TILE + 300)]
SHAPES += [(250, 300)]
"""Vocabularies, and decode rows: the last is more than a core's share of rows."""
OTHERS = 3
"""Rows of the logits that are no decode rows."""


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
    masks: I32

    def only(self, part: slice) -> Rows:
        """The same edits of fewer rows."""
        rows, spans, penalties = self.rows[part], self.spans[part], self.penalties[part]
        return self._replace(rows=rows, spans=spans, penalties=penalties)


def run(ops: Ops, logits: npt.NDArray[np.generic], asked: Rows, name: str = "edit") -> None:
    """Changes the logits."""
    ops.run(name, asked.last_token, logits, *asked[1:])


def draw(rng: np.random.Generator, vocab: int, decode: int = 12) -> Rows:
    """Edits of two thirds of the decode rows, with tokens twice and at both ends."""
    rows = np.sort(rng.permutation(decode)[: 2 * decode // 3]).astype(np.int32)
    count, slots = len(rows), 3 * decode

    def some(most: int) -> I32:
        ids = np.append(rng.integers(vocab, size=rng.integers(most)), [0, vocab - 1])
        return ids[rng.integers(len(ids), size=rng.integers(most))].astype(np.int32)

    parts, spans = [np.unique(some(9)) for _ in range(3)], np.zeros((count, len(Span), 2), np.int32)
    bounds = np.cumsum([0, *map(len, parts)])  # of biases, which rows share
    last_token = rng.integers(vocab, size=slots, dtype=np.int32)
    read_slots = rng.permutation(slots)[: 2 * decode].astype(np.int32)
    for place, row in enumerate(rows):
        last = last_token[read_slots[row]]
        pairs = np.array([last, rng.integers(vocab), rng.integers(vocab), vocab // 2], np.int32)
        lists = some(40), some(5), pairs, some(30), some(600)
        which = rng.integers(3)
        spans[place, Span.BIASED] = bounds[which], bounds[which + 1]
        kinds = Span.ALLOWED, Span.BANNED, Span.PAIRS, Span.PROMPT, Span.SAMPLED
        for span, ids in zip(kinds, lists, strict=True):
            if rng.random() < 0.6:
                start = sum(map(len, parts))
                spans[place, span] = start, start + len(ids)
                parts.append(ids)
    words = -(-vocab // 32)
    masks = rng.integers(-(2**31), 2**31, (count, words))
    masks[::3] |= rng.integers(-(2**31), 2**31, masks[::3].shape)  # more ones
    is_masked = rng.random(count) < 0.5
    begins = np.arange(count) * words
    spans[is_masked, Span.MASK] = np.stack([begins, begins + words], axis=1)[is_masked]
    penalties = [rng.choice(some, count) for some in ([1, 0.5, 1.7], [0, 0.25, -1.5], [0, 2, -0.5])]
    return Rows(
        *(last_token, rng.choice([-1, -1, 0], decode + OTHERS).astype(np.int32), read_slots),
        *(rows, spans.reshape(count, -1), np.stack(penalties, axis=1).astype(np.float32)),
        np.concatenate(parts),
        rng.uniform(-100, 100, bounds[-1]).astype(np.float32),
        masks.reshape(-1).astype(np.int32),
    )


def expect(logits: npt.NDArray[np.float64], asked: Rows) -> npt.NDArray[np.float64]:
    new = logits.copy()
    for row, spans, penalties in zip(asked.rows, asked.spans, asked.penalties, strict=True):
        is_new = asked.token_ids[row] >= 0
        last = -1 if is_new else int(asked.last_token[asked.read_slots[row]])
        lists = asked.tokens, asked.biases, asked.masks
        new[row] = oracle.edit(logits[row], last, spans, penalties, *lists)
    return new


@pytest.mark.parametrize(("vocab", "decode"), SHAPES)
@pytest.mark.parametrize("seed", [0, 1])
def test_rows_are_the_oracles_and_do_not_depend_on_others(
    ops: Ops, vocab: int, decode: int, seed: int
) -> None:
    rng = np.random.default_rng([vocab, seed])
    asked = draw(rng, vocab, decode)
    before = rng.normal(0, 4, (decode + OTHERS, vocab)).astype(np.float32)
    together = before.copy()
    run(ops, together, asked)
    expected = expect(before.astype(np.float64), asked)
    np.testing.assert_allclose(together, expected, rtol=1e-6, atol=2e-5)
    for part in (slice(0), *(slice(place, place + 1) for place in range(8))):  # none, or one
        edited, alone = asked.only(part), before.copy()
        run(ops, alone, edited)
        is_edited = np.isin(np.arange(len(before)), edited.rows)[:, None]
        np.testing.assert_array_equal(alone, np.where(is_edited, together, before))
    others = np.setdiff1d(np.arange(len(before)), asked.rows)
    np.testing.assert_array_equal(together[others], before[others])


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


def test_slices_of_edited_rows_no_longer_hold(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    asked = draw(rng, 512)
    logits = rng.normal(0, 4, (15, 512)).astype(np.float32)
    slices = rng.normal(0, 4, (15, 2, 2)).astype(np.float32)
    expected, alone = slices.copy(), logits.copy()
    expected[asked.rows, 0, 0] = np.nan
    run(ops, alone, asked)
    ops.run("edit_slices", asked.last_token, logits, *asked[1:], slices)
    np.testing.assert_array_equal(slices, expected)
    np.testing.assert_array_equal(logits, alone)


def test_rows_that_are_no_distribution_stay_so(ops: Ops) -> None:
    """A broken model is not hidden by edits, but where they ban."""
    asked = draw(np.random.default_rng(0), 50)
    logits = np.full((15, 50), np.nan, np.float32)
    run(ops, logits, asked)
    banned = np.isneginf(expect(np.zeros((15, 50)), asked))
    np.testing.assert_array_equal(logits, np.where(banned, -np.inf, np.nan))


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
        np.empty(0, np.int32),
    )
    run(cpu_ops, logits, asked)
    for row in (0, count - 1):
        assert (logits[row, 7], logits[row, -1], logits[row, 8]) == (1.5, -2.5, 0)
