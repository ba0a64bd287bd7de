"""Matrix products with their epilogues for the H100 and H200.

    srm_linear_sm90    out = act(bias + x w^T) + residual
    srm_normed_sm90    out = act(columns[:, 1] + norm(x) w^T)
    srm_stream_sm90    out = bias + x w^T + residual, and moments of out
    srm_head_sm90      out = x w^T, and slices of out
    srm_up_e4m3        out = SiLU(columns[:, 1] + columns[:, 0] * x w^T) / divisors, in e4m3
    srm_down_e4m3      out = columns[:, 1] + columns[:, 0] * x w^T + residual, and moments of out

act is the identity or SiLU; bias and residual of the first may be absent, and SiLU excludes a
residual. Sums and all that follows are float32, and are rounded once. TMA, wgmma and clusters of
two or four blocks (`_sm90_kernel.mojo`). An element's bits do not depend on M, nor on other rows.

norm(x) = (x - mean) / sqrt(variance + EPSILON), row by row. It comes after the sums, since it is the
same for all k: norm(x) w^T = (x w^T - mean * columns[:, 0]) / sqrt(…), columns[n, 0] being the sum
of w[n, :]. Gain and shift of a layer norm are folded into w and columns[:, 1]. Mean and variance
come from moments: of each row and BN columns the mean, and the sum of squares of what differs from
it. Whoever writes x writes them, of x as it is after rounding. The sums lack a little more the
further a row's mean is from 0: about 1e-6 of it, measured in deviations.

slices are of each row and BN columns the largest output, and the sum of exp((output - largest) /
temperature): a softmax reads those, and then only the columns that it wants. They are of the outputs
after rounding too, and of the first D rows alone, where these are drawn from all tokens (`Sampling`):
what stands there for other rows is not said. The sum is NaN where an output of the slice is NaN or
+inf, and where all are -inf.

The last two have x and w in e4m3. A tensor core keeps fewer bits of their sums than float32 has.
What srm_up_e4m3 writes is x of srm_down_e4m3. Of each 64 columns 8 i + 2 q + b (i < 8, q < 4, b < 2)
that one lies at 16 q + 2 i + b, and so it must in w.

    out        [M, N]           bfloat16  out; N % 256 == 0; e4m3 of `srm_up_e4m3`
    moments    [M, N / 256, 2]  float32   out, of `srm_stream_sm90` and `srm_down_e4m3`
    slices     [M, N / 256, 2]  float32   out, of `srm_head_sm90`
    x          [T, K]           bfloat16  in; T >= M, K % 256 == 0; in e4m3 K % 512 == 0
    w          [N, K]           as x      in
    bias       [N]              bfloat16  in; any tensor when has_bias is False
    residual   [M, N]           bfloat16  in; any tensor when has_residual is False
    columns    [N, 2]           float32   in, of `srm_normed_sm90` and those in e4m3
    divisors   [N]              float32   in, of `srm_up_e4m3`
    sampling   [S, 6]           int32     in at the slots, of `srm_head_sm90`, a buffer
    slots      [D]              int32     in, of `srm_head_sm90`; D <= M
    moments    [T, K / 256, 2]  float32   in, of `srm_normed_sm90`
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from layout import Coord, Idx, TileTensor, row_major
from layout.tma_async import create_tensor_tile
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from std.math import ceildiv

from ._sm90_epilogue import BF16, BN, E4M3, F32, Parts, Tensors, Values
from ._sm90_kernel import (
    BLOCKS,
    CLUSTER_ROWS,
    LEAST_ROWS,
    MOST_ROWS,
    SHARED_BYTES,
    THREADS,
    W_TILE,
    X_TILE,
    product_kernel,
)
from .._values import untracked


@always_inline
def enqueue[
    dtype: DType, //, N: Int, K: Int, parts: Parts
](
    x: InputTensor[dtype=dtype, rank=2, ...],
    w: InputTensor[dtype=dtype, rank=2, ...],
    tensors: Tensors,
    rows: Int,
    ctx: DeviceContext,
) raises:
    """Enqueue a product, of small tiles if all of them find a processor at once.

    There are few whole tiles then, and processors without one. A row's bits are the same.

    Parameters:
        dtype: Of the factors.
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
    comptime assert dtype == parts.factors
    if rows == 0:
        return
    var clusters = ceildiv(rows, CLUSTER_ROWS) * (N // BN)
    var processors = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    # A cluster lies within one of the groups that processors are in, of 16 or 18.
    if clusters <= processors // 16 * (16 // BLOCKS[LEAST_ROWS]):
        enqueue_tiles[N, K, parts, LEAST_ROWS](
            x, w, tensors, rows, clusters, ctx
        )
    else:
        clusters = min(clusters, processors // BLOCKS[MOST_ROWS])
        enqueue_tiles[N, K, parts, MOST_ROWS](
            x, w, tensors, rows, clusters, ctx
        )


@always_inline
def enqueue_tiles[
    dtype: DType, //, N: Int, K: Int, parts: Parts, BM: Int
](
    x: InputTensor[dtype=dtype, rank=2, ...],
    w: InputTensor[dtype=dtype, rank=2, ...],
    tensors: Tensors,
    rows: Int,
    clusters: Int,
    ctx: DeviceContext,
) raises:
    """Enqueue a product with tiles of BM rows.

    Parameters:
        dtype: Of the factors.
        N: Columns of the output.
        K: Length of the sums.
        parts: What goes into the output besides.
        BM: Rows of a tile.

    Args:
        x: The rows, [T, K].
        w: The weights, [N, K].
        tensors: The output and what goes into it.
        rows: M.
        clusters: How many take the tiles.
        ctx: The device.

    Raises:
        If the device refuses.
    """
    var x_tiles = create_tensor_tile[
        X_TILE[parts.factors, BM], swizzle_mode=TensorMapSwizzle.SWIZZLE_128B
    ](
        ctx,
        TileTensor(
            x.unsafe_ptr().unsafe_bitcast[Scalar[parts.factors]](),
            row_major(Coord(rows, Idx[K])),
        ),
    )
    var w_tiles = create_tensor_tile[
        W_TILE[parts.factors, BM], swizzle_mode=TensorMapSwizzle.SWIZZLE_128B
    ](
        ctx,
        TileTensor(
            w.unsafe_ptr().unsafe_bitcast[Scalar[parts.factors]](),
            row_major(Coord(Idx[N], Idx[K])),
        ),
    )
    ctx.enqueue_function[product_kernel[N, K, parts, BM]](
        x_tiles,
        w_tiles,
        tensors.out_,
        tensors.bias,
        tensors.residual,
        tensors.slices,
        tensors.columns,
        tensors.moments,
        tensors.divisors,
        tensors.sampling,
        tensors.slots,
        tensors.sampled,
        Int32(rows),
        grid_dim=clusters * BLOCKS[BM],
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
struct _LinearSM90:
    """The op; shapes are in the module's docstring, as those of all that follow.
    """

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
        comptime assert target == "gpu", "srm_linear_sm90 is for sm_90 alone"
        comptime parts = Parts(
            bias=has_bias, silu=silu, residual=has_residual
        )
        var to = Tensors(anywhere(output))
        to.bias, to.residual = anywhere(bias), anywhere(residual)
        enqueue[N, K, parts](x, w, to, output.dim_size(0), ctx)


@extensibility.register("srm_normed_sm90")
struct _NormedSM90:
    """The op on rows before a norm, which is folded into the weights."""

    @staticmethod
    def execute[
        target: StaticString,
        N: Int,
        K: Int,
        silu: Bool,
        variants: StaticString,
    ](
        output: OutputTensor[dtype=BF16, rank=2, ...],
        x: InputTensor[dtype=BF16, rank=2, ...],
        w: InputTensor[dtype=BF16, rank=2, ...],
        columns: InputTensor[dtype=F32, rank=2, ...],
        moments: InputTensor[dtype=F32, rank=3, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert target == "gpu", "srm_normed_sm90 is for sm_90 alone"
        comptime parts = Parts(norm=True, silu=silu, variants=variants)
        var to = Tensors(anywhere(output))
        to.columns, to.moments = anywhere(columns), anywhere(moments)
        enqueue[N, K, parts](x, w, to, output.dim_size(0), ctx)


@extensibility.register("srm_stream_sm90")
struct _StreamSM90:
    """The op with bias and residual, and moments for a norm behind it."""

    @staticmethod
    def execute[
        target: StaticString, N: Int, K: Int, variants: StaticString
    ](
        output: OutputTensor[dtype=BF16, rank=2, ...],
        moments: OutputTensor[dtype=F32, rank=3, ...],
        x: InputTensor[dtype=BF16, rank=2, ...],
        w: InputTensor[dtype=BF16, rank=2, ...],
        bias: InputTensor[dtype=BF16, rank=1, ...],
        residual: InputTensor[dtype=BF16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert target == "gpu", "srm_stream_sm90 is for sm_90 alone"
        comptime parts = Parts(
            bias=True, residual=True, moments=True, variants=variants
        )
        var to = Tensors(anywhere(output))
        to.bias, to.residual = anywhere(bias), anywhere(residual)
        to.slices = anywhere(moments)
        enqueue[N, K, parts](x, w, to, output.dim_size(0), ctx)


@extensibility.register("srm_head_sm90")
struct _HeadSM90:
    """The op of the head."""

    @staticmethod
    def execute[
        target: StaticString, N: Int, K: Int, variants: StaticString
    ](
        output: OutputTensor[dtype=BF16, rank=2, ...],
        slices: OutputTensor[dtype=F32, rank=3, ...],
        sampling: MutableInputTensor[dtype=DType.int32, rank=2, ...],
        x: InputTensor[dtype=BF16, rank=2, ...],
        w: InputTensor[dtype=BF16, rank=2, ...],
        slots: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert target == "gpu", "srm_head_sm90 is for sm_90 alone"
        comptime parts = Parts(slices=True, variants=variants)
        var to = Tensors(anywhere(output))
        to.slices, to.slots = anywhere(slices), anywhere(slots)
        to.sampling = untracked(sampling.unsafe_ptr())
        to.sampled = Int32(slots.dim_size(0))
        enqueue[N, K, parts](x, w, to, output.dim_size(0), ctx)


@extensibility.register("srm_up_e4m3")
struct _UpE4M3:
    """The op with SiLU, of factors in e4m3 into one."""

    @staticmethod
    def execute[
        target: StaticString, N: Int, K: Int, variants: StaticString
    ](
        output: OutputTensor[dtype=E4M3, rank=2, ...],
        x: InputTensor[dtype=E4M3, rank=2, ...],
        w: InputTensor[dtype=E4M3, rank=2, ...],
        columns: InputTensor[dtype=F32, rank=2, ...],
        divisors: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert target == "gpu", "srm_up_e4m3 is for sm_90 alone"
        comptime parts = Parts(silu=True, factors=E4M3, variants=variants)
        var to = Tensors(anywhere(output).unsafe_bitcast[BFloat16]())
        to.columns, to.divisors = anywhere(columns), anywhere(divisors)
        enqueue[N, K, parts](x, w, to, output.dim_size(0), ctx)


@extensibility.register("srm_down_e4m3")
struct _DownE4M3:
    """The op with bias and residual, and moments, of factors in e4m3."""

    @staticmethod
    def execute[
        target: StaticString, N: Int, K: Int, variants: StaticString
    ](
        output: OutputTensor[dtype=BF16, rank=2, ...],
        moments: OutputTensor[dtype=F32, rank=3, ...],
        x: InputTensor[dtype=E4M3, rank=2, ...],
        w: InputTensor[dtype=E4M3, rank=2, ...],
        columns: InputTensor[dtype=F32, rank=2, ...],
        residual: InputTensor[dtype=BF16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert target == "gpu", "srm_down_e4m3 is for sm_90 alone"
        comptime parts = Parts(
            residual=True, moments=True, factors=E4M3, variants=variants
        )
        var to = Tensors(anywhere(output))
        to.columns, to.residual = anywhere(columns), anywhere(residual)
        to.slices = anywhere(moments)
        enqueue[N, K, parts](x, w, to, output.dim_size(0), ctx)
