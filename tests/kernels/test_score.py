"""`srm_score` against the oracle: how likely what follows is, and which tokens are likeliest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from engine.messages import MAX_LOGPROBS
from engine.steps.batch import F32, I32
from tests.kernels import oracle
from tests.kernels.harness import Array, Ops, untouched

VOCABULARIES = [1, 2, 19, 20, 21, 255, 256, 257, 1000, 8192]


class Found(NamedTuple):
    """What the op gives, row by row."""

    logprobs: F32
    ranks: I32
    top_ids: I32
    top_logprobs: F32


class Rows(NamedTuple):
    """What it is asked: the first `len(tokens)` rows of the logits are decode rows."""

    logits: F32
    temperature: F32
    tokens: I32
    targets: I32
    rows: I32
    num_top: I32


def run(ops: Ops, asked: Rows) -> Found:
    return Found(*ops.run("score", *asked))


def given(logits: F32, targets: Array, num_top: int = MAX_LOGPROBS) -> Rows:
    """Every row scored, none of them a decode row."""
    count = len(logits)
    none, rows = np.empty(0, np.int32), np.arange(count, dtype=np.int32)
    wanted = np.full(count, num_top, np.int32)
    return Rows(logits, np.empty(0, np.float32), none, targets.astype(np.int32), rows, wanted)


def draw(rng: np.random.Generator, vocab: int) -> Rows:
    """17 decode rows and 23 others, of which some are scored."""
    decode, head = 17, 40
    scored = np.sort(rng.permutation(head)[:30]).astype(np.int32)
    return Rows(
        rng.normal(0, 3, (head, vocab)).astype(np.float32),
        rng.choice([0, 0.3, 1, 2.5], decode).astype(np.float32),
        rng.integers(vocab, size=decode, dtype=np.int32),
        np.concatenate(
            [np.full(decode, -1), rng.integers(vocab, size=head - decode)], dtype=np.int32
        ),
        scored,
        rng.integers(MAX_LOGPROBS + 1, size=len(scored), dtype=np.int32),
    )


def check(found: Found, asked: Rows) -> None:
    """Ranks and ids are exact: they come of comparing the logits given."""
    for q, row in enumerate(asked.rows):
        is_decode = row < len(asked.tokens)
        logprob, rank, likeliest = oracle.score(
            asked.logits[row].astype(np.float64),
            float(asked.temperature[row]) if is_decode else 1.0,
            int((asked.tokens if is_decode else asked.targets)[row]),
            int(asked.num_top[q]),
        )
        np.testing.assert_allclose(found.logprobs[q], logprob, rtol=2e-6, atol=2e-6)
        assert found.ranks[q] == rank
        ids, logprobs = [list(column) for column in zip(*likeliest, strict=True)] or [[], []]
        padding = MAX_LOGPROBS - len(ids)
        assert found.top_ids[q].tolist() == ids + [-1] * padding
        np.testing.assert_allclose(
            found.top_logprobs[q], logprobs + [0.0] * padding, rtol=2e-6, atol=2e-6
        )


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_some_rows_of_a_batch(ops: Ops, vocab: int) -> None:
    asked = draw(np.random.default_rng(vocab), vocab)
    together = run(ops, asked)
    check(together, asked)
    for q in range(len(asked.rows)):  # which do not depend on the others
        one = slice(q, q + 1)
        alone = run(ops, asked._replace(rows=asked.rows[one], num_top=asked.num_top[one]))
        for found, expected in zip(alone, together, strict=True):
            np.testing.assert_array_equal(found, expected[one])
    none = np.empty(0, np.int32)
    nothing = run(ops, asked._replace(rows=none, num_top=none))
    assert [one.shape for one in nothing] == [(0,), (0,), (0, MAX_LOGPROBS), (0, MAX_LOGPROBS)]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_equal_logits_go_by_id(ops: Ops, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(4, size=(30, vocab)).astype(np.float32)
    logits[:3] = 0
    logits[3:6, : vocab // 2] = -0.0
    logits[3:6, vocab // 2 :] = 0.0
    logits[6:12, 7:] = -np.inf  # after all others, and by id
    asked = given(logits, rng.integers(vocab, size=30))
    found = run(ops, asked)
    check(found, asked)
    assert np.isneginf(found.top_logprobs[6:12, 7 : min(vocab, MAX_LOGPROBS)]).all()


def test_each_token_has_the_rank_of_its_place(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    row = rng.integers(9, size=MAX_LOGPROBS).astype(np.float32)
    found = run(ops, given(np.tile(row, (MAX_LOGPROBS, 1)), np.arange(MAX_LOGPROBS)))
    ids = found.top_ids[0]
    assert sorted(ids.tolist()) == list(range(MAX_LOGPROBS))
    assert found.ranks[ids].tolist() == list(range(1, MAX_LOGPROBS + 1))
    # The same bits wherever a token appears.
    np.testing.assert_array_equal(found.logprobs[ids], found.top_logprobs[0])


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
def test_sampled_tokens_have_the_samplers_own_bits(ops: Ops, temperature: float) -> None:
    rng = np.random.default_rng(0)
    count, vocab = 200, 1000
    logits = rng.normal(0, 2, (count, vocab)).astype(np.float32)
    temperatures = np.full(count, temperature, np.float32)
    order, ones = np.arange(count, dtype=np.int32), np.ones(count, np.float32)
    tokens, logprobs = ops.run(
        "sample",
        np.zeros(count, np.int32),
        logits,
        temperatures,
        np.full(count, 15, np.int32),
        *(ones, np.zeros(count, np.float32), np.arange(count, dtype=np.uint64)),
        *(order, order),
    )
    sampled = np.full(count, -1, np.int32)
    wanted = np.full(count, MAX_LOGPROBS, np.int32)
    found = run(ops, Rows(logits, temperatures, tokens, sampled, order, wanted))
    np.testing.assert_array_equal(found.logprobs, logprobs)
    places = found.ranks - 1
    assert (places < 15).all()
    np.testing.assert_array_equal(found.top_ids[order, places], tokens)
    np.testing.assert_array_equal(found.top_logprobs[order, places], logprobs)


@pytest.mark.parametrize("vocab", [1, 5, 700])
def test_rows_that_are_no_distribution(ops: Ops, vocab: int) -> None:
    logits = np.random.default_rng(0).standard_normal((6, vocab)).astype(np.float32)
    logits[0, 0] = np.nan
    logits[1, -1] = -np.float32(np.nan)
    logits[2, vocab // 2] = np.inf
    logits[3, :] = -np.inf
    logits[4, :] = np.nan
    found = run(ops, given(logits, np.zeros(6)))
    assert np.isnan(found.logprobs).tolist() == [True] * 5 + [False]
    assert found.ranks[:5].tolist() == [0] * 5
    assert (found.top_ids[:5] == -1).all() and not found.top_logprobs[:5].any()
    assert 1 <= found.ranks[5] <= vocab


def test_extreme_logits(ops: Ops) -> None:
    largest = np.finfo(np.float32).max
    logits = np.zeros((3, 300), np.float32)
    logits[0, 5] = largest
    logits[1] = -largest
    logits[1, 6] = -1e38
    logits[2] = 1e-40  # denormal: as good as 0
    found = run(ops, given(logits, np.array([5, 6, 0]), num_top=1))
    np.testing.assert_allclose(found.logprobs, [0, 0, -np.log(300)], atol=1e-5)
    assert found.top_ids[:, 0].tolist() == [5, 6, 0]


def test_offsets_are_64_bit(cpu_ops: Ops) -> None:
    """Logits of more than 2^31 values, of which two rows are scored."""
    vocab, count = 8192, 2**31 // 8192 + 1
    logits, ends = untouched((count, vocab), np.float32), np.array([0, count - 1], np.int32)
    logits[ends] = np.random.default_rng(0).standard_normal((2, vocab)).astype(np.float32)
    targets = np.zeros(count, np.int32)
    asked = given(logits, targets)._replace(rows=ends, num_top=np.array([3, 3], np.int32))
    found, small = run(cpu_ops, asked), given(logits[ends], targets[ends], num_top=3)
    for array, expected in zip(found, run(cpu_ops, small), strict=True):
        np.testing.assert_array_equal(array, expected)
