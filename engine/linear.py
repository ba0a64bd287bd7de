"""Matrix product and layer normalisation as graph operations, the same call on CPU and GPU.

On a CPU they are the Mojo ops `srm_linear` and `srm_layer_norm`: float32, weights packed once on
the host, and each output element's bits independent of the other rows of the batch. On a GPU they
are MAX's own kernels on plain [in, out] weights. The graph must have been made with
`custom_extensions=[KERNELS]`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from max.dtype import DType
from max.graph import DeviceRef, Dim, DimLike, TensorType, TensorValue, ops

from engine.batch import F32

KERNELS = Path(__file__).resolve().parents[1] / "mojo_kernels" / "srm"
"""The Mojo package of every op; the same place in a source tree and in an installed package."""

PANEL = 32
"""Columns of a packed panel: PANEL of linear.mojo."""

EPSILON = 1e-5
"""What torch's LayerNorm adds to the variance."""


def pack_linear(weight: F32) -> F32:
    """Weights [K, N] as panels [ceil(N / PANEL), K, PANEL], the last one padded with zeros."""
    depth, columns = weight.shape
    panels = -(-columns // PANEL)
    padded = np.zeros((depth, panels * PANEL), np.float32)
    padded[:, :columns] = weight
    return np.ascontiguousarray(padded.reshape(depth, panels, PANEL).transpose(1, 0, 2))


def linear_shape(in_features: int, out_features: int, on: DeviceRef) -> tuple[int, ...]:
    """Shape that `linear` wants of a weight: as `pack_linear` gives it on a CPU, plain on a GPU."""
    if on.is_gpu():
        return (in_features, out_features)
    return (-(-out_features // PANEL), in_features, PANEL)


def linear(
    x: TensorValue,
    weight: TensorValue,
    out_features: DimLike,
    *,
    bias: TensorValue | None = None,
    silu: bool = False,
    residual: TensorValue | None = None,
    rows: DimLike | None = None,
) -> TensorValue:
    """act(x @ weight + bias) + residual, act being SiLU or nothing.

    Args:
        x: [T, K]; float32 on a CPU.
        weight: in the shape of `linear_shape(K, out_features, device)`.
        out_features: N.
        bias: [N].
        silu: whether SiLU follows the bias.
        residual: [M, N], added last; not together with SiLU.
        rows: M, where only the first M <= T rows are wanted; a dimension of the graph's inputs.

    Returns:
        [M, N], M = T unless `rows` is given.
    """
    assert residual is None or not silu
    wanted = x.shape[0] if rows is None else rows
    if x.device.is_gpu():
        if rows is not None:
            x = ops.slice_tensor(x, [(slice(0, TensorValue(Dim(rows))), rows), slice(None)])
        y = ops.matmul(x, weight)
        y = y if bias is None else y + bias
        y = ops.silu(y) if silu else y
        return y if residual is None else y + residual
    # The op does not read a tensor it has been told is absent: any will do in its place.
    operands = [x, weight, x if bias is None else bias, x if residual is None else residual]
    return ops.custom(
        "srm_linear",
        x.device,
        operands,
        [TensorType(DType.float32, [wanted, out_features], x.device)],
        {"has_bias": bias is not None, "has_residual": residual is not None, "silu": silu},
    )[0].tensor


def layer_norm(x: TensorValue, weight: TensorValue, bias: TensorValue) -> TensorValue:
    """(x - mean) / sqrt(variance + 1e-5) * weight + bias over the last axis of x [T, d]."""
    if x.device.is_gpu():
        return ops.layer_norm(x, weight, bias, EPSILON)
    return ops.custom("srm_layer_norm", x.device, [x, weight, bias], [x.type])[0].tensor
