"""`srm_taps` against the oracle, and its bits against themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kernels import oracle
from tests.kernels.harness import Ops

N_CTX = 512

Inputs = list[npt.NDArray[np.generic]]


def make(
    rng: np.random.Generator,
    lengths: Sequence[int],
    positions: Sequence[int],
    width: int,
    kernel_size: int,
) -> Inputs:
    """A batch and a layer's taps, in the order of the op's inputs."""

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    return [
        normal(sum(lengths), width),
        np.array(positions, np.int32),
        np.cumsum([0, *lengths]).astype(np.int32),
        normal(kernel_size, N_CTX),
        normal(N_CTX),
        normal(sum(lengths), width),
    ]


def check(ops: Ops, inputs: Inputs) -> None:
    exact: list[Any] = [a.astype(np.float64) if a.dtype == np.float32 else a for a in inputs]
    (y,) = ops.run("taps", *inputs)
    np.testing.assert_allclose(y, oracle.taps(*exact), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 7, 64])
@pytest.mark.parametrize("width", [1, 5, 16, 33, 96])
def test_widths_on_both_sides_of_the_kernel(ops: Ops, width: int, kernel_size: int) -> None:
    rng = np.random.default_rng(width)
    lengths, positions = [1, 0, 5, 0, 1, 30, 0], [0, 4, N_CTX - 5, 0, 17, 0, 1]
    check(ops, make(rng, lengths, positions, width, kernel_size))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1] * 100])
def test_any_mixture_of_lengths(ops: Ops, lengths: list[int]) -> None:
    rng = np.random.default_rng(len(lengths))
    check(ops, make(rng, lengths, rng.integers(N_CTX, size=len(lengths)).tolist(), 8, 3))


def test_nothing_left_of_channel_0_is_read(ops: Ops) -> None:
    """The last channels of a token lie in memory before the first ones of the next."""
    q, *rest = make(np.random.default_rng(0), [2], [0], 40, 4)
    (y,) = ops.run("taps", q, *rest)
    poisoned = q.copy()
    poisoned[0] = np.nan
    (with_nan,) = ops.run("taps", poisoned, *rest)
    np.testing.assert_array_equal(with_nan[1], y[1])
    assert np.isnan(with_nan[0]).all()


def test_a_token_gives_the_same_bits_in_any_company(ops: Ops) -> None:
    lengths, positions = [300, 200, 1, 77], [0, 100, 511, 9]
    inputs = make(np.random.default_rng(0), lengths, positions, 160, 4)
    (whole,) = ops.run("taps", *inputs)
    q, _, offsets, weight, beta, residual = inputs
    for position, begin, end in zip(positions, offsets[:-1], offsets[1:], strict=True):
        for step in (1, 64, 300):
            for first in range(begin, end, step):
                few = slice(first, min(first + step, end))
                where = [position + first - begin], [0, few.stop - few.start]
                rows = (np.array(values, np.int32) for values in where)
                (alone,) = ops.run("taps", q[few], *rows, weight, beta, residual[few])
                np.testing.assert_array_equal(alone, whole[few])
