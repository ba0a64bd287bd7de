"""`srm_linear` and `srm_layer_norm` against float64 numpy, and their bits against themselves.

Everything holds in float32, in bfloat16 as this processor multiplies it, and in bfloat16 as one
does that has no product for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from max.dtype import DType
from max.graph import DeviceRef

from srm.engine.device.linear import PANEL, linear_shape, pack_linear, round_bfloat16
from srm.engine.steps.batch import F32
from tests.kernels.harness import EPILOGUES, KINDS, PRODUCTS, Array, Ops, widened

F64 = npt.NDArray[np.float64]
ROW_COUNTS = [0, 1, 2, 3, 5, 7, 11, 12, 13, 25, 64, 257]
# Both sides of a panel and of the length at which a sum is cut, with and without remainders.
SHAPES = [(32, 32), (32, 1), (255, 100), (256, 1024), (1000, 257), (1537, 96), (2049, 33)]
HALF_ULP = 2.0**-8
"""What rounding to bfloat16 may change, relative."""
each_dtype = pytest.mark.parametrize("kind", ["float32", "bfloat16"])


def kind_of(name: str) -> str:
    return name.partition(".")[0]


def encoded(kind: str, values: Array) -> Array:
    return np.ascontiguousarray(values, np.float32) if kind == "float32" else round_bfloat16(values)


def decoded(array: Array) -> F32:
    return widened(array) if array.dtype == np.uint16 else np.asarray(array, np.float32)


def rounded(kind: str, values: Array) -> F32:
    """Values that the kind can hold."""
    return decoded(encoded(kind, np.asarray(values, np.float32)))


def rounding(name: str) -> float:
    """Relative error of a product that is exact but for being kept; logits are float32."""
    return 1e-6 if "float32" in name or "head" in name else HALF_ULP


def packed(name: str, weight: F32) -> Array:
    return pack_linear(weight, KINDS[kind_of(name)])


def multiply(ops: Ops, name: str, x: F32, weight: Array, bias: F32, residual: F32) -> F32:
    """With a weight that is packed."""
    x, bias, residual = (encoded(kind_of(name), array) for array in (x, bias, residual))
    return decoded(ops.run(name, x, weight, bias, residual)[0])


def draw(name: str, tokens: int, depth: int, columns: int) -> list[F32]:
    """x, weight, bias and residual of ordinary values."""
    shapes = [(tokens, depth), (depth, columns), (columns,), (tokens, columns)]
    rng = np.random.default_rng([tokens, depth, columns])
    x, weight, *others = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return [rounded(kind_of(name), array) for array in (x, weight / np.sqrt(depth), *others)]


def exact(name: str, x: F32, weight: F32, bias: F32, residual: F32) -> F64:
    has_bias, silu, has_residual = EPILOGUES[name.partition(".")[2]]
    y = x.astype(np.float64) @ weight.astype(np.float64)
    y += bias if has_bias else 0
    y /= 1 + np.exp(-y) if silu else 1
    return y + residual if has_residual else y


def chain(depth: int) -> float:
    """Error of a chain of `depth` roundings of float32 sums of size about 1."""
    return float(3e-7 * np.sqrt(depth) + 1e-6)


@pytest.mark.parametrize("name", PRODUCTS)
def test_linear_matches_float64_in_the_rows_asked_for(cpu_ops: Ops, name: str) -> None:
    for depth, columns in SHAPES:
        x, weight, bias, residual = draw(name, 257, depth, columns)
        expected, within = exact(name, x, weight, bias, residual), chain(depth)
        given = packed(name, weight)
        for rows in ROW_COUNTS:
            y = multiply(cpu_ops, name, x[:rows], given, bias, residual[:rows])
            assert y.shape == (rows, columns)
            np.testing.assert_allclose(y, expected[:rows], rtol=rounding(name), atol=within)
        x[17:] = np.nan
        y = multiply(cpu_ops, name, x[:40], given, bias, residual[:17])
        np.testing.assert_allclose(y, expected[:17], rtol=rounding(name), atol=within)


@pytest.mark.parametrize("name", PRODUCTS)
def test_linear_rows_do_not_depend_on_their_neighbours(cpu_ops: Ops, name: str) -> None:
    for depth, columns in ((256, 100), (1001, 257), (2049, 640)):
        x, weight, bias, residual = draw(name, 300, depth, columns)
        given = packed(name, weight)
        whole = multiply(cpu_ops, name, x, given, bias, residual)
        for rows in (*range(1, 14), 64, 65, 200):
            some = np.random.default_rng(rows).permutation(300)[:rows]
            part = multiply(cpu_ops, name, x[some], given, bias, residual[some])
            np.testing.assert_array_equal(part, whole[some])
        x[7, 3] = np.nan
        y = multiply(cpu_ops, name, x[:20], given, bias, residual[:20])
        assert np.isnan(y[7]).all() and np.isfinite(np.delete(y, 7, axis=0)).all()


def test_a_processors_product_of_bfloat16_is_the_widened_one(cpu_ops: Ops) -> None:
    """In float32 sums, whose bits differ at most by how two products of a pair are rounded."""
    x, weight, bias, residual = draw("bfloat16.head", 37, 2049, 161)
    given = packed("bfloat16.head", weight)
    inputs = x, given, bias, residual
    result, wide = (multiply(cpu_ops, f"{kind}.head", *inputs) for kind in ("bfloat16", "widened"))
    np.testing.assert_allclose(result, wide, rtol=0, atol=chain(2049))


@each_dtype
def test_silu_is_accurate_over_its_range(cpu_ops: Ops, kind: str) -> None:
    z = np.concatenate([np.linspace(-87, 87, 3000), np.geomspace(1e-20, 1, 200), [0, -200, 200]])
    x = rounded(kind, z)[:, None]
    one, none = packed(kind, np.ones((1, 1), np.float32)), np.zeros(1, np.float32)
    y = multiply(cpu_ops, f"{kind}.up", x, one, none, x)
    expected = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    rtol = 4e-7 if kind == "float32" else HALF_ULP
    np.testing.assert_allclose(y, expected, rtol=rtol, atol=1e-36)


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_pack_linear_pads_with_zeros(dtype: DType) -> None:
    for depth in (4, 5):
        for columns in (1, 31, 32, 33, 100):
            weight = np.random.default_rng(columns).standard_normal((depth, columns), np.float32)
            packed = pack_linear(weight, dtype)
            assert packed.shape == linear_shape(depth, columns, DeviceRef.CPU(), dtype)
            flat = packed.transpose(1, 3, 0, 2).reshape(-1, packed.shape[0] * PANEL)
            bits = weight if dtype == DType.float32 else round_bfloat16(weight)
            np.testing.assert_array_equal(flat[:depth, :columns], bits)
            assert not flat[:, columns:].any() and not flat[depth:].any()


def test_round_bfloat16_is_to_nearest_ties_to_even() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    assert (round_bfloat16(ties) == [0x3F80, 0x3F82, 0xBF80, 0x3F81]).all()
    special = np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38, 1e-40], np.float32)
    assert (round_bfloat16(special) == [0, 0x8000, 0x7F80, 0xFF80, 0x7F80, 1]).all()
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert (round_bfloat16(nans) == 0x7FC0).all()


@each_dtype
@pytest.mark.parametrize("width", [1, 8, 32, 100, 256, 1024])
def test_layer_norm_matches_float64_whatever_its_neighbours(
    cpu_ops: Ops, kind: str, width: int
) -> None:
    x, _, bias, residual = draw(kind, 300, width, width)
    x, weight = rounded(kind, x * 3 + 50), residual[0]
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    variance = (centred**2).mean(axis=1, keepdims=True)
    expected = centred / np.sqrt(variance + 1e-5) * weight + bias

    def normed(x: F32) -> F32:
        inputs = (encoded(kind, array) for array in (x, weight, bias))
        return decoded(cpu_ops.run(f"{kind}.layer_norm", *inputs)[0])

    whole, rtol = normed(x), 1e-5 if kind == "float32" else HALF_ULP
    np.testing.assert_allclose(whole, expected, rtol=rtol, atol=1e-5)
    for rows in (0, 1, 2, 3, 77):
        some = np.random.default_rng(rows).permutation(300)[:rows]
        np.testing.assert_array_equal(normed(x[some]), whole[some])
