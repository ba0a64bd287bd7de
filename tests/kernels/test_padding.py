"""Logits with columns behind those of tokens: no op reads or writes these."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels import test_constraints, test_edits
from tests.kernels.harness import PADDING, READERS, Ops
from tests.kernels.test_sampler import random_settings, records
from tests.kit.engines.numpy_runner import ints

Array = npt.NDArray[Any]
LOGITS = {"edit": 1, "constrain": 2, "sample": 1, "reject": 1, "score": 0}
"""Places of the logits among the inputs."""
DECODE, OTHERS = 12, 3


def inputs_of(name: str, vocab: int) -> list[Array]:
    """Of DECODE rows, and of OTHERS that no token is sampled of."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 4, (DECODE + OTHERS, vocab)).astype(np.float32)
    slots = np.arange(DECODE, dtype=np.int32)
    sampling = records([random_settings(rng, vocab) for _ in slots], slots)
    match name:
        case "edit":
            edits = test_edits.draw(rng, vocab, DECODE)
            return [edits.last_token, logits, *edits[1:]]
        case "constrain":
            tables = test_constraints.draw(rng, vocab, DECODE)
            return [tables.last_token, ints(tables.records), logits, *tables[2:]]
        case "score":
            tokens, targets = (
                rng.integers(vocab, size=count, dtype=np.int32) for count in (DECODE, 1 + OTHERS)
            )
            rows = np.arange(DECODE + OTHERS, dtype=np.int32)
            num_top, named = (
                np.resize(np.array([0, 5, 20, ~0], np.int32), len(rows)),
                [1, vocab - 1],
            )
            asked = rows, num_top, np.array(named, np.int32)
            return [logits, sampling, slots, tokens, targets, *asked]
    return [np.zeros(DECODE, np.int32), logits, sampling, slots, slots]


@pytest.mark.parametrize("vocab", [6, 246, 1014])
@pytest.mark.parametrize("name", READERS)
def test_columns_behind_tokens_change_nothing(ops: Ops, name: str, vocab: int) -> None:
    plain, place = inputs_of(name, vocab), LOGITS[name]
    padded = [array.copy() for array in plain]
    around = (0, 0), (0, PADDING)
    padded[place] = np.pad(plain[place], around, constant_values=np.nan)
    before = plain[place].copy()
    results = ops.run(name, *plain), ops.run(f"{name}_padded", *padded)
    assert results[0] or (plain[place] != before).any()
    assert np.isnan(padded[place][:, vocab:]).all()
    padded[place] = padded[place][:, :vocab]
    for with_padding, without in zip([*padded, *results[1]], [*plain, *results[0]], strict=True):
        np.testing.assert_array_equal(with_padding, without)
