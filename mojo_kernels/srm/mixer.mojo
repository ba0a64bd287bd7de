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
cores left over split the rows. GPU: a thread takes 4 neighbouring channels in either half of a head,
so that a state moves 16 bytes at a time and the accesses of a warp fill whole sectors; the grid has
an axis each for rows, heads and channels, so that nothing is divided. Where a head is no multiple
of 8 channels, or a tensor does not lie on 16 bytes, a thread takes one. All run `_Unit.mix`.

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
from max.gpu import block_dim, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.builtin.device_passable import DevicePassable, DeviceTypeEncoder
from std.math import align_down, ceildiv, exp, fma
from std.sys import simd_width_of, size_of

from .parallel import BLOCK, num_tasks
from .rows import first_row
from ._pdl import launch_attributes, start_after_last
from ._values import Values, on_16_bytes, untracked

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


@always_inline
def _load[
    dtype: DType, //, width: Int, parts: Int
](values: Values[dtype], at: Int, apart: Int) -> SIMD[
    DType.float32, width * parts
]:
    """Read `parts` times `width` neighbours as float32."""
    var found = SIMD[DType.float32, width * parts]()
    comptime for part in range(parts):
        comptime alignment = (width if parts > 1 else 1) * size_of[dtype]()
        found = found.insert[offset=part * width](
            values.unsafe_load[width=width, alignment=alignment](
                at + part * apart
            ).cast[DType.float32]()
        )
    return found


@always_inline
def _store[
    dtype: DType, //, width: Int, parts: Int
](
    values: Values[dtype],
    at: Int,
    apart: Int,
    found: SIMD[DType.float32, width * parts],
):
    """Write what `_load` would read."""
    comptime for part in range(parts):
        comptime alignment = (width if parts > 1 else 1) * size_of[dtype]()
        values.unsafe_store[alignment=alignment](
            at + part * apart,
            found.slice[width, offset=part * width]().cast[dtype](),
        )


@fieldwise_init
struct _Unit[
    dtype: DType,
    state_dtype: DType,
    has_gamma: Bool,
    has_residual: Bool,
    silu: Bool,
](DevicePassable, TrivialRegisterPassable):
    """The op's tensors, each by its first value, and their shapes.

    Integers are of fixed width, because a device's Int need not be the host's; of 64 bits, because a
    pool may hold more than 2^31 values.
    """

    var y: Values[Self.dtype]
    var state: Values[Self.state_dtype]
    var x: Values[Self.dtype]
    var read_slots: Values[DType.int32]
    var write_slots: Values[DType.int32]
    var positions: Values[DType.int32]
    var row_offsets: Values[DType.int32]
    var alpha_in: Values[DType.float32]
    var alpha_out: Values[DType.float32]
    var beta: Values[DType.float32]
    var decay: Values[DType.float32]
    var gamma: Values[DType.float32]
    var residual: Values[Self.dtype]
    var num_rows: Int64
    var num_heads: Int64
    var head_dim: Int64
    var n_ctx: Int64
    var pool_width: Int64
    var pool_column: Int64  # where the unit's states begin in a slot

    comptime device_type: AnyType = Self

    @staticmethod
    def get_type_name() -> String:
        return "_Unit"

    def _to_device_type[
        T: DeviceTypeEncoder
    ](self, mut encoder: T, target: MutOpaquePointer[_]):
        target.unsafe_bitcast[Self]()[] = self

    @always_inline
    def feed[
        width: SIMDLength, //
    ](
        self,
        at: Int,
        decay: Float32,
        decay_rest: Float32,
        token: SIMD[DType.float32, width],
        mut s: SIMD[DType.float32, width],
    ) -> SIMD[DType.float32, width]:
        """Move states `s` of a head on by a token, whose scalars are at `at`; return the outputs.

        The residual is not in them yet.
        """
        comptime Vector = SIMD[DType.float32, width]
        s = _next_state(
            token, s, self.alpha_in[unsafe_offset=at], decay, decay_rest
        )
        var out = Vector(self.beta[unsafe_offset=at])
        comptime if Self.has_gamma:
            out = fma(Vector(self.gamma[unsafe_offset=at]), token, out)
        out = fma(Vector(self.alpha_out[unsafe_offset=at]), s, out)
        comptime if Self.silu:
            out = out / (1 + exp(-out))
        return out

    @always_inline
    def mix[width: Int, parts: Int](self, row: Int, head: Int, channel: Int):
        """Feed a row's tokens to some channels of a head.

        Parameters:
            width: Neighbouring channels, from `channel` on.
            parts: 1, or 2 for as many half a head further; then their addresses are multiples of
                their size.

        Args:
            row: Row of the batch.
            head: Head that the channels belong to.
            channel: The first of them, counted through all heads.
        """
        comptime Vector = SIMD[DType.float32, width * parts]
        var apart = Int(self.head_dim) >> (parts - 1)
        var dim = Int(self.num_heads * self.head_dim)
        var column = Int(self.pool_column) + channel
        var position = Int(self.positions[unsafe_offset=row])
        var at = head * Int(self.n_ctx) + position
        var s = Vector(0)
        if position > 0:
            s = _load[width, parts](
                self.state,
                Int(self.read_slots[unsafe_offset=row]) * Int(self.pool_width)
                + column,
                apart,
            )
        for t in range(
            Int(self.row_offsets[unsafe_offset=row]),
            Int(self.row_offsets[unsafe_offset=row + 1]),
        ):
            var i = t * dim + channel
            var token = _load[width, parts](self.x, i, apart)
            var out = self.feed(
                at,
                self.decay[unsafe_offset=head],
                self.decay[unsafe_offset=head + Int(self.num_heads)],
                token,
                s,
            )
            comptime if Self.has_residual:
                out += _load[width, parts](self.residual, i, apart)
            _store[width, parts](self.y, i, apart, out)
            s = s.cast[Self.state_dtype]().cast[DType.float32]()
            at += 1
        _store[width, parts](
            self.state,
            Int(self.write_slots[unsafe_offset=row]) * Int(self.pool_width)
            + column,
            apart,
            s,
        )

    @always_inline
    def mix_thread[width: Int, parts: Int, pdl: Bool = False](self):
        """What a thread of the grid that `launch` makes does; parameters are those of `mix`, and
        whether it starts while the kernel before it ends.
        """
        start_after_last[pdl]()
        var row = block_idx.x * block_dim.z + thread_idx.z
        var head = block_idx.y * block_dim.y + thread_idx.y
        var channel = (block_idx.z * block_dim.x + thread_idx.x) * width
        if (
            row < Int(self.num_rows)
            and head < Int(self.num_heads)
            and channel < Int(self.head_dim) >> (parts - 1)
        ):
            self.mix[width, parts](
                row, head, head * Int(self.head_dim) + channel
            )

    def launch[
        width: Int, parts: Int, pdl: Bool
    ](self, ctx: DeviceContext) raises:
        """Run `mix` for all rows, heads and channels on a GPU."""
        var unit = self

        def mix_rows() {var}:
            unit.mix_thread[width, parts, pdl]()

        var lanes = Int(self.head_dim) // (width * parts)
        var x = min(lanes, BLOCK)
        var y = min(Int(self.num_heads), BLOCK // x)
        var z = min(BLOCK // (x * y), 64)  # more a block may not have
        ctx.enqueue_function(
            mix_rows,
            grid_dim=(
                ceildiv(Int(self.num_rows), z),
                ceildiv(Int(self.num_heads), y),
                ceildiv(lanes, x),
            ),
            block_dim=(x, y, z),
            attributes=launch_attributes[pdl](),
        )


@extensibility.register("srm_mix")
struct _Mix:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString,
        has_gamma: Bool,
        has_residual: Bool,
        silu: Bool,
        pdl: Bool,
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
        var pool_width = state.dim_size(1)
        var of_unit = _Unit[
            y.dtype, state.dtype, has_gamma, has_residual, silu
        ](
            untracked(y.unsafe_ptr()),
            untracked(state.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            untracked(read_slots.unsafe_ptr()),
            untracked(write_slots.unsafe_ptr()),
            untracked(positions.unsafe_ptr()),
            untracked(row_offsets.unsafe_ptr()),
            untracked(alpha_in.unsafe_ptr()),
            untracked(alpha_out.unsafe_ptr()),
            untracked(beta.unsafe_ptr()),
            untracked(decay.unsafe_ptr()),
            untracked(gamma.unsafe_ptr()),
            untracked(residual.unsafe_ptr()),
            Int64(num_rows),
            Int64(num_heads),
            Int64(head_dim),
            Int64(beta.dim_size(1)),
            Int64(pool_width),
            Int64(Int(unit) * dim),
        )

        comptime if target == "cpu":
            comptime WIDTH = simd_width_of[DType.float32]()
            var offset_ptr = row_offsets.unsafe_ptr()
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
                            of_unit.mix[_SLICE, 1](row, head, channel)
                            channel += _SLICE
                        while channel + WIDTH <= stop:
                            of_unit.mix[WIDTH, 1](row, head, channel)
                            channel += WIDTH
                        while channel < stop:
                            of_unit.mix[1, 1](row, head, channel)
                            channel += 1

            sync_parallelize(mix_share, slices * groups)
        else:
            if num_rows == 0:
                return
            if (
                head_dim % 8 == 0
                and pool_width % 8 == 0
                and on_16_bytes(of_unit.y)
                and on_16_bytes(of_unit.state)
                and on_16_bytes(of_unit.x)
                and on_16_bytes(of_unit.residual)
            ):
                of_unit.launch[4, 2, pdl](ctx)
            else:
                of_unit.launch[1, 1, pdl](ctx)
