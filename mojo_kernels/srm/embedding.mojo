"""Embedding (`srm_embed`): a row of the table for each token, also for tokens still on the device.
On a GPU `srm_embed_stream` also writes the moments that the products of `products/sm90.mojo` read.

    x[t] = table[token_ids[t]]                  where token_ids[t] >= 0
    x[t] = table[last_token[read_slots[t]]]     where token_ids[t] == -1: decode row t, whose only
                                                token is token t

CPU: tokens are split over the cores. GPU: a thread per 16 bytes of a row, or per channel where rows
are no multiple of that. A warp has the 256 columns that moments are of, or 128 at 8 bytes a thread
where d is no multiple of 256.

    x           [T, d]           any float      out; bfloat16 where moments are wanted, d % 128 == 0
    moments     [T, d / 256, 2]  float32        out, of `srm_embed_stream`; or d / 128
    last_token  [S]              int32          in; a buffer, because `srm_sample` mutates it
    token_ids   [T]              int32          in
    read_slots  [R]              int32          in; R >= the number of -1 tokens
    table       [V, d]           as x           in
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
import max.gpu.primitives.warp as warp
from max.algorithm import sync_parallelize
from max.gpu import lane_id
from max.gpu.host import DeviceContext
from std.memory import unsafe_memcpy
from std.sys import size_of

from .parallel import RowGrid, num_tasks
from ._pdl import launch_attributes, start_after_last
from ._values import Values, on_16_bytes, untracked


@always_inline
def _resolve(
    token: Int,
    token_ids: Values[DType.int32],
    read_slots: Values[DType.int32],
    last_token: Values[DType.int32],
) -> Int:
    """The row of the table that a token selects."""
    var id = token_ids[unsafe_offset=token]
    if id < 0:
        id = last_token[unsafe_offset=Int(read_slots[unsafe_offset=token])]
    return Int(id)


@always_inline
def embed_thread[
    dtype: DType, //, width: Int, has_moments: Bool = False, pdl: Bool = False
](
    x: Values[dtype],
    moments: Values[DType.float32],
    last_token: Values[DType.int32],
    token_ids: Values[DType.int32],
    read_slots: Values[DType.int32],
    table: Values[dtype],
    num_tokens: Int64,
    dim: Int64,
):
    """Copy `width` neighbouring channels of a token, what a thread of a `RowGrid` does.

    Parameters:
        dtype: Of the table.
        width: Channels; of more than one the addresses are multiples of their size.
        has_moments: Whether the warp also writes the moments of its channels, all of one token.
        pdl: Whether the kernel starts while the one before it ends.

    Args:
        x: The vectors.
        moments: Mean and sum of squares about it, of each warp; may point anywhere if not wanted.
        last_token: Last token of each slot.
        token_ids: Tokens, or -1.
        read_slots: Slots of the first tokens.
        table: The vectors of all tokens of the vocabulary.
        num_tokens: Tokens.
        dim: Channels of a vector. An Int may not cross to the device: its width is the host's.
    """
    comptime ALIGNMENT = width * size_of[dtype]()
    comptime LANES = 32
    start_after_last[pdl]()
    var token = RowGrid.row()
    var channel = RowGrid.piece() * width
    if token < Int(num_tokens) and channel < Int(dim):
        var row = _resolve(token, token_ids, read_slots, last_token)
        var at = token * Int(dim) + channel
        var values = table.unsafe_load[width=width, alignment=ALIGNMENT](
            row * Int(dim) + channel
        )
        x.unsafe_store[alignment=ALIGNMENT](at, values)

        comptime if has_moments:

            @always_inline
            def over_lanes(var total: Float32) -> Float32:
                comptime for step in range(5):
                    total += warp.shuffle_xor(total, UInt32(1 << step))
                return total

            var wide = values.cast[DType.float32]()
            var mean = over_lanes(wide.reduce_add()) / Float32(LANES * width)
            wide -= mean
            var squares = over_lanes((wide * wide).reduce_add())
            if lane_id() == 0:
                moments.unsafe_store[alignment=8](
                    at // (LANES * width) * 2,
                    SIMD[DType.float32, 2](mean, squares),
                )


def _enqueue[
    dtype: DType, //, width: Int, has_moments: Bool, pdl: Bool
](
    x: Values[dtype],
    moments: Values[DType.float32],
    last_token: Values[DType.int32],
    token_ids: Values[DType.int32],
    read_slots: Values[DType.int32],
    table: Values[dtype],
    num_tokens: Int,
    dim: Int,
    ctx: DeviceContext,
) raises:
    """Run `embed_thread` for all tokens on a GPU."""
    if num_tokens == 0:
        return
    var size = Int64(num_tokens)
    var channels = Int64(dim)

    def embed_rows() {var}:
        embed_thread[width, has_moments, pdl](
            x,
            moments,
            last_token,
            token_ids,
            read_slots,
            table,
            size,
            channels,
        )

    var grid = RowGrid(num_tokens, dim // width)
    ctx.enqueue_function(
        embed_rows,
        grid_dim=grid.blocks,
        block_dim=grid.block,
        attributes=launch_attributes[pdl](),
    )


@extensibility.register("srm_embed")
struct _Embed:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString, pdl: Bool
    ](
        x: OutputTensor[rank=2, ...],
        last_token: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        token_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        read_slots: InputTensor[dtype=DType.int32, rank=1, ...],
        table: InputTensor[dtype=x.dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var num_tokens = x.dim_size(0)
        var dim = x.dim_size(1)
        var out_ptr = untracked(x.unsafe_ptr())
        var last_ptr = untracked(last_token.unsafe_ptr())
        var ids_ptr = untracked(token_ids.unsafe_ptr())
        var slots_ptr = untracked(read_slots.unsafe_ptr())
        var table_ptr = untracked(table.unsafe_ptr())

        comptime if target == "cpu":
            var tasks = num_tasks(num_tokens * dim)

            def embed_share(task: Int) {imm}:
                for t in range(
                    task * num_tokens // tasks, (task + 1) * num_tokens // tasks
                ):
                    unsafe_memcpy(
                        dest=out_ptr.unsafe_offset(t * dim),
                        src=table_ptr.unsafe_offset(
                            _resolve(t, ids_ptr, slots_ptr, last_ptr) * dim
                        ),
                        count=dim,
                    )

            sync_parallelize(embed_share, tasks)
        else:

            def launch[width: Int]() raises {var}:
                _enqueue[width, False, pdl](
                    out_ptr,
                    out_ptr.unsafe_bitcast[Float32](),
                    last_ptr,
                    ids_ptr,
                    slots_ptr,
                    table_ptr,
                    num_tokens,
                    dim,
                    ctx,
                )

            comptime WIDEST = 16 // size_of[x.dtype]()
            if (
                dim % WIDEST == 0
                and on_16_bytes(out_ptr)
                and on_16_bytes(table_ptr)
            ):
                launch[WIDEST]()
            else:
                launch[1]()


@extensibility.register("srm_embed_stream")
struct _EmbedStream:
    """The op with moments."""

    @staticmethod
    def execute[
        target: StaticString, pdl: Bool
    ](
        x: OutputTensor[dtype=DType.bfloat16, rank=2, ...],
        moments: OutputTensor[dtype=DType.float32, rank=3, ...],
        last_token: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        token_ids: InputTensor[dtype=DType.int32, rank=1, ...],
        read_slots: InputTensor[dtype=DType.int32, rank=1, ...],
        table: InputTensor[dtype=DType.bfloat16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        comptime assert target == "gpu", "srm_embed_stream is for GPUs alone"

        def launch[width: Int]() raises {imm}:
            _enqueue[width, True, pdl](
                untracked(x.unsafe_ptr()),
                untracked(moments.unsafe_ptr()),
                untracked(last_token.unsafe_ptr()),
                untracked(token_ids.unsafe_ptr()),
                untracked(read_slots.unsafe_ptr()),
                untracked(table.unsafe_ptr()),
                x.dim_size(0),
                x.dim_size(1),
                ctx,
            )

        if x.dim_size(1) % 256 == 0:
            launch[8]()
        else:
            launch[4]()
