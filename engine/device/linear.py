"""Matrix product and layer normalisation as graph operations, the same call on CPU and GPU.

On a CPU they are the Mojo ops `srm_linear` and `srm_layer_norm`: float32 or bfloat16 with float32
sums, weights packed once on the host, and each output element's bits independent of the other rows
of the batch. On a GPU the product is one of those of `engine.device.products`, on [out, in]
weights, and the norm is MAX's. The graph must have been made with
`custom_extensions=kernel_libraries()`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
from max.dtype import DType
from max.graph import DeviceRef, DimLike, Graph, TensorType, TensorValue, ops

from srm.engine.config import Dtype
from srm.engine.device.products import FLOAT8, Product, multiply
from srm.engine.steps.batch import F32
from srm.engine.weights.float8 import norm_scale

U16 = npt.NDArray[np.uint16]

KERNELS = Path(__file__).resolve().parents[2] / "mojo_kernels" / "srm"
"""The Mojo package of every op; the same place in a source tree and in an installed package."""

PANEL = 32  # columns of a packed panel: PANEL of _tile.mojo

EPSILON = 1e-5  # the value that torch's LayerNorm adds to the variance


@cache
def kernel_libraries() -> list[Path]:
    """Return our Mojo package, compiled, for `custom_extensions` of a graph with ops of ours: given
    its source, MAX would compile it again for every graph, which takes seconds."""
    with Graph("srm_kernels", input_types=[], custom_extensions=[KERNELS]) as graph:
        graph.output()
    libraries: list[Path] = graph.kernel_libraries_paths
    return libraries


def round_bfloat16(values: F32) -> U16:
    """Return the bits of the nearest bfloat16, ties to even; numpy has no such type."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)


def widen_bfloat16(bits: U16) -> F32:
    """Return what bits of bfloat16 mean."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def fold_norm(weight: F32, bias: F32, gain: F32, shift: F32) -> tuple[F32, F32]:
    """Fold gain and shift of a layer norm into the product behind it.

    Args:
        weight: f32[K, N].
        bias: f32[N].
        gain, shift: f32[K], of the norm.

    Returns:
        Weights f32[K, N] that are bfloat16, and f32[N, 2]: their sums over K, and biases.
    """
    folded = widen_bfloat16(round_bfloat16(weight * gain[:, None]))
    sums = folded.sum(axis=0, dtype=np.float64)
    biases = bias + shift.astype(np.float64) @ weight
    return folded, np.stack([sums, biases], axis=1).astype(np.float32)


def pack_linear(weight: F32, dtype: DType = DType.float32) -> F32 | U16:
    """Pack weights [K, N] as panels [ceil(N / PANEL), ceil(K / pair), PANEL, pair], padded with
    zeros. `pair` is 1 in float32, and 2 in bfloat16, of which these are the bits."""
    values = weight if dtype == DType.float32 else round_bfloat16(weight)
    depth, columns = values.shape
    panels, words, _, pair = linear_shape(depth, columns, DeviceRef.CPU(), dtype)
    padded = np.zeros((words * pair, panels * PANEL), values.dtype)
    padded[:depth, :columns] = values
    return np.ascontiguousarray(padded.reshape(words, pair, panels, PANEL).transpose(2, 0, 3, 1))


def graph_dtype(name: Dtype) -> DType:
    """Return MAX's name for a dtype of the settings."""
    return FLOAT8 if name == "float8" else DType[name]


def linear_shape(
    in_features: int, out_features: int, on: DeviceRef, dtype: DType = DType.float32
) -> tuple[int, ...]:
    """Return the shape that `linear` wants of a weight: `pack_linear`'s, on a GPU [out, in]."""
    if on.is_gpu():
        return (out_features, in_features)
    pair = 4 // dtype.size_in_bytes
    return (-(-out_features // PANEL), -(-in_features // pair), PANEL, pair)


def linear(
    x: TensorValue,
    weight: TensorValue,
    out_features: DimLike,
    *,
    bias: TensorValue | None = None,
    silu: bool = False,
    residual: TensorValue | None = None,
    rows: DimLike | None = None,
    out_dtype: DType | None = None,
    widen: bool = False,
    product: Product | None = None,
) -> TensorValue:
    """act(x @ weight + bias) + residual, act being SiLU or nothing.

    Args:
        x: [T, K]; float32 or bfloat16 on a CPU.
        weight: in the shape of `linear_shape(K, out_features, device, dtype)`, the dtype of x.
        out_features: N.
        bias: [N], the dtype of x.
        silu: whether SiLU follows the bias.
        residual: [M, N], the dtype of the result, added last; not together with SiLU.
        rows: M, where only the first M <= T rows are wanted; a dimension of the graph's inputs.
        out_dtype: of the result; that of x unless given.
        widen: whether a CPU that multiplies bfloat16 works as one that cannot; for tests.
        product: of a GPU, which must be told; a CPU has one alone.

    Returns:
        [M, N], M = T unless `rows` is given.
    """
    assert residual is None or not silu
    wanted = x.shape[0] if rows is None else rows
    assert x.device.is_gpu() == (product is not None)
    if product is not None:
        assert out_dtype in {None, x.dtype} and not widen
        return multiply(product, x, weight, wanted, bias, residual, silu)
    # The op does not read a tensor it has been told is absent: any will do in its place.
    operands = [x, weight, x if bias is None else bias, x if residual is None else residual]
    return ops.custom(
        "srm_linear",
        x.device,
        operands,
        [TensorType(out_dtype or x.dtype, [wanted, out_features], x.device)],
        {
            "has_bias": bias is not None,
            "has_residual": residual is not None,
            "silu": silu,
            "widen": widen,
        },
    )[0].tensor


def layer_norm(x: TensorValue, weight: TensorValue, bias: TensorValue) -> TensorValue:
    """(x - mean) / sqrt(variance + 1e-5) * weight + bias over the last axis of x [T, d]."""
    if x.device.is_gpu():
        return ops.layer_norm(x, weight, bias, EPSILON)
    return ops.custom("srm_layer_norm", x.device, [x, weight, bias], [x.type])[0].tensor


def layer_norm_8bit(
    x: TensorValue, dtype: DType, pdl: bool = False
) -> tuple[TensorValue, TensorValue]:
    """(x - mean) / sqrt(variance + 1e-5) * norm_scale(d) in FLOAT8, of bfloat16[T, d] on a GPU. In
    int8 the values are Hadamard transforms, and have scales f32[T]; in FLOAT8 f32[0]."""
    rows, width = x.shape
    of_scales = TensorType(DType.float32, [rows if dtype == DType.int8 else 0], x.device)
    types = [TensorType(dtype, x.shape, x.device), of_scales]
    parameters = {"d": int(width), "scale": norm_scale(int(width)), "pdl": pdl}
    normed, scales = ops.custom("srm_norm_8bit", x.device, [x], types, parameters)
    return normed.tensor, scales.tensor
