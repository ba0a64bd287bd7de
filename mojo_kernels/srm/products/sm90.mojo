"""Matrix product with its epilogue for the H100 and H200 (`srm_linear_sm90`, `srm_head_sm90`).

    out[m, n] = act(bias[n] + sum_k x[m, k] * w[n, k]) + residual[m, n]

act is the identity or SiLU; bias and residual may be absent, and SiLU excludes a residual. Sums and
all that follows are float32, and are rounded once. TMA, wgmma and clusters of two blocks
(`_sm90_kernel.mojo`). An element's bits do not depend on M, nor on the other rows.

`srm_head_sm90` has neither bias nor residual, and also writes of each row and BN columns the largest
output, and the sum of exp(output - largest): a softmax reads those, and then only the columns it
wants. They are of the outputs as they are after rounding.

    out        [M, N]           bfloat16  out; N % 256 == 0
    slices     [M, N / 256, 2]  float32   out, of `srm_head_sm90`
    x          [T, K]           bfloat16  in; T >= M, K % 256 == 0
    w          [N, K]           bfloat16  in
    bias       [N]              bfloat16  in; any tensor when has_bias is False
    residual   [M, N]           bfloat16  in; any tensor when has_residual is False
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from layout import Coord, Idx, TileTensor, row_major
from layout.tma_async import create_tensor_tile
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from std.math import ceildiv

from ._sm90_epilogue import BF16, BN, F32, Parts, Tensors, Values
from ._sm90_kernel import (
    BM,
    PAIR,
    SHARED_BYTES,
    THREADS,
    W_TILE,
    X_TILE,
    product_kernel,
)


@always_inline
def enqueue[
    N: Int, K: Int, parts: Parts
](
    x: InputTensor[dtype=BF16, rank=2, ...],
    w: InputTensor[dtype=BF16, rank=2, ...],
    tensors: Tensors,
    rows: Int,
    ctx: DeviceContext,
) raises:
    """Enqueue a product.

    Parameters:
        N: Columns of the output.
        K: Length of the sums.
        parts: What goes into the output besides.

    Args:
        x: The rows, [T, K].
        w: The weights, [N, K].
        tensors: The output and what goes into it.
        rows: M.
        ctx: The device.

    Raises:
        If the device refuses.
    """
    if rows == 0:
        return
    var x_tiles = create_tensor_tile[
        X_TILE, swizzle_mode=TensorMapSwizzle.SWIZZLE_128B
    ](ctx, TileTensor(x.unsafe_ptr(), row_major(Coord(rows, Idx[K]))))
    var w_tiles = create_tensor_tile[
        W_TILE, swizzle_mode=TensorMapSwizzle.SWIZZLE_128B
    ](ctx, TileTensor(w.unsafe_ptr(), row_major(Coord(Idx[N], Idx[K]))))
    var clusters = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    clusters = min(clusters // PAIR, ceildiv(rows, BM * PAIR) * (N // BN))
    ctx.enqueue_function[product_kernel[N, K, parts]](
        x_tiles,
        w_tiles,
        tensors.out_,
        tensors.bias,
        tensors.residual,
        tensors.slices,
        Int32(rows),
        grid_dim=clusters * PAIR,
        block_dim=THREADS,
        shared_mem_bytes=SHARED_BYTES,
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(SHARED_BYTES)
        ),
    )


@always_inline
def anywhere[
    dtype: DType, //
](tensor: OutputTensor[dtype=dtype, ...]) -> Values[dtype]:
    """Find a tensor, which the graph keeps while the op runs.

    Parameters:
        dtype: Of its values.

    Args:
        tensor: The tensor.

    Returns:
        Its first value.
    """
    return tensor.unsafe_ptr().unsafe_origin_cast[UntrackedOrigin[mut=True]]()


@always_inline
def anywhere[
    dtype: DType, //
](tensor: InputTensor[dtype=dtype, ...]) -> Values[dtype]:
    """Find a tensor, which the graph keeps while the op runs.

    Parameters:
        dtype: Of its values.

    Args:
        tensor: The tensor.

    Returns:
        Its first value.
    """
    return tensor.unsafe_ptr().unsafe_origin_cast[UntrackedOrigin[mut=True]]()


@extensibility.register("srm_linear_sm90")
struct LinearSM90:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString,
        N: Int,
        K: Int,
        has_bias: Bool,
        has_residual: Bool,
        silu: Bool,
    ](
        output: OutputTensor[dtype=BF16, rank=2, ...],
        x: InputTensor[dtype=BF16, rank=2, ...],
        w: InputTensor[dtype=BF16, rank=2, ...],
        bias: InputTensor[dtype=BF16, ...],
        residual: InputTensor[dtype=BF16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Run the op; shapes are in the module's docstring.

        Parameters:
            target: "gpu".
            N: Columns of the output.
            K: Length of the sums.
            has_bias: Whether `bias` is added.
            has_residual: Whether `residual` is added.
            silu: Whether SiLU follows the bias.

        Args:
            output: The result.
            x: The rows.
            w: The weights.
            bias: The bias.
            residual: The values added last.
            ctx: The device.

        Raises:
            If the device refuses.
        """
        comptime assert target == "gpu", "srm_linear_sm90 is for sm_90 alone"
        var out_ = anywhere(output)
        enqueue[N, K, Parts(has_bias, silu, has_residual, False)](
            x,
            w,
            Tensors(
                out_,
                anywhere(bias),
                anywhere(residual),
                out_.unsafe_bitcast[Float32](),
            ),
            output.dim_size(0),
            ctx,
        )


@extensibility.register("srm_head_sm90")
struct HeadSM90:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString, N: Int, K: Int
    ](
        output: OutputTensor[dtype=BF16, rank=2, ...],
        slices: OutputTensor[dtype=F32, rank=3, ...],
        x: InputTensor[dtype=BF16, rank=2, ...],
        w: InputTensor[dtype=BF16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Run the op; shapes are in the module's docstring.

        Parameters:
            target: "gpu".
            N: Columns of the output.
            K: Length of the sums.

        Args:
            output: The result.
            slices: Largest outputs and sums of exponentials.
            x: The rows.
            w: The weights.
            ctx: The device.

        Raises:
            If the device refuses.
        """
        comptime assert target == "gpu", "srm_head_sm90 is for sm_90 alone"
        var out_ = anywhere(output)
        enqueue[N, K, Parts(False, False, False, True)](
            x,
            w,
            Tensors(out_, out_, out_, anywhere(slices)),
            output.dim_size(0),
            ctx,
        )
