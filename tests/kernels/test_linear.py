"""`srm_linear` and `srm_layer_norm` against float64 numpy, and their bits against themselves.

Everything holds in float32, in bfloat16 as this processor multiplies it, and in bfloat16 as one
does that has no product for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import CompiledModel, InferenceSession, Model
from max.graph import DeviceRef, Graph, Module, TensorType, TensorValue

from engine.config import EngineConfig
from engine.device.graph_cache import cached
from engine.device.linear import (
    PANEL,
    kernel_libraries,
    layer_norm,
    linear,
    linear_shape,
    pack_linear,
    round_bfloat16,
)
from engine.settings import load
from engine.steps.batch import F32

F64 = npt.NDArray[np.float64]
Array = npt.NDArray[Any]

ROW_COUNTS = [0, 1, 2, 3, 5, 7, 11, 12, 13, 25, 64, 257]
# Both sides of a panel and of the length at which a sum is cut, with and without remainders.
SHAPES = [(32, 32), (32, 1), (255, 100), (256, 1024), (1000, 257), (1537, 96), (2049, 33)]
# What the model does: (has bias, has SiLU, has residual).
EPILOGUES = {
    "up": (True, True, False),
    "down": (True, False, True),
    "proj_in": (True, False, False),
    "head": (False, False, False),
}
HALF_ULP = 2.0**-8
"""What rounding to bfloat16 may change, relative."""


def widen(bits: Array) -> F32:
    """The float32 that bits of bfloat16 mean."""
    wide = bits.astype(np.uint32) << 16
    return wide.view(np.float32)


@dataclass(frozen=True)
class Kind:
    """How numbers are kept and multiplied."""

    dtype: DType
    widen: bool = False

    def draw(self, *shape: int, seed: list[int]) -> F32:
        """Ordinary values that the dtype can hold."""
        values = np.random.default_rng(seed).standard_normal(shape, np.float32)
        return self.round(values)

    def round(self, values: Array) -> F32:
        values = np.asarray(values, np.float32)
        if self.dtype == DType.float32:
            return values
        return widen(round_bfloat16(values))

    def upload(self, values: F32) -> Buffer:
        values = np.ascontiguousarray(values, np.float32)
        if self.dtype == DType.float32:
            return Buffer.from_numpy(values)
        return Buffer.from_numpy(round_bfloat16(values)).view(self.dtype, values.shape)

    def pack(self, weight: F32) -> Buffer:
        packed = pack_linear(weight, self.dtype)
        return Buffer.from_numpy(packed).view(self.dtype, packed.shape)

    def out_dtype(self, name: str) -> DType:
        """Logits are float32."""
        return DType.float32 if name == "head" else self.dtype

    def rounding(self, name: str) -> float:
        """Relative error of a result that is exact but for being kept."""
        return 1e-6 if self.out_dtype(name) == DType.float32 else HALF_ULP


KINDS = {
    "float32": Kind(DType.float32),
    "bfloat16": Kind(DType.bfloat16),
    "widened": Kind(DType.bfloat16, widen=True),
}
Models = dict[str, Model]


def build(name: str, kind: Kind, graph_name: str, module: Module) -> None:
    """A product whose every dimension is symbolic. Unused inputs give the dimensions a value."""
    has_bias, silu, has_residual = EPILOGUES[name]
    on, dtype, pair = DeviceRef.CPU(), kind.dtype, 4 // kind.dtype.size_in_bytes
    inputs = (
        TensorType(dtype, ["tokens", "depth"], on),
        TensorType(dtype, ["panels", "words", PANEL, pair], on),
        TensorType(dtype, ["columns"], on),
        TensorType(dtype, ["rows", "columns"], on),
    )
    with Graph(
        graph_name, input_types=inputs, custom_extensions=kernel_libraries(), module=module
    ) as graph:
        x, weight, bias, residual = (value.tensor for value in graph.inputs)
        y = linear(
            x,
            weight,
            "columns",
            bias=bias if has_bias else None,
            silu=silu,
            residual=residual if has_residual else None,
            rows="rows",
            out_dtype=kind.out_dtype(name),
            widen=kind.widen,
        )
        graph.output(y)


def build_layer_norm(dtype: DType, graph_name: str, module: Module) -> None:
    on = DeviceRef.CPU()
    row = TensorType(dtype, ["width"], on)
    inputs = (TensorType(dtype, ["tokens", "width"], on), row, row)
    with Graph(
        graph_name, input_types=inputs, custom_extensions=kernel_libraries(), module=module
    ) as graph:
        operands: list[TensorValue] = [value.tensor for value in graph.inputs]
        graph.output(layer_norm(*operands))


@pytest.fixture(scope="module")
def all_models() -> Models:
    session = InferenceSession(devices=[CPU()])

    def compile_them() -> CompiledModel:
        module = Module()
        for kind_name, kind in KINDS.items():
            for name in EPILOGUES:
                build(name, kind, f"{kind_name}.{name}", module)
            build_layer_norm(kind.dtype, f"{kind_name}.layer_norm", module)
        return session.compile(module, custom_extensions=kernel_libraries())

    folder = load(EngineConfig, [], prog="tests").cache_dir.expanduser()
    shape = (Path(__file__).read_bytes(),)
    return dict(session.init_all(cached("linear", shape, compile_them, CPU(), folder)))


@pytest.fixture(params=list(KINDS))
def kind_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kind(kind_name: str) -> Kind:
    return KINDS[kind_name]


@pytest.fixture
def models(kind_name: str, all_models: Models) -> Models:
    """Those of this kind, by what they do."""
    prefix = f"{kind_name}."
    return {k.removeprefix(prefix): v for k, v in all_models.items() if k.startswith(prefix)}


def fetch(buffer: Buffer) -> F32:
    if buffer.dtype == DType.float32:
        return np.asarray(buffer.to_numpy(), np.float32)
    bits = buffer.view(DType.uint16, buffer.shape).to_numpy()
    return widen(bits)


def multiply(model: Model, kind: Kind, name: str, operands: list[F32]) -> F32:
    x, weight, bias, residual = operands
    as_output = Kind(kind.out_dtype(name)) if EPILOGUES[name][2] else kind
    buffers = [kind.upload(x), kind.pack(weight), kind.upload(bias), as_output.upload(residual)]
    return fetch(model.execute(*buffers)[0])


def draw(kind: Kind, tokens: int, depth: int, columns: int, rows: int | None = None) -> list[F32]:
    """x, weight, bias and residual."""
    shapes = [(tokens, depth), (depth, columns), (columns,), (rows or tokens, columns)]
    x, weight, bias, residual = (
        kind.draw(*shape, seed=[tokens, depth, columns, i]) for i, shape in enumerate(shapes)
    )
    return [x, kind.round(weight / np.sqrt(depth)), bias, residual]


def expected(name: str, operands: list[F32]) -> F64:
    has_bias, silu, has_residual = EPILOGUES[name]
    x, weight, bias, residual = operands
    y = x[: len(residual)].astype(np.float64) @ weight.astype(np.float64)
    if has_bias:
        y += bias
    if silu:
        y /= 1 + np.exp(-y)
    return y + residual if has_residual else y


def chain(depth: int) -> float:
    """Error of a chain of `depth` roundings of float32 sums of size about 1."""
    return float(3e-7 * np.sqrt(depth) + 1e-6)


@pytest.mark.parametrize(("depth", "columns"), SHAPES)
@pytest.mark.parametrize("name", EPILOGUES)
def test_linear_matches_float64(
    models: Models, kind: Kind, name: str, depth: int, columns: int
) -> None:
    for rows in ROW_COUNTS:
        operands = draw(kind, rows, depth, columns)
        y = multiply(models[name], kind, name, operands)
        assert y.shape == (rows, columns)
        np.testing.assert_allclose(
            y, expected(name, operands), rtol=kind.rounding(name), atol=chain(depth)
        )


@pytest.mark.parametrize("name", ["head", "down"])
def test_linear_computes_only_the_rows_asked_for(models: Models, kind: Kind, name: str) -> None:
    operands = draw(kind, tokens=40, depth=256, columns=100, rows=17)
    operands[0][17:] = np.nan
    y = multiply(models[name], kind, name, operands)
    np.testing.assert_allclose(
        y, expected(name, operands), rtol=kind.rounding(name), atol=chain(256)
    )


@pytest.mark.parametrize("name", EPILOGUES)
@pytest.mark.parametrize(("depth", "columns"), [(256, 100), (1001, 257), (2049, 640)])
def test_linear_rows_do_not_depend_on_their_neighbours(
    models: Models, kind: Kind, name: str, depth: int, columns: int
) -> None:
    x, weight, bias, residual = draw(kind, 300, depth, columns)
    whole = multiply(models[name], kind, name, [x, weight, bias, residual])
    for rows in [*range(1, 14), 64, 65, 200]:
        some = np.random.default_rng(rows).permutation(300)[:rows]
        part = multiply(models[name], kind, name, [x[some], weight, bias, residual[some]])
        np.testing.assert_array_equal(part, whole[some])


def test_a_processors_product_of_bfloat16_is_the_widened_one(all_models: Models) -> None:
    """In float32 sums, whose bits differ at most by how two products of a pair are rounded."""
    kind, operands = KINDS["bfloat16"], draw(KINDS["bfloat16"], 37, 2049, 161)
    found = multiply(all_models["bfloat16.head"], kind, "head", operands)
    widened = multiply(all_models["widened.head"], kind, "head", operands)
    np.testing.assert_allclose(found, widened, rtol=0, atol=chain(2049))


def test_silu_is_accurate_over_its_range(models: Models, kind: Kind) -> None:
    z = np.concatenate([np.linspace(-87, 87, 3000), np.geomspace(1e-20, 1, 200), [0, -200, 200]])
    x = kind.round(z)[:, None]
    one, none = np.ones((1, 1), np.float32), np.zeros(1, np.float32)
    y = multiply(models["up"], kind, "up", [x, one, none, x])
    exact = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    rtol = 4e-7 if kind.dtype == DType.float32 else HALF_ULP
    np.testing.assert_allclose(y, exact, rtol=rtol, atol=1e-36)


def test_linear_passes_nan_on_only_in_its_row(models: Models, kind: Kind) -> None:
    operands = draw(kind, 20, 255, 100)
    operands[0][7, 3] = np.nan
    for name in EPILOGUES:
        y = multiply(models[name], kind, name, operands)
        assert np.isnan(y[7]).all()
        assert np.isfinite(np.delete(y, 7, axis=0)).all()


@pytest.mark.parametrize("columns", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("depth", [4, 5])
@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_pack_linear_pads_with_zeros(dtype: DType, depth: int, columns: int) -> None:
    weight = Kind(dtype).draw(depth, columns, seed=[columns])
    packed = pack_linear(weight, dtype)
    assert packed.shape == linear_shape(depth, columns, DeviceRef.CPU(), dtype)
    flat = packed.transpose(1, 3, 0, 2).reshape(-1, packed.shape[0] * PANEL)
    bits = weight if dtype == DType.float32 else round_bfloat16(weight)
    np.testing.assert_array_equal(flat[:depth, :columns], bits)
    assert not flat[:, columns:].any()
    assert not flat[depth:].any()


def test_round_bfloat16_is_to_nearest_ties_to_even() -> None:
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    assert (round_bfloat16(ties) == [0x3F80, 0x3F82, 0xBF80, 0x3F81]).all()
    special = np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38, 1e-40], np.float32)
    assert (round_bfloat16(special) == [0, 0x8000, 0x7F80, 0xFF80, 0x7F80, 1]).all()
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert (round_bfloat16(nans) == 0x7FC0).all()


@pytest.mark.parametrize("width", [1, 8, 32, 100, 256, 1024])
@pytest.mark.parametrize("tokens", [0, 1, 3, 300])
def test_layer_norm_matches_float64(models: Models, kind: Kind, tokens: int, width: int) -> None:
    x, _, bias, residual = draw(kind, tokens, width, width)
    x = kind.round(x * 3 + 50)
    weight = residual[0] if tokens else bias
    y = fetch(models["layer_norm"].execute(*map(kind.upload, (x, weight, bias)))[0])
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    exact = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * weight + bias
    rtol = 1e-5 if kind.dtype == DType.float32 else HALF_ULP
    np.testing.assert_allclose(y, exact, rtol=rtol, atol=1e-5)


def test_layer_norm_rows_do_not_depend_on_their_neighbours(models: Models, kind: Kind) -> None:
    x, _, bias, residual = draw(kind, 300, 256, 256)

    def run(rows: F32) -> F32:
        return fetch(models["layer_norm"].execute(*map(kind.upload, (rows, residual[0], bias)))[0])

    whole = run(x)
    for rows in (1, 2, 77):
        some = np.random.default_rng(rows).permutation(300)[:rows]
        np.testing.assert_array_equal(run(x[some]), whole[some])
