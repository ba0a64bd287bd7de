"""`srm_linear` and `srm_layer_norm` against float64 numpy, and their bits against themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType, TensorValue

from engine.batch import F32
from engine.linear import KERNELS, PANEL, layer_norm, linear, linear_shape, pack_linear

F64 = npt.NDArray[np.float64]

ROW_COUNTS = [0, 1, 2, 3, 5, 7, 11, 12, 13, 25, 64, 257]
# Both sides of a panel and of the length at which a sum is cut, with and without remainders.
SHAPES = [(32, 32), (32, 1), (256, 100), (256, 1024), (1000, 257), (1536, 96)]
# What the model does: (has bias, has SiLU, has residual).
EPILOGUES = {
    "up": (True, True, False),
    "down": (True, False, True),
    "proj_in": (True, False, False),
    "head": (False, False, False),
}


def build(name: str, module: Module) -> None:
    """A product whose every dimension is symbolic. Unused inputs give the dimensions a value."""
    has_bias, silu, has_residual = EPILOGUES[name]
    on = DeviceRef.CPU()
    inputs = (
        TensorType(DType.float32, ["tokens", "depth"], on),
        TensorType(DType.float32, ["panels", "depth", PANEL], on),
        TensorType(DType.float32, ["columns"], on),
        TensorType(DType.float32, ["rows", "columns"], on),
    )
    with Graph(name, input_types=inputs, custom_extensions=[KERNELS], module=module) as graph:
        x, weight, bias, residual = (value.tensor for value in graph.inputs)
        y = linear(
            x,
            weight,
            "columns",
            bias=bias if has_bias else None,
            silu=silu,
            residual=residual if has_residual else None,
            rows="rows",
        )
        graph.output(y)


def build_layer_norm(module: Module) -> None:
    on = DeviceRef.CPU()
    row = TensorType(DType.float32, ["width"], on)
    inputs = (TensorType(DType.float32, ["tokens", "width"], on), row, row)
    with Graph(
        "layer_norm", input_types=inputs, custom_extensions=[KERNELS], module=module
    ) as graph:
        operands: list[TensorValue] = [value.tensor for value in graph.inputs]
        graph.output(layer_norm(*operands))


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    module = Module()
    for name in EPILOGUES:
        build(name, module)
    build_layer_norm(module)
    session = InferenceSession(devices=[CPU()])
    return dict(session.load_all(module, custom_extensions=[KERNELS]))


def run(model: Model, *arrays: npt.NDArray[Any]) -> F32:
    buffers = [Buffer.from_numpy(np.ascontiguousarray(array, np.float32)) for array in arrays]
    result: F32 = model.execute(*buffers)[0].to_numpy()
    return result


def draw(tokens: int, depth: int, columns: int, rows: int | None = None) -> list[F32]:
    """x, weight, bias and residual, of ordinary sizes."""
    rng = np.random.default_rng([tokens, depth, columns])
    shapes = [(tokens, depth), (depth, columns), (columns,), (rows or tokens, columns)]
    x, weight, bias, residual = (rng.standard_normal(shape, np.float32) for shape in shapes)
    return [x, weight / np.float32(np.sqrt(depth)), bias, residual]


def expected(name: str, x: F32, weight: F32, bias: F32, residual: F32) -> F64:
    has_bias, silu, has_residual = EPILOGUES[name]
    y = x[: len(residual)].astype(np.float64) @ weight.astype(np.float64)
    if has_bias:
        y += bias
    if silu:
        y /= 1 + np.exp(-y)
    return y + residual if has_residual else y


@pytest.mark.parametrize(("depth", "columns"), SHAPES)
@pytest.mark.parametrize("name", EPILOGUES)
def test_linear_matches_float64(
    models: dict[str, Model], name: str, depth: int, columns: int
) -> None:
    for rows in ROW_COUNTS:
        x, weight, bias, residual = draw(rows, depth, columns)
        y = run(models[name], x, pack_linear(weight), bias, residual)
        assert y.shape == (rows, columns)
        # A chain of `depth` roundings of sums of size about 1.
        tolerance = 2e-7 * np.sqrt(depth) + 1e-6
        np.testing.assert_allclose(
            y, expected(name, x, weight, bias, residual), rtol=1e-6, atol=tolerance
        )


@pytest.mark.parametrize("name", ["head", "down"])
def test_linear_computes_only_the_rows_asked_for(models: dict[str, Model], name: str) -> None:
    x, weight, bias, residual = draw(tokens=40, depth=256, columns=100, rows=17)
    x[17:] = np.nan
    y = run(models[name], x, pack_linear(weight), bias, residual)
    np.testing.assert_allclose(y, expected(name, x, weight, bias, residual), rtol=1e-6, atol=5e-6)


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize(("depth", "columns"), [(256, 100), (1000, 257), (1536, 640)])
def test_linear_rows_do_not_depend_on_their_neighbours(
    models: dict[str, Model], name: str, depth: int, columns: int
) -> None:
    x, weight, bias, residual = draw(300, depth, columns)
    packed = pack_linear(weight)
    whole = run(models[name], x, packed, bias, residual)
    for rows in [*range(1, 14), 64, 65, 200]:
        some = np.random.default_rng(rows).permutation(300)[:rows]
        part = run(models[name], x[some], packed, bias, residual[some])
        np.testing.assert_array_equal(part, whole[some])


def test_silu_is_accurate_over_its_range(models: dict[str, Model]) -> None:
    z = np.concatenate([np.linspace(-87, 87, 3000), np.geomspace(1e-20, 1, 200), [0, -200, 200]])
    x = z.astype(np.float32)[:, None]
    one, none = np.ones((1, 1), np.float32), np.zeros(1, np.float32)
    y = run(models["up"], x, pack_linear(one), none, x)
    exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(y, exact, rtol=4e-7, atol=1e-36)


def test_linear_passes_nan_on_only_in_its_row(models: dict[str, Model]) -> None:
    x, weight, bias, residual = draw(20, 256, 100)
    x[7, 3] = np.nan
    for name, model in models.items():
        if name != "layer_norm":
            y = run(model, x, pack_linear(weight), bias, residual)
            assert np.isnan(y[7]).all()
            assert np.isfinite(np.delete(y, 7, axis=0)).all()


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
def test_pack_linear_pads_the_last_panel_with_zeros(columns: int) -> None:
    weight = np.random.default_rng(columns).standard_normal((5, columns), np.float32)
    packed = pack_linear(weight)
    assert packed.shape == linear_shape(5, columns, DeviceRef.CPU())
    flat = packed.transpose(1, 0, 2).reshape(5, -1)
    np.testing.assert_array_equal(flat[:, :columns], weight)
    assert not flat[:, columns:].any()


@pytest.mark.parametrize("width", [1, 8, 32, 100, 256, 1024])
@pytest.mark.parametrize("tokens", [0, 1, 3, 300])
def test_layer_norm_matches_float64(models: dict[str, Model], tokens: int, width: int) -> None:
    x, _, bias, residual = draw(tokens, width, width)
    x = x * 3 + 50
    weight = residual[0] if tokens else bias
    y = run(models["layer_norm"], x, weight, bias)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    exact = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(y, exact, rtol=1e-5, atol=1e-5)


def test_layer_norm_rows_do_not_depend_on_their_neighbours(models: dict[str, Model]) -> None:
    x, _, bias, residual = draw(300, 256, 256)
    whole = run(models["layer_norm"], x, residual[0], bias)
    for rows in (1, 2, 77):
        some = np.random.default_rng(rows).permutation(300)[:rows]
        part = run(models["layer_norm"], x[some], residual[0], bias)
        np.testing.assert_array_equal(part, whole[some])
