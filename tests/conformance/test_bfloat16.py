"""In bfloat16 the MAX step is the oracle's with the same values rounded, and invariant too.

The emulation computes in float64 and rounds to bfloat16 what the step keeps: weights, the residual
stream, and the output of every norm, product and mixer; states and logits it does not round. A sum
of the step that is float32 may fall on the other side of a tie, which moves one value by 2^-8, so
logits differ by as much as a few such values make; that is measured against what rounding does.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from max.dtype import DType

from srm.engine.device.linear import round_bfloat16
from tests.kernels.harness import widened
from tests.kit.engines.logits_model import LogitsModel
from tests.kit.engines.numpy_runner import F64, feed, in_float64
from tests.kit.models.forms import CONFIGS, ROUNDED, all_forms, folded, graphs

MODELS = folded(ROUNDED)


@cache
def in_max() -> dict[str, LogitsModel]:
    return graphs().bind(MODELS, DType.bfloat16)


def rounded(values: F64) -> F64:
    """Every value rounded to the nearest one that bfloat16 has."""
    return widened(round_bfloat16(values.astype(np.float32))).astype(np.float64)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_same_roundings(name: str) -> None:
    weights, model = MODELS[name], in_max()[name]
    ids = np.random.default_rng(3).integers(0, 97, 40, dtype=np.int32)
    result = model.run_batch(model.pool(), [(ids, 5, 5, 0)])
    narrow, states = in_float64(weights, rounded), [np.zeros(weights.config.state_width)] * 2
    emulated, exact = np.zeros(result.shape), np.zeros(result.shape)
    for position, token in enumerate(ids.tolist()):
        emulated[position], states[0] = feed(narrow, token, position, states[0], rounded)
        exact[position], states[1] = feed(weights, token, position, states[1])
    error, rounding = np.abs(result - emulated), np.abs(emulated - exact)
    assert rounding.mean() > 1e-4 * np.abs(exact).max()
    assert error.mean() < 0.3 * rounding.mean()
    assert error.max() < rounding.max()


@pytest.mark.parametrize("name", [*MODELS, *CONFIGS])
def test_any_chunking_and_company_give_the_same_bits(name: str) -> None:
    model = in_max()[name] if name in MODELS else all_forms()[name].max
    size, most = min(64, model.config.n_ctx), model.config.vocab_size
    ids, other = np.random.default_rng(4).integers(0, most, (2, size), dtype=np.int32)
    whole, parts = model.pool(), model.pool()
    expected = model.run_batch(whole, [(ids, 2, 2, 0)])
    results = []
    for start, stop in ((0, 1), (1, 14), (14, 15), (15, size)):
        rows = [(other[start:stop], 9, 9, start), (ids[start:stop], 4, 4, start)]
        results.append(model.run_batch(parts, rows)[stop - start :])
    assert np.array_equal(np.concatenate(results), expected)
    assert np.array_equal(parts[0].to_numpy()[4], whole[0].to_numpy()[2])
