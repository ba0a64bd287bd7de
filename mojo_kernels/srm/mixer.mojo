"""Mixer (`srm_mix`): one recurrent unit of a layer over a ragged batch, states in place.

For channel c of head h, at context position p:

    s <- alpha_in[h, p] * x + decay[h] * s
    y  = act(alpha_out[h, p] * s (+ gamma[h, p] * x) + beta[h, p]) (+ residual)

act is SiLU or nothing. A column head has alpha_in = 1, a row head alpha_out = 1. decay is the sum of
two float32: over 2,048 tokens the rounding of one would show in the fifth digit. Row i feeds tokens row_offsets[i] up to
row_offsets[i + 1], the first one at positions[i]. At position 0 it starts from s = 0, whatever its
read slot holds; else from state[read_slots[i]]. Its last s goes to state[write_slots[i]]; a row
without tokens so copies its state. Between tokens s is rounded to the state's dtype, so that a
prompt fed in any pieces leaves the same bits as one fed at once; the rest is float32.

No slot that a row writes may be read or written by another row. Many rows may read one slot.

CPU: the channels are split over the cores, so that a single long prompt keeps all of them busy;
cores left over split the rows. GPU: a thread per (row, channel), neighbouring threads on
neighbouring channels. Both run `mix_channels`.

    y            [T, d]      any float      out
    state        [S, W]      any float      mutated: columns unit * d up to (unit + 1) * d
    unit         scalar      int32          in, on the host: layer * units of a layer + unit
    x            [T, d]      as y           in
    read_slots   [R]         int32          in
    write_slots  [R]         int32          in
    positions    [R]         int32          in
    row_offsets  [R + 1]     int32          in
    alpha_in     [H, n]      float32        in; H divides d
    alpha_out    [H, n]      float32        in
    beta         [H, n]      float32        in
    decay        [2, H]      float32        in: rounded, and what the rounding left
    gamma        [H, n]      float32        in; any tensor where has_gamma is False
    residual     [T, d]      as y           in; any tensor where has_residual is False
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu import global_idx
from max.gpu.host import DeviceContext
from std.math import align_down, ceildiv, exp, fma
from std.sys import simd_width_of

from .parallel import num_tasks
from .rows import first_row

comptime _BLOCK = 256  # threads of a GPU block
comptime _SLICE = 64  # fewest channels split off for a core: whole cache lines


@always_inline
def _next_state[
    width: SIMDLength
](
    x: SIMD[DType.float32, width],
    s: SIMD[DType.float32, width],
    alpha_in: Float32,
    decay: Float32,
    decay_rest: Float32,
) -> SIMD[DType.float32, width]:
    """The state of some channels of a head after a token.

    The fused multiply-adds are spelled out: a channel's bits must not depend on `width`.
    """
    comptime Vector = SIMD[DType.float32, width]
    return fma(Vector(decay), s, fma(Vector(decay_rest), s, alpha_in * x))


@extensibility.register("srm_mix")
struct _Mix:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString, has_gamma: Bool, has_residual: Bool, silu: Bool
    ](
        y: OutputTensor[rank=2, ...],
        state: MutableInputTensor[rank=2, ...],
        unit: Int32,
        x: InputTensor[dtype=y.dtype, rank=2, ...],
        read_slots: InputTensor[dtype=DType.int32, rank=1, ...],
        write_slots: InputTensor[dtype=DType.int32, rank=1, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        row_offsets: InputTensor[dtype=DType.int32, rank=1, ...],
        alpha_in: InputTensor[dtype=DType.float32, rank=2, ...],
        alpha_out: InputTensor[dtype=DType.float32, rank=2, ...],
        beta: InputTensor[dtype=DType.float32, rank=2, ...],
        decay: InputTensor[dtype=DType.float32, rank=2, ...],
        gamma: InputTensor[dtype=DType.float32, rank=2, ...],
        residual: InputTensor[dtype=y.dtype, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        var num_rows = read_slots.dim_size(0)
        var num_tokens = x.dim_size(0)
        var dim = x.dim_size(1)
        var num_heads = decay.dim_size(1)
        var head_dim = dim // num_heads

        var y_ptr = y.unsafe_ptr()
        var x_ptr = x.unsafe_ptr()
        var residual_ptr = residual.unsafe_ptr()
        var state_ptr = state.unsafe_ptr()
        var read_ptr = read_slots.unsafe_ptr()
        var write_ptr = write_slots.unsafe_ptr()
        var position_ptr = positions.unsafe_ptr()
        var offset_ptr = row_offsets.unsafe_ptr()
        var in_ptr = alpha_in.unsafe_ptr()
        var out_ptr = alpha_out.unsafe_ptr()
        var beta_ptr = beta.unsafe_ptr()
        var decay_ptr = decay.unsafe_ptr()
        var gamma_ptr = gamma.unsafe_ptr()
        # Fixed-width, because a device's Int need not be the host's; 64 bits, because a pool may hold
        # more than 2^31 values.
        var d = Int64(dim)
        var n = Int64(beta.dim_size(1))
        var heads = Int64(num_heads)
        var pool_width = Int64(state.dim_size(1))
        var pool_column = Int64(Int(unit) * dim)

        @always_inline
        def mix_channels[width: Int](row: Int, channel: Int, head: Int) {var}:
            var column = Int(pool_column) + channel
            var at = head * Int(n) + Int(position_ptr[unsafe_offset=row])
            var s = SIMD[DType.float32, width](0)
            if position_ptr[unsafe_offset=row] > 0:
                s = state_ptr.unsafe_load[width=width](
                    Int(read_ptr[unsafe_offset=row]) * Int(pool_width) + column
                ).cast[DType.float32]()
            for t in range(
                Int(offset_ptr[unsafe_offset=row]),
                Int(offset_ptr[unsafe_offset=row + 1]),
            ):
                var i = t * Int(d) + channel
                var token = x_ptr.unsafe_load[width=width](i).cast[
                    DType.float32
                ]()
                s = _next_state(
                    token,
                    s,
                    in_ptr[unsafe_offset=at],
                    decay_ptr[unsafe_offset=head],
                    decay_ptr[unsafe_offset=head + Int(heads)],
                )
                comptime Vector = SIMD[DType.float32, width]
                var out = Vector(beta_ptr[unsafe_offset=at])
                comptime if has_gamma:
                    out = fma(Vector(gamma_ptr[unsafe_offset=at]), token, out)
                out = fma(Vector(out_ptr[unsafe_offset=at]), s, out)
                comptime if silu:
                    out = out / (1 + exp(-out))
                comptime if has_residual:
                    out += residual_ptr.unsafe_load[width=width](i).cast[
                        DType.float32
                    ]()
                y_ptr.unsafe_store(i, out.cast[y.dtype]())
                s = s.cast[state.dtype]().cast[DType.float32]()
                at += 1
            state_ptr.unsafe_store(
                Int(write_ptr[unsafe_offset=row]) * Int(pool_width) + column,
                s.cast[state.dtype](),
            )

        comptime if target == "cpu":
            comptime WIDTH = simd_width_of[DType.float32]()
            var tasks = num_tasks(num_tokens * dim)
            var slices = max(1, min(tasks, dim // _SLICE))
            var groups = ceildiv(tasks, slices)

            def mix_share(task: Int) {imm}:
                var group, slice = divmod(task, slices)
                var begin = align_down(slice * dim // slices, _SLICE)
                var end = dim if slice == slices - 1 else align_down(
                    (slice + 1) * dim // slices, _SLICE
                )
                var first = first_row(
                    offset_ptr, num_rows, group * num_tokens // groups
                )
                var last = num_rows if group == groups - 1 else first_row(
                    offset_ptr, num_rows, (group + 1) * num_tokens // groups
                )
                for row in range(first, last):
                    var channel = begin
                    while channel < end:
                        var head = channel // head_dim
                        var stop = min(end, (head + 1) * head_dim)
                        while channel + _SLICE <= stop:
                            mix_channels[_SLICE](row, channel, head)
                            channel += _SLICE
                        while channel + WIDTH <= stop:
                            mix_channels[WIDTH](row, channel, head)
                            channel += WIDTH
                        while channel < stop:
                            mix_channels[1](row, channel, head)
                            channel += 1

            sync_parallelize(mix_share, slices * groups)
        else:
            var size = Int64(num_rows * dim)
            var width = Int64(head_dim)

            def mix_thread() {var}:
                var i = global_idx.x
                if i < Int(size):
                    var row, channel = divmod(i, Int(d))
                    mix_channels[1](row, channel, channel // Int(width))

            if num_rows > 0:
                ctx.enqueue_function(
                    mix_thread,
                    grid_dim=ceildiv(num_rows * dim, _BLOCK),
                    block_dim=_BLOCK,
                )
