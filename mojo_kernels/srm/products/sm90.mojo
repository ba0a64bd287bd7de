"""Matrix products with their epilogues for the H100 and H200.

    srm_linear_sm90    out = act(bias + x w^T) + residual
    srm_normed_sm90    out = act(columns[:, 1] + norm(x) w^T)
    srm_mixed_sm90     out = mix(columns[:, 1] + norm(x) w^T), and the states moved on
    srm_stream_sm90    out = bias + x w^T + residual, and moments of out
    srm_head_sm90      out = x w^T, and slices of out
    srm_up_8bit        out = SiLU(columns[:, 1] + columns[:, 0] * x w^T) / divisors, in x's dtype
    srm_down_8bit      out = columns[:, 1] + columns[:, 0] * x w^T + residual, and moments of out

act is the identity or SiLU; bias and residual of the first may be absent, and SiLU excludes a
residual. Sums and all that follows are float32, and are rounded once. TMA, wgmma and clusters of
two or more blocks (`_sm90_kernel.mojo`). An element's bits do not depend on M, nor on other rows.

Tiles have BN columns: 256, or 128 where N is no multiple of that. moments of x are of BN columns as
K has them.

norm(x) = (x - mean) / sqrt(variance + EPSILON), row by row. It comes after the sums, since it is the
same for all k: norm(x) w^T = (x w^T - mean * columns[:, 0]) / sqrt(…), columns[n, 0] being the sum
of w[n, :]. Gain and shift of a layer norm are folded into w and columns[:, 1]. Mean and variance
come from moments: of each row and BN columns the mean, and the sum of squares of what differs from
it. Whoever writes x writes them, of x as it is after rounding. The sums lack a little more the
further a row's mean is from 0: about 1e-6 of it, measured in deviations.

slices are of each row and BN columns the largest output, and the sum of exp((output - largest) /
temperature): a softmax reads those, and then only the columns that it wants. They are of the outputs
after rounding too, and of the first D rows alone, where these are drawn from all tokens (`Sampling`):
what stands there for other rows is not said. Columns that w has not, `padding` of them, are -inf in
out. The sum is NaN where an output of the slice is NaN or
+inf, and where all are -inf.

mix is `srm_mix` without gamma, residual and SiLU, of the product as it is after rounding: outputs
and states have the bits that the two ops leave one behind the other. Rows that decode, the first
ones, are mixed as their sums are finished, the others by a kernel behind it.

The last two have x and w in e4m3 or int8. A tensor core keeps fewer bits of their sums in e4m3 than
float32 has, and all in int8. What srm_up_8bit writes is x of srm_down_8bit. Of each 64 columns
8 i + 2 q + b (i < 8, q < 4, b < 2) that one lies at 16 q + 2 i + b, and so it must in w.

In int8 srm_up_8bit's x has a scale of each row too, and SiLU(2 y) is taken where y is what columns
and scales make, so that no value is halved. Of each 16 columns of out, as they lie, it writes
the Hadamard transform (`turn`), multiplied with divisors, from -127 to 127. The divisor of the one at
16 q + 2 i + b is at 8 i + 2 q + b.

    out        [M, N]           bfloat16  out; N % 128 == 0; as x of `srm_up_8bit`
    moments    [M, N / BN, 2]   float32   out, of `srm_stream_sm90` and `srm_down_8bit`
    slices     [M, N / 256, 2]  float32   out, of `srm_head_sm90`, N % 256 == 0
    x          [T, K]           bfloat16  in; T >= M, K % 128 == 0; of 8 bits K % 512 == 0
    w          [N, K]           as x      in; of `srm_head_sm90` [N - padding, K]
    bias       [N]              bfloat16  in; any tensor when has_bias is False
    residual   [M, N]           bfloat16  in; any tensor when has_residual is False
    columns    [N, 2]           float32   in, of `srm_normed_sm90` and those of 8 bits
    divisors   [N]              float32   in, of `srm_up_8bit`
    scales     [T]              float32   in, of `srm_up_8bit` in int8
    sampling   [S, 6]           int32     in at the slots, of `srm_head_sm90`, a buffer
    slots      [D]              int32     in, of `srm_head_sm90`; D <= M; of `srm_mixed_sm90` D
                                          alone counts: rows that decode
    state, unit, read_slots, write_slots, positions, row_offsets, alpha_in, alpha_out, beta, decay
                                          of `srm_mixed_sm90`, as of `srm_mix`; state is float32
    moments    [T, K / BN, 2]   float32   in, of `srm_normed_sm90`
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from layout import Coord, Idx, TileTensor, row_major
from layout.tma_async import create_tensor_tile
from max.gpu.host import DeviceAttribute, DeviceContext, FuncAttribute
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from std.math import ceildiv

from ._sm90_epilogue import (
    BF16,
    BN,
    CHUNK,
    F32,
    OUT_TILE,
    OutTiles,
    Parts,
    Tensors,
    Values,
)
from ._sm90_kernel import (
    BLOCKS,
    CLUSTER_ROWS,
    LEAST_ROWS,
    MOST_ROWS,
    MOVED,
    SHARED_BYTES,
    THREADS,
    W_TILE,
    X_TILE,
    product_kernel,
)
from .._pdl import launch_attributes
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
    var clusters = ceildiv(rows, CLUSTER_ROWS[parts]) * (N // BN[N])
    var processors = ctx.get_attribute(DeviceAttribute.MULTIPROCESSOR_COUNT)
    # A cluster lies within one of the groups that processors are in, of 16 or 18.
    if clusters <= processors // 16 * (16 // BLOCKS[LEAST_ROWS, parts]):
        enqueue_tiles[N, K, parts, LEAST_ROWS](
            x, w, tensors, rows, clusters, ctx
        )
    else:
        comptime if parts.variants.clusters:
            processors = processors // 16 * 16
        clusters = min(clusters, processors // BLOCKS[MOST_ROWS, parts])
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
            x.unsafe_ptr().unsafe_bitcast[Scalar[MOVED[parts.factors]]](),
            row_major(Coord(rows, Idx[K])),
        ),
    )
    var w_tiles = create_tensor_tile[
        W_TILE[N, parts, BM], swizzle_mode=TensorMapSwizzle.SWIZZLE_128B
    ](
        ctx,
        TileTensor(
            w.unsafe_ptr().unsafe_bitcast[Scalar[MOVED[parts.factors]]](),
            row_major(Coord(w.dim_size(0), Idx[K])),
        ),
    )
    var out_tiles = OutTiles(x_tiles.descriptor)
    comptime if parts.patches() > 1:
        var described = create_tensor_tile[
            OUT_TILE, swizzle_mode=TensorMapSwizzle.SWIZZLE_128B
        ](ctx, TileTensor(tensors.out_, row_major(Coord(rows, Idx[N]))))
        out_tiles = OutTiles(described.descriptor)
    ctx.enqueue_function[product_kernel[N, K, parts, BM]](
        x_tiles,
        w_tiles,
        out_tiles,
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
        tensors.unit,
        Int32(rows),
        grid_dim=clusters * BLOCKS[BM, parts],
        block_dim=THREADS,
        shared_mem_bytes=SHARED_BYTES[N, K, parts],
        func_attribute=FuncAttribute.MAX_DYNAMIC_SHARED_SIZE_BYTES(
            UInt32(SHARED_BYTES[N, K, parts])
        ),
        attributes=launch_attributes[parts.variants.pdl](),
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
        comptime parts = Parts(bias=has_bias, silu=silu, residual=has_residual)
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


@extensibility.register("srm_mixed_sm90")
struct _MixedSM90:
    """The op behind a norm and `srm_mix` in one: of rows that decode, in its own kernel.

    Other rows are mixed by `srm_mix`'s, in place, which is not launched where there are none.
    """

    @staticmethod
    def execute[
        target: StaticString, N: Int, K: Int, heads: Int, variants: StaticString
    ](
        output: OutputTensor[dtype=BF16, rank=2, ...],
        state: MutableInputTensor[dtype=F32, rank=2, ...],
        unit: Int32,
        x: InputTensor[dtype=BF16, rank=2, ...],
        read_slots: InputTensor[dtype=DType.int32, rank=1, ...],
        write_slots: InputTensor[dtype=DType.int32, rank=1, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        row_offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        alpha_in: InputTensor[dtype=F32, rank=2, ...],
        alpha_out: InputTensor[dtype=F32, rank=2, ...],
        beta: InputTensor[dtype=F32, rank=2, ...],
        decay: InputTensor[dtype=F32, rank=2, ...],
        w: InputTensor[dtype=BF16, rank=2, ...],
        columns: InputTensor[dtype=F32, rank=2, ...],
        moments: InputTensor[dtype=F32, rank=3, ...],
        slots: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert target == "gpu", "srm_mixed_sm90 is for sm_90 alone"
        comptime assert N // heads % CHUNK == 0, "a chunk is of one head"
        comptime parts = Parts(norm=True, heads=heads, variants=variants)
        var decode = slots.dim_size(0)
        var to = Tensors(anywhere(output))
        to.columns, to.moments = anywhere(columns), anywhere(moments)
        var mixer = to.unit
        mixer.state = untracked(state.unsafe_ptr())
        mixer.read_slots = anywhere(read_slots)
        mixer.write_slots = anywhere(write_slots)
        mixer.positions = anywhere(positions)
        mixer.row_offsets = anywhere(row_offsets)
        mixer.alpha_in, mixer.alpha_out = anywhere(alpha_in), anywhere(
            alpha_out
        )
        mixer.beta, mixer.decay = anywhere(beta), anywhere(decay)
        mixer.num_rows, mixer.num_heads = Int64(decode), Int64(heads)
        mixer.head_dim, mixer.n_ctx = Int64(N // heads), Int64(beta.dim_size(1))
        mixer.pool_width = Int64(state.dim_size(1))
        mixer.pool_column = Int64(Int(unit) * N)
        to.unit = mixer
        enqueue[N, K, parts](x, w, to, output.dim_size(0), ctx)
        if read_slots.dim_size(0) > decode:
            mixer.read_slots = mixer.read_slots.unsafe_offset(decode)
            mixer.write_slots = mixer.write_slots.unsafe_offset(decode)
            mixer.positions = mixer.positions.unsafe_offset(decode)
            mixer.row_offsets = mixer.row_offsets.unsafe_offset(decode)
            mixer.num_rows = Int64(read_slots.dim_size(0) - decode)
            mixer.launch[4, 2, parts.variants.pdl](ctx)


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
        target: StaticString,
        N: Int,
        K: Int,
        padding: Int,
        variants: StaticString,
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
        comptime parts = Parts(slices=True, variants=variants, padding=padding)
        var to = Tensors(anywhere(output))
        to.slices, to.slots = anywhere(slices), anywhere(slots)
        to.sampling = untracked(sampling.unsafe_ptr())
        to.sampled = Int32(slots.dim_size(0))
        enqueue[N, K, parts](x, w, to, output.dim_size(0), ctx)


@extensibility.register("srm_up_8bit")
struct _Up8Bit:
    """The op with SiLU, of factors of 8 bits into one."""

    @staticmethod
    def execute[
        dtype: DType,
        //,
        target: StaticString,
        N: Int,
        K: Int,
        variants: StaticString,
    ](
        output: OutputTensor[dtype=dtype, rank=2, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        w: InputTensor[dtype=dtype, rank=2, ...],
        columns: InputTensor[dtype=F32, rank=2, ...],
        divisors: InputTensor[dtype=F32, rank=1, ...],
        scales: InputTensor[dtype=F32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert target == "gpu", "srm_up_8bit is for sm_90 alone"
        comptime parts = Parts(silu=True, factors=dtype, variants=variants)
        var to = Tensors(anywhere(output).unsafe_bitcast[BFloat16]())
        to.columns, to.divisors = anywhere(columns), anywhere(divisors)
        to.moments = anywhere(scales)
        enqueue[N, K, parts](x, w, to, output.dim_size(0), ctx)


@extensibility.register("srm_down_8bit")
struct _Down8Bit:
    """The op with bias and residual, and moments, of factors of 8 bits."""

    @staticmethod
    def execute[
        dtype: DType,
        //,
        target: StaticString,
        N: Int,
        K: Int,
        variants: StaticString,
    ](
        output: OutputTensor[dtype=BF16, rank=2, ...],
        moments: OutputTensor[dtype=F32, rank=3, ...],
        x: InputTensor[dtype=dtype, rank=2, ...],
        w: InputTensor[dtype=dtype, rank=2, ...],
        columns: InputTensor[dtype=F32, rank=2, ...],
        residual: InputTensor[dtype=BF16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert target == "gpu", "srm_down_8bit is for sm_90 alone"
        comptime parts = Parts(
            residual=True, moments=True, factors=dtype, variants=variants
        )
        var to = Tensors(anywhere(output))
        to.columns, to.residual = anywhere(columns), anywhere(residual)
        to.slices = anywhere(moments)
        enqueue[N, K, parts](x, w, to, output.dim_size(0), ctx)
