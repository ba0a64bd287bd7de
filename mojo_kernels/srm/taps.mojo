"""Taps (`srm_taps`): a weighted sum over neighbouring channels, the output of "kernel" mixers.

For token t at context position p and channel j, q being 0 left of channel 0:

    y[t, j] = sum over i < k of taps[i, p] * q[t, j - (k - 1) + i] + beta[p] + residual[t, j]

Row i of the batch owns tokens row_offsets[i] up to row_offsets[i + 1], the first one at positions[i].
The sum is taken in the order of i, so a channel's bits depend on its own token alone.

CPU: tokens are split over the cores. GPU: a thread per (token, channel), neighbouring threads on
neighbouring channels. Both run `tap_channels`.

    y            [T, d]      any float      out
    q            [T, d]      as y           in
    positions    [R]         int32          in
    row_offsets  [R + 1]     int32          in
    taps         [k, n]      float32        in
    beta         [n]         float32        in
    residual     [T, d]      as y           in
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu import global_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv, fma
from std.sys import simd_width_of

from .parallel import num_tasks
from .rows import row_of

comptime _BLOCK = 256  # threads of a GPU block


@extensibility.register("srm_taps")
struct _Taps:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=2, ...],
        q: InputTensor[dtype=y.dtype, rank=2, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        row_offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        taps: InputTensor[dtype=DType.float32, rank=2, ...],
        beta: InputTensor[dtype=DType.float32, rank=1, ...],
        residual: InputTensor[dtype=y.dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var num_tokens = q.dim_size(0)
        var dim = q.dim_size(1)
        var y_ptr = y.unsafe_ptr()
        var q_ptr = q.unsafe_ptr()
        var residual_ptr = residual.unsafe_ptr()
        var position_ptr = positions.unsafe_ptr()
        var offset_ptr = row_offsets.unsafe_ptr()
        var taps_ptr = taps.unsafe_ptr()
        var beta_ptr = beta.unsafe_ptr()
        # Fixed-width, because a device's Int need not be the host's.
        var d = Int64(dim)
        var n = Int64(taps.dim_size(1))
        var k = Int64(taps.dim_size(0))
        var rows = Int64(positions.dim_size(0))

        @always_inline
        def position_of(token: Int) {var} -> Int:
            var row = row_of(offset_ptr, Int(rows), token)
            return Int(position_ptr[unsafe_offset=row]) + (
                token - Int(offset_ptr[unsafe_offset=row])
            )

        @always_inline
        def tap_channels[
            width: Int
        ](token: Int, position: Int, channel: Int) {var}:
            """Sources left of channel 0 are left out: `width` > 1 has none."""
            comptime Vector = SIMD[DType.float32, width]
            var sum = Vector(beta_ptr[unsafe_offset=position])
            var first = channel - Int(k) + 1
            for i in range(max(0, -first), Int(k)):
                sum = fma(
                    Vector(taps_ptr[unsafe_offset=i * Int(n) + position]),
                    q_ptr.unsafe_load[width=width](
                        token * Int(d) + first + i
                    ).cast[DType.float32](),
                    sum,
                )
            var at = token * Int(d) + channel
            sum += residual_ptr.unsafe_load[width=width](at).cast[
                DType.float32
            ]()
            y_ptr.unsafe_store(at, sum.cast[y.dtype]())

        comptime if target == "cpu":
            comptime WIDTH = simd_width_of[DType.float32]()
            var tasks = num_tasks(num_tokens * dim)
            var edge = min(dim, Int(k) - 1)

            def tap_share(task: Int) {imm}:
                for token in range(
                    task * num_tokens // tasks, (task + 1) * num_tokens // tasks
                ):
                    var position = position_of(token)
                    for channel in range(edge):
                        tap_channels[1](token, position, channel)
                    var channel = edge
                    while channel + WIDTH <= dim:
                        tap_channels[WIDTH](token, position, channel)
                        channel += WIDTH
                    while channel < dim:
                        tap_channels[1](token, position, channel)
                        channel += 1

            sync_parallelize(tap_share, tasks)
        else:
            var size = Int64(num_tokens * dim)

            def tap_thread() {var}:
                var i = global_idx.x
                if i < Int(size):
                    var token, channel = divmod(i, Int(d))
                    tap_channels[1](token, position_of(token), channel)

            if num_tokens > 0:
                ctx.enqueue_function(
                    tap_thread,
                    grid_dim=ceildiv(num_tokens * dim, _BLOCK),
                    block_dim=_BLOCK,
                )
