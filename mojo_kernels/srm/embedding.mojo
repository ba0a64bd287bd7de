"""Embedding (`srm_embed`): a row of the table for each token, also for tokens still on the device.

    x[t] = table[token_ids[t]]                  where token_ids[t] >= 0
    x[t] = table[last_token[read_slots[t]]]     where token_ids[t] == -1: decode row t, whose only
                                                token is token t

CPU: tokens are split over the cores. GPU: a thread per (token, channel), neighbouring threads on
neighbouring channels.

    x           [T, d]  any float      out
    last_token  [S]     int32          in; a buffer, because `srm_sample` mutates it
    token_ids   [T]     int32          in
    read_slots  [R]     int32          in; R >= the number of -1 tokens
    table       [V, d]  as x           in
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu import global_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv
from std.memory import unsafe_memcpy

from .parallel import num_tasks

comptime _BLOCK = 256  # threads of a GPU block

comptime _Ints = Pointer[Int32, _]


@always_inline
def _resolve(
    token: Int, token_ids: _Ints, read_slots: _Ints, last_token: _Ints
) -> Int:
    """The row of the table that a token selects."""
    var id = token_ids[unsafe_offset=token]
    if id < 0:
        id = last_token[unsafe_offset=Int(read_slots[unsafe_offset=token])]
    return Int(id)


@extensibility.register("srm_embed")
struct _Embed:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString
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
        var out_ptr = x.unsafe_ptr()
        var last_ptr = last_token.unsafe_ptr()
        var ids_ptr = token_ids.unsafe_ptr()
        var slots_ptr = read_slots.unsafe_ptr()
        var table_ptr = table.unsafe_ptr()

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
            # An Int may not cross to the device: its width is the host's.
            var size = Int64(num_tokens * dim)
            var width = Int64(dim)

            def embed_element() {var}:
                var i = global_idx.x
                if i >= Int(size):
                    return
                var t, c = divmod(i, Int(width))
                var row = _resolve(t, ids_ptr, slots_ptr, last_ptr)
                out_ptr[unsafe_offset=i] = table_ptr[
                    unsafe_offset=row * Int(width) + c
                ]

            if num_tokens > 0:
                ctx.enqueue_function(
                    embed_element,
                    grid_dim=ceildiv(num_tokens * dim, _BLOCK),
                    block_dim=_BLOCK,
                )
