"""Taps (`srm_taps`): a weighted sum over neighbouring channels, the output of "kernel" mixers.

For token t at context position p and channel j, q being 0 left of channel 0:

    y[t, j] = sum over i < k of taps[i, p] * q[t, j - (k - 1) + i] + beta[p] + residual[t, j]

Row i of the batch owns tokens row_offsets[i] up to row_offsets[i + 1], the first one at positions[i].
The sum is taken in the order of i, so a channel's bits depend on its own token alone.

CPU: tokens are split over the cores. GPU: a thread takes the neighbouring channels of 16 bytes, which
it reads at once, as it does those left of them that it needs; where d is no multiple of that, or a
tensor does not lie on 16 bytes, it takes one.

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
from max.gpu.host import DeviceContext
from std.math import fma
from std.sys import simd_width_of, size_of

from .parallel import RowGrid, num_tasks
from .rows import row_of
from ._values import Values, on_16_bytes, untracked


@fieldwise_init
struct _Taps[dtype: DType](TrivialRegisterPassable):
    """The op's tensors, each by its first value, and their shapes.

    Integers are of fixed width, because a device's Int need not be the host's.
    """

    var y: Values[Self.dtype]
    var q: Values[Self.dtype]
    var positions: Values[DType.int32]
    var row_offsets: Values[DType.int32]
    var taps: Values[DType.float32]
    var beta: Values[DType.float32]
    var residual: Values[Self.dtype]
    var num_tokens: Int64
    var num_rows: Int64
    var dim: Int64
    var num_taps: Int64
    var n_ctx: Int64

    @always_inline
    def position_of(self, token: Int) -> Int:
        """The context position of a token."""
        var row = row_of(self.row_offsets, Int(self.num_rows), token)
        return Int(self.positions[unsafe_offset=row]) + (
            token - Int(self.row_offsets[unsafe_offset=row])
        )

    @always_inline
    def add_channels[width: Int](self, token: Int, position: Int, channel: Int):
        """Write `width` neighbours; of more than one, none has sources left of channel 0.
        """
        comptime Vector = SIMD[DType.float32, width]
        var sum = Vector(self.beta[unsafe_offset=position])
        var first = channel - Int(self.num_taps) + 1
        for i in range(max(0, -first), Int(self.num_taps)):
            var sources = self.q.unsafe_load[width=width](
                token * Int(self.dim) + first + i
            )
            var weight = self.taps[unsafe_offset=i * Int(self.n_ctx) + position]
            sum = fma(Vector(weight), sources.cast[DType.float32](), sum)
        self.write[width, size_of[Self.dtype]()](token, channel, sum)

    @always_inline
    def add_piece[width: Int](self, token: Int, position: Int, channel: Int):
        """Write the 16 bytes of channels that begin at a multiple of `width`.
        """
        # The sources reach so many pieces to the left, of the first of which some are skipped.
        var sum = SIMD[DType.float32, width](self.beta[unsafe_offset=position])
        var pieces = Int(UInt(Int(self.num_taps) + width - 2) // UInt(width))
        var skipped = pieces * width - Int(self.num_taps) + 1
        var weight = self.taps.unsafe_offset(position)
        var left = self.piece[width](token, channel - pieces * width)
        for further in reversed(range(pieces)):
            var right = self.piece[width](token, channel - further * width)
            var both = left.join(right)
            comptime for apart in range(width):
                if apart >= skipped:
                    comptime for at in range(width):
                        sum[at] = fma(weight[], both[apart + at], sum[at])
                    weight = weight.unsafe_offset(Int(self.n_ctx))
            skipped = 0
            left = right
        sum = fma(SIMD[DType.float32, width](weight[]), left, sum)
        self.write[width, 16](token, channel, sum)

    @always_inline
    def piece[
        width: Int
    ](self, token: Int, channel: Int) -> SIMD[DType.float32, width]:
        """Read `width` sources at once, 0 left of channel 0."""
        if channel < 0:
            return 0
        return self.q.unsafe_load[width=width, alignment=16](
            token * Int(self.dim) + channel
        ).cast[DType.float32]()

    @always_inline
    def write[
        width: Int, alignment: Int
    ](self, token: Int, channel: Int, sum: SIMD[DType.float32, width]):
        """Write channels, their residual added."""
        var at = token * Int(self.dim) + channel
        var residual = self.residual.unsafe_load[
            width=width, alignment=alignment
        ](at)
        self.y.unsafe_store[alignment=alignment](
            at, (sum + residual.cast[DType.float32]()).cast[Self.dtype]()
        )

    @always_inline
    def tap_thread[width: Int](self):
        """What a thread of a `RowGrid` does, one of `width` channels."""
        var token = RowGrid.row()
        var channel = RowGrid.piece() * width
        if token < Int(self.num_tokens) and channel < Int(self.dim):
            comptime if width == 1:
                self.add_channels[1](token, self.position_of(token), channel)
            else:
                self.add_piece[width](token, self.position_of(token), channel)

    def launch[width: Int](self, ctx: DeviceContext) raises:
        """Run `tap_thread` for all tokens on a GPU."""
        var taps = self

        def tap_rows() {var}:
            taps.tap_thread[width]()

        var grid = RowGrid(Int(self.num_tokens), Int(self.dim) // width)
        ctx.enqueue_function(
            tap_rows, grid_dim=grid.blocks, block_dim=grid.block
        )


@extensibility.register("srm_taps")
struct _TapsOp:
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
        var all = _Taps[y.dtype](
            untracked(y.unsafe_ptr()),
            untracked(q.unsafe_ptr()),
            untracked(positions.unsafe_ptr()),
            untracked(row_offsets.unsafe_ptr()),
            untracked(taps.unsafe_ptr()),
            untracked(beta.unsafe_ptr()),
            untracked(residual.unsafe_ptr()),
            Int64(num_tokens),
            Int64(positions.dim_size(0)),
            Int64(dim),
            Int64(taps.dim_size(0)),
            Int64(taps.dim_size(1)),
        )

        comptime if target == "cpu":
            comptime WIDTH = simd_width_of[DType.float32]()
            var tasks = num_tasks(num_tokens * dim)
            var edge = min(dim, Int(all.num_taps) - 1)

            def tap_share(task: Int) {imm}:
                for token in range(
                    task * num_tokens // tasks, (task + 1) * num_tokens // tasks
                ):
                    var position = all.position_of(token)
                    for channel in range(edge):
                        all.add_channels[1](token, position, channel)
                    var channel = edge
                    while channel + WIDTH <= dim:
                        all.add_channels[WIDTH](token, position, channel)
                        channel += WIDTH
                    while channel < dim:
                        all.add_channels[1](token, position, channel)
                        channel += 1

            sync_parallelize(tap_share, tasks)
        else:
            comptime WIDEST = 16 // size_of[y.dtype]()
            if num_tokens == 0:
                return
            if (
                dim % WIDEST == 0
                and on_16_bytes(all.y)
                and on_16_bytes(all.q)
                and on_16_bytes(all.residual)
            ):
                all.launch[WIDEST](ctx)
            else:
                all.launch[1](ctx)
