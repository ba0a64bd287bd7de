"""The product of `sm90.mojo` on MAX's own sm_90 kernel, with an epilogue of ours
(`srm_linear_linalg`): what there is beside it should it be wrong, or slower.

    out[m, n] = act(bias[n] + sum_k x[m, k] * w[n, k]) + residual[m, n]

MAX rounds float32 sums to bfloat16 before the epilogue sees them, eight neighbouring columns at a
time; it computes in float32 and writes 16 bytes. So there are two roundings, not one. The epilogue
writes to global memory itself: MAX 26.7 also takes one that returns a value (`compute_fn`), but
together with `use_tma_store` gives it another element than the one whose place it is told.

    out        [M, N]  bfloat16  out; N % 512 == 0
    x          [T, K]  bfloat16  in; T >= M, K % 64 == 0
    w          [N, K]  bfloat16  in
    bias       [N]     bfloat16  in; any tensor when has_bias is False
    residual   [M, N]  bfloat16  in; any tensor when has_residual is False
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from layout import Coord, Idx, TileTensor, row_major
from linalg.matmul.gpu.sm90.matmul import warp_specialize_gemm_with_multicasting
from linalg.matmul.gpu.tile_scheduler import MatmulSchedule
from linalg.utils_gpu import MatmulConfig
from max.gpu.host import DeviceContext
from std.utils.index import Index

from ._sm90_epilogue import BF16, F32
from ._sm90_epilogue import silu as apply_silu

comptime CONFIG = MatmulConfig[BF16, BF16, BF16, True](
    block_tile_shape=Index(128, 256, 64),
    mma_shape=Index(64, 256, 16),
    cluster_shape=Index(
        2, 1, 1
    ),  # two tiles beside each other share what they read of x
    num_pipeline_stages=4,
    num_consumer=2,
)
"""Tiles and stages, as in `_sm90_kernel.mojo`."""


@extensibility.register("srm_linear_linalg")
struct LinearLinalg:
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
        comptime assert target == "gpu", "srm_linear_linalg is for sm_90 alone"
        comptime assert N % 512 == 0 and K % 64 == 0
        var out_ = output.unsafe_ptr()
        var biases = bias.unsafe_ptr()
        var residuals = residual.unsafe_ptr()

        def finish[
            dtype: DType, width: SIMDLength, *, alignment: Int = 1
        ](at: Coord, sums: SIMD[dtype, width]) {var}:
            var column = Int(at[1].value())
            var i = Int(at[0].value()) * N + column
            var y = sums.cast[F32]()
            comptime if has_bias:
                y += biases.unsafe_load[width=width, alignment=16](column).cast[
                    F32
                ]()
            comptime if silu:
                y = apply_silu(y)
            comptime if has_residual:
                y += residuals.unsafe_load[width=width, alignment=16](i).cast[
                    F32
                ]()
            out_.unsafe_store[alignment=16](i, y.cast[BF16]())

        var rows = output.dim_size(0)
        if rows > 0:
            warp_specialize_gemm_with_multicasting[
                transpose_b=True, config=CONFIG, schedule=MatmulSchedule.TILE2D
            ](
                Index(rows, N),
                TileTensor(
                    x.unsafe_ptr(), row_major(Coord(rows, Idx[K]))
                ).as_imm(),
                TileTensor(
                    w.unsafe_ptr(), row_major(Coord(Idx[N], Idx[K]))
                ).as_imm(),
                finish,
                ctx,
            )
