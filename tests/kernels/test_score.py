"""`srm_score` against the oracle: how likely what follows is, and which tokens are likeliest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from srm.engine.messages import MAX_LOGPROBS
from srm.engine.steps.batch import F32, I32
from tests.kernels import oracle
from tests.kernels.harness import Array, Ops, odd_rows, untouched
from tests.kernels.test_sampler import Settings, records
from tests.kernels.test_sampler import run as sample

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
    temperature: F32  # of the decode rows
    tokens: I32
    targets: I32  # of all rows
    rows: I32
    num_top: I32
    named: I32 = np.empty(0, np.int32)


def run(ops: Ops, asked: Rows) -> Found:
    """Decode row i is in the last slot but i."""
    decode = len(asked.tokens)
    retained = [Settings(temperature) for temperature in asked.temperature[::-1]] or [Settings()]
    sampling = records(retained, np.arange(len(retained)))
    slots = np.arange(decode, dtype=np.int32)[::-1].copy()
    given = asked.tokens, np.append(np.int32(-1), asked.targets[decode:]), *asked[4:]
    return Found(*ops.run("score", asked.logits, sampling, slots, *given))


def given(logits: F32, targets: Array, num_top: int = MAX_LOGPROBS) -> Rows:
    """Every row scored, none of them a decode row."""
    rows = np.arange(len(logits), dtype=np.int32)
    wanted, none = np.full_like(rows, num_top), rows[:0]
    return Rows(logits, none.astype(np.float32), none, targets.astype(np.int32), rows, wanted)


def check(result: Found, asked: Rows) -> None:
    """Ranks and ids are exact: they come of comparing the logits given."""
    for q, row in enumerate(asked.rows):
        is_decode = row < len(asked.tokens)
        target = int((asked.tokens if is_decode else asked.targets)[row])
        logprob, rank, likeliest = oracle.score(
            asked.logits[row].astype(np.float64),
            float(asked.temperature[row]) if is_decode else 1.0,
            *(target, int(asked.num_top[q]), asked.named.tolist()),
        )
        likeliest += [(-1, 0.0)] * (MAX_LOGPROBS - len(likeliest))
        ids, logprobs = zip(*likeliest, strict=True)
        assert (result.ranks[q], tuple(result.top_ids[q])) == (rank, ids)
        with np.errstate(over="ignore"):  # what float32 has no number for is infinite
            expected = np.array([logprob, *logprobs]).astype(np.float32)
        given = np.append(result.logprobs[q], result.top_logprobs[q])
        np.testing.assert_allclose(given, expected, rtol=2e-6, atol=2e-6)
        if target in ids:  # the same bits wherever a token appears
            assert result.top_logprobs[q, ids.index(target)] == result.logprobs[q]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_some_rows_of_a_batch(ops: Ops, vocab: int) -> None:
    """30 of 17 decode rows and 23 others."""
    rng, decode, head = np.random.default_rng(vocab), 17, 40
    rows = np.sort(rng.permutation(head)[:30]).astype(np.int32)
    asked = Rows(
        rng.normal(0, 3, (head, vocab)).astype(np.float32),
        rng.choice([0, 0.3, 1, 2.5], decode).astype(np.float32),
        rng.integers(vocab, size=decode, dtype=np.int32),
        np.where(np.arange(head) < decode, -1, rng.integers(vocab, size=head)).astype(np.int32),
        rows,
        rng.integers(MAX_LOGPROBS + 1, size=len(rows), dtype=np.int32),
    )
    lists = [rng.permutation(vocab)[:size] for size in (1, MAX_LOGPROBS, 3)]
    named = np.concatenate([[len(ids), *ids] for ids in lists]).astype(np.int32)
    begins = np.array([0, 2, 3 + len(lists[1])])
    asked.num_top[::4] = ~begins[rng.integers(3, size=len(rows[::4]))]  # some are of named tokens
    asked = asked._replace(named=named)
    together = run(ops, asked)
    check(together, asked)
    for part in (slice(0), *(slice(q, q + 1) for q in range(len(rows)))):  # none, or one alone
        alone = run(ops, asked._replace(rows=rows[part], num_top=asked.num_top[part]))
        for result, expected in zip(alone, together, strict=True):
            np.testing.assert_array_equal(result, expected[part], strict=True)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_equal_logits_go_by_id(ops: Ops, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = rng.integers(4, size=(30, vocab)).astype(np.float32)
    logits[:3] = 0
    logits[3:6, : vocab // 2], logits[3:6, vocab // 2 :] = -0.0, 0.0
    logits[6:12, 7:] = -np.inf  # after all others, and by id
    asked = given(logits, rng.integers(vocab, size=30))
    check(run(ops, asked), asked)


@pytest.mark.parametrize("vocab", [1, 5, 300, 700])
def test_odd_rows(ops: Ops, vocab: int) -> None:
    logits = odd_rows(vocab)
    asked = given(logits, np.arange(len(logits)) % vocab)
    ran = run(ops, asked)
    check(ran, asked)
    assert np.isnan(ran.logprobs[:5]).all() and (ran.top_ids[:5] == -1).all()


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 3.0])
def test_sampled_tokens_have_the_samplers_own_bits(ops: Ops, temperature: float) -> None:
    count, vocab, top_k = 200, 1000, 15
    logits = np.random.default_rng(0).normal(0, 2, (count, vocab)).astype(np.float32)
    tokens, logprobs = sample(ops, logits, Settings(temperature, top_k))
    temperatures = np.full(count, temperature, np.float32)
    asked = given(logits, np.full(count, -1))._replace(temperature=temperatures, tokens=tokens)
    ran, order = run(ops, asked), np.arange(count)
    np.testing.assert_array_equal(ran.logprobs, logprobs)
    places = ran.ranks - 1
    assert (places < top_k).all()
    np.testing.assert_array_equal(ran.top_ids[order, places], tokens)
    np.testing.assert_array_equal(ran.top_logprobs[order, places], logprobs)


def test_offsets_are_64_bit(cpu_ops: Ops) -> None:
    """Logits of more than 2^31 values, of which two rows are scored."""
    vocab, count = 8192, 2**31 // 8192 + 1
    logits, ends = untouched((count, vocab), np.float32), np.array([0, count - 1], np.int32)
    logits[ends] = np.random.default_rng(0).standard_normal((2, vocab)).astype(np.float32)
    targets = np.zeros(count, np.int32)
    small = given(logits[ends], targets[ends], num_top=3)
    large = given(logits, targets)._replace(rows=ends, num_top=small.num_top)
    for array, expected in zip(run(cpu_ops, large), run(cpu_ops, small), strict=True):
        np.testing.assert_array_equal(array, expected)
