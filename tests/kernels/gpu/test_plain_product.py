"""The GPU's product of any shape, run without a GPU, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from srm.engine.device.linear import round_bfloat16
from tests.kernels.harness import widened
from tests.kit.ptx.ptx import Kernel, compiled

TILE, THREADS = 64, 256
KINDS = [(False, False, False), (True, True, False), (True, False, True), (True, False, False)]
"""(has bias, has SiLU, has residual), as `plain_kernels.mojo` numbers them."""
SHAPES = [(1, 1, 1), (3, 128, 118), (65, 40, 17), (64, 16, 64), (130, 33, 70)]
"""Rows, depth and columns."""


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    return compiled("plain_kernels.mojo")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize(("rows", "depth", "columns"), SHAPES)
def test_any_shape(
    kernels: dict[str, Kernel], dtype: str, kind: int, rows: int, depth: int, columns: int
) -> None:
    rng = np.random.default_rng(rows)
    sizes = ((rows, depth), (columns, depth), (columns,), (rows, columns))
    drawn = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    stored = [round_bfloat16(array) if dtype == "bfloat16" else array for array in drawn]
    x, w, bias, residual = (
        (widened(array) if dtype == "bfloat16" else array).astype(np.float64) for array in stored
    )
    has_bias, silu, has_residual = KINDS[kind]
    expected = x @ w.T + bias * has_bias
    if silu:
        expected = expected / (1 + np.exp(-expected))
    expected += residual * has_residual
    out = np.full((rows, columns), 7, stored[0].dtype)
    grid = -(-rows // TILE), -(-columns // TILE)
    kernels[f"{dtype} {kind}"].launch(grid, THREADS, out, *stored, rows, depth, columns)
    got = widened(out) if dtype == "bfloat16" else out
    rounding = 2**-8 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(got, expected, rtol=rounding, atol=1e-5 * depth)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_has_the_same_bits_beside_others(kernels: dict[str, Kernel], dtype: str) -> None:
    rng = np.random.default_rng(1)
    drawn = [rng.standard_normal((rows, 50)).astype(np.float32) for rows in (70, 9)]
    x, w = (round_bfloat16(array) if dtype == "bfloat16" else array for array in drawn)
    outs = []
    for rows in (70, 1):
        out = np.zeros((rows, 9), x.dtype)
        own = np.ascontiguousarray(x[69:]) if rows == 1 else x
        grid = (-(-rows // TILE), 1)
        kernels[f"{dtype} 0"].launch(grid, THREADS, out, own, w, x, x, rows, 50, 9)
        outs.append(out[-1])
    np.testing.assert_array_equal(*outs)
