"""The matrix product of any shape and dtype on a GPU (`srm_linear_plain`), without tensor cores.

    out[m, n] = act(bias[n] + sum_k x[m, k] * w[n, k]) + residual[m, n]

act is the identity or SiLU; bias and residual may be absent, and SiLU excludes a residual. It is for
models whose widths `sm90.mojo` does not have, for float32, and for other GPUs.

A block of 16 x 16 threads computes TILE x TILE elements, a thread 4 x 4 of them. The sum of an
element is one chain of fused multiply-adds in float32, from its bias over k, and is rounded once: its
bits do not depend on M, nor on other rows.

    out        [M, N]  any float  out
    x          [T, K]  as out     in; T >= M
    w          [N, K]  as out     in
    bias       [N]     as out     in; any tensor when has_bias is False
    residual   [M, N]  as out     in; any tensor when has_residual is False
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.gpu import barrier, block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import ceildiv, exp, fma

from ..logits._gpu_block import Shared, shared
from .._values import Values, untracked

comptime F32 = DType.float32
"""Of sums."""
comptime SIDE = 16
"""Threads of a block along rows and along columns."""
comptime EACH = 4
"""Rows and columns of a thread."""
comptime TILE = SIDE * EACH
"""Rows and columns of a block."""
comptime DEPTH = 16
"""Values of a row that are in shared memory at once."""
comptime STRIDE = TILE + 1
"""Between values of a row there, so that threads that write them do not share a bank."""


@fieldwise_init
struct _Product[dtype: DType](TrivialRegisterPassable):
    """The op's tensors, each by its first value, and their shapes."""

    var out_: Values[Self.dtype]
    var x: Values[Self.dtype]
    var w: Values[Self.dtype]
    var bias: Values[Self.dtype]
    var residual: Values[Self.dtype]
    var num_rows: Int64
    var depth: Int64
    var columns: Int64

    @always_inline
    def fetch(
        self,
        values: Values[Self.dtype],
        first: Int,
        count: Int,
        begin: Int,
        tile: Shared[F32],
    ):
        """Copy DEPTH values of TILE rows into shared memory, 0 for those that are not there.
        """
        comptime for turn in range(TILE // SIDE):
            var at = thread_idx.x + turn * SIDE * SIDE
            var row = at // DEPTH
            var k = at % DEPTH
            var value = Float32(0)
            if first + row < count and begin + k < Int(self.depth):
                value = values[
                    unsafe_offset=(first + row) * Int(self.depth) + begin + k
                ].cast[F32]()
            tile[unsafe_offset=k * STRIDE + row] = value

    @always_inline
    def multiply_tile[has_bias: Bool, has_residual: Bool, silu: Bool](self):
        """What a thread does."""
        var xs = shared[F32, DEPTH * STRIDE]()
        var ws = shared[F32, DEPTH * STRIDE]()
        var first_row = block_idx.x * TILE
        var first_column = block_idx.y * TILE
        var row = (thread_idx.x // SIDE) * EACH
        var column = (thread_idx.x % SIDE) * EACH
        var sums = SIMD[F32, EACH * EACH](0)
        comptime if has_bias:
            comptime for c in range(EACH):
                if first_column + column + c < Int(self.columns):
                    var begin = self.bias[
                        unsafe_offset=first_column + column + c
                    ].cast[F32]()
                    comptime for r in range(EACH):
                        sums[r * EACH + c] = begin
        for begin in range(0, Int(self.depth), DEPTH):
            self.fetch(self.x, first_row, Int(self.num_rows), begin, xs)
            self.fetch(self.w, first_column, Int(self.columns), begin, ws)
            barrier()
            comptime for k in range(DEPTH):
                comptime for c in range(EACH):
                    var factor = ws[unsafe_offset=k * STRIDE + column + c]
                    comptime for r in range(EACH):
                        var value = xs[unsafe_offset=k * STRIDE + row + r]
                        comptime i = r * EACH + c
                        sums[i] = fma(value, factor, sums[i])
            barrier()
        comptime for r in range(EACH):
            comptime for c in range(EACH):
                var m = first_row + row + r
                var n = first_column + column + c
                if m < Int(self.num_rows) and n < Int(self.columns):
                    var y = sums[r * EACH + c]
                    comptime if silu:
                        y = y / (1 + exp(-y))
                    var at = m * Int(self.columns) + n
                    comptime if has_residual:
                        y += self.residual[unsafe_offset=at].cast[F32]()
                    self.out_[unsafe_offset=at] = y.cast[Self.dtype]()


@extensibility.register("srm_linear_plain")
struct LinearPlain:
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
        output: OutputTensor[rank=2, ...],
        x: InputTensor[dtype=output.dtype, rank=2, ...],
        w: InputTensor[dtype=output.dtype, rank=2, ...],
        bias: InputTensor[dtype=output.dtype, ...],
        residual: InputTensor[dtype=output.dtype, ...],
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
        comptime assert (
            target == "gpu"
        ), "srm_linear_plain is for GPUs; CPUs have srm_linear"
        var rows = output.dim_size(0)
        if rows == 0:
            return
        var product = _Product[output.dtype](
            untracked(output.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            untracked(w.unsafe_ptr()),
            untracked(bias.unsafe_ptr()),
            untracked(residual.unsafe_ptr()),
            Int64(rows),
            Int64(K),
            Int64(N),
        )

        def multiply() {var}:
            product.multiply_tile[has_bias, has_residual, silu]()

        ctx.enqueue_function(
            multiply,
            grid_dim=(ceildiv(rows, TILE), ceildiv(N, TILE)),
            block_dim=SIDE * SIDE,
        )
