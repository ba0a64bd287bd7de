"""`srm_expand` and `srm_embed` against the oracle: what a step's rows are."""

from __future__ import annotations

import numpy as np
import pytest

from srm.engine.steps.batch import I32
from tests.kernels import oracle
from tests.kernels.harness import Ops, untouched

SIZES = [(1, 0, 0), (0, 1, 0), (3, 0, 0), (3, 4, 1), (7, 2, 7), (2, 300, 0), (500, 40, 260)]
"""Decode rows, prefill rows, new rows."""


def rows_of(rng: np.random.Generator, decode: int, prefills: int, num_new: int) -> list[I32]:
    """Inputs of the op; any bits for records, in 1,000 slots."""
    slots = rng.permutation(1000)[:decode]
    new = rng.integers(-(2**31), 2**31, (num_new, 12))
    new[:, 0] = np.sort(rng.permutation(decode)[:num_new])
    new = new if num_new else np.full((1, 12), -1)
    prefill = rng.integers(1000, size=(1 + prefills, 4))
    prefill[:, 3] = decode + np.cumsum([0, *rng.integers(1, 9, prefills)])
    fed = np.append(-1, rng.integers(1000, size=prefill[-1, 3] - decode))
    sampling = rng.integers(-(2**31), 2**31, (1000, 9))
    given = sampling, slots, rng.integers(1000, size=decode), new, prefill, fed
    return [item.astype(np.int32) for item in given]


def check(given: list[I32], i32s: list[I32], sampling: I32) -> None:
    expected, after = oracle.expand(*given)
    for name, i32, wanted in zip(oracle.Rows._fields, i32s, expected, strict=True):
        np.testing.assert_array_equal(i32, wanted, err_msg=name, strict=True)
    np.testing.assert_array_equal(sampling, after)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_and_records(ops: Ops, sizes: tuple[int, int, int]) -> None:
    given = rows_of(np.random.default_rng(sum(sizes)), *sizes)
    sampling = given[0].copy()
    check(given, ops.run("expand", sampling, *given[1:]), sampling)


def test_of_many_rows(ops: Ops) -> None:
    """So many that cores share them."""
    slots, none = np.arange(70_000, dtype=np.int32)[::-1].copy(), np.zeros(1, np.int32)
    new = np.tile(slots[::7, None], 12)
    new[:, 0] = np.arange(0, len(slots), 7)
    prefill = np.array([[0, 0, 0, len(slots)]], np.int32)
    given = [np.zeros((len(slots), 9), np.int32), slots, slots, new, prefill, none]
    sampling = given[0].copy()
    check(given, ops.run("expand", sampling, *given[1:]), sampling)


def test_offsets_of_records_are_64_bit(cpu_ops: Ops) -> None:
    """Records of more than 2^31 values."""
    slots = 2**28
    sampling, last = untouched((slots, 9), np.int32), np.array([slots - 1], np.int32)
    new = np.arange(12, dtype=np.int32)[None]
    ends = np.array([[0, 0, 0, 1]], np.int32)
    cpu_ops.run("expand", sampling, last, last, new, ends, np.zeros(1, np.int32))
    assert sampling[-1].tolist() == list(range(3, 12)) and not sampling[0].any()


@pytest.mark.parametrize("width", [1, 7, 64, 257])
@pytest.mark.parametrize(("decode", "prefill"), [(0, 0), (1, 0), (0, 1), (3, 40), (500, 700)])
def test_rows_of_the_table(ops: Ops, width: int, decode: int, prefill: int) -> None:
    rng = np.random.default_rng(decode)
    slots, vocab, num_rows = 1000, 300, decode + (prefill > 0)
    table = rng.standard_normal((vocab, width)).astype(np.float32)
    last_token = rng.integers(vocab, size=slots, dtype=np.int32)
    token_ids = rng.integers(vocab, size=decode + prefill, dtype=np.int32)
    token_ids[:decode][rng.random(decode) < 0.5] = -1
    read_slots = rng.permutation(slots)[:num_rows].astype(np.int32)
    before = last_token.copy()

    (x,) = ops.run("embed", last_token, token_ids, read_slots, table)

    np.testing.assert_array_equal(x, oracle.embed(before, token_ids, read_slots, table))
    np.testing.assert_array_equal(last_token, before)


def test_offsets_of_the_table_are_64_bit(cpu_ops: Ops) -> None:
    """A table of more than 2^31 values and last tokens of more than 2^32 bytes."""
    width, vocab, slots = 64, 2**31 // 64 + 2, 2**30 + 2
    table, last_token = untouched((vocab, width), np.float32), untouched((slots,), np.int32)
    table[[5, vocab - 2, vocab - 1]] = np.array([[1], [2], [3]])
    last_token[[0, slots - 1]] = [5, vocab - 1]
    token_ids = np.array([-1, -1, vocab - 2, 5], np.int32)
    read_slots = np.array([0, slots - 1, 7], np.int32)

    (x,) = cpu_ops.run("embed", last_token, token_ids, read_slots, table)

    np.testing.assert_array_equal(x, np.repeat([[1], [3], [2], [1]], width, axis=1))
