"""`srm_embed` against the oracle: bits, since it only copies."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.harness import Ops, untouched


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


def test_offsets_are_64_bit(cpu_ops: Ops) -> None:
    """A table of more than 2^31 values and last tokens of more than 2^32 bytes."""
    width, vocab, slots = 64, 2**31 // 64 + 2, 2**30 + 2
    table, last_token = untouched((vocab, width), np.float32), untouched((slots,), np.int32)
    table[[5, vocab - 2, vocab - 1]] = np.array([[1], [2], [3]])
    last_token[[0, slots - 1]] = [5, vocab - 1]
    token_ids = np.array([-1, -1, vocab - 2, 5], np.int32)
    read_slots = np.array([0, slots - 1, 7], np.int32)

    (x,) = cpu_ops.run("embed", last_token, token_ids, read_slots, table)

    np.testing.assert_array_equal(x, np.repeat([[1], [3], [2], [1]], width, axis=1))
