"""Matrix product with its epilogue (`srm_linear`), float32 or bfloat16, on the CPU.

    out[m, n] = act(bias[n] + sum_k x[m, k] * w[k, n]) + residual[m, n]

act is the identity or SiLU; bias and residual may be absent, and SiLU excludes a residual. M is the number of rows of `out`: only
the first M rows of x are read. Sums are float32 whatever the values are.

Weights come packed in panels of PANEL columns, the last one padded with zeros, so that a panel is
read from front to back. In a panel the PAIR values of a column that follow each other in k form a
word of 32 bits: PAIR is 1 in float32 and 2 in bfloat16, where a zero pads an odd K. A task owns a
rectangle of `out`, which `multiply_block` computes.

The sum of an element is one chain of fused multiply-adds, from its bias over the words of K,
whatever the tile; where DEPTH cuts the chain, the sum rests in float32. So an element's bits do
not depend on M, on the other rows or on the number of cores.

    out        [M, N]                                          float32 or as x    out
    x          [T, K]                                          float32, bfloat16  in; T >= M
    weight     [ceil(N / PANEL), ceil(K / PAIR), PANEL, PAIR]  as x               in
    bias       [N]             as x    in; any tensor when has_bias is False
    residual   [M, N]          as out  in; any tensor when has_residual is False
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv

from ._block import BLOCK, multiply_block
from ._epilogue import Epilogue
from ._tile import (
    HAS_DOT,
    PANEL,
    ROWS,
    Source,
    Target,
    Untracked,
    values_per_word,
)

comptime GRAIN = 1 << 21
"""Steps, of a word by a word, that are worth a task of their own: 16 us, twice its cost."""

comptime FEW_ROWS = 8
"""With fewer rows the time goes into reading weights, not into multiplying them."""


@no_inline
def multiply[
    dtype: DType, out_dtype: DType, dot: Bool
](
    x: Source[dtype],
    weight: Source[dtype],
    out_: Target[out_dtype],
    epilogue: Epilogue[dtype, out_dtype],
    M: Int,
    K: Int,
    N: Int,
    cores: Int,
):
    """Compute the whole output.

    Parameters:
        dtype: Of x and the weights.
        out_dtype: Of the output.
        dot: Whether to use the processor's own product of bfloat16 pairs.

    Args:
        x: The rows, [M, K].
        weight: The packed weights.
        out_: The output, [M, N].
        epilogue: What else goes into an element.
        M: Rows.
        K: Length of the sums.
        N: Columns of the output.
        cores: Cores to use at most.
    """
    if M == 0:
        return
    var num_panels = ceildiv(N, PANEL)
    var words = ceildiv(K, values_per_word[dtype]())
    var tasks = min(cores, ceildiv(max(M, FEW_ROWS) * words * N, GRAIN))
    # Tasks that share out columns each read their own weights, but want a whole block of them,
    # unless there are so few rows that it pays to use all cores on them.
    var wide = ceildiv(num_panels, BLOCK)
    var col_tasks = min(tasks, max(wide, num_panels // ceildiv(M, ROWS)))
    var row_tasks = min(tasks // col_tasks, ceildiv(M, ROWS))

    def multiply_share(task: Int) {imm}:
        var r, c = divmod(task, col_tasks)
        multiply_block[dtype, out_dtype, dot](
            x,
            weight.unsafe_bitcast[UInt32](),
            out_,
            epilogue,
            K,
            N,
            r * M // row_tasks,
            (r + 1) * M // row_tasks,
            c * num_panels // col_tasks,
            (c + 1) * num_panels // col_tasks,
        )

    sync_parallelize(multiply_share, row_tasks * col_tasks)


@extensibility.register("srm_linear")
struct Linear:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString,
        has_bias: Bool,
        has_residual: Bool,
        silu: Bool,
        widen: Bool,
    ](
        output: OutputTensor[rank=2, ...],
        x: InputTensor[rank=2, ...],
        weight: InputTensor[dtype=x.dtype, rank=4, ...],
        bias: InputTensor[dtype=x.dtype, ...],
        residual: InputTensor[rank=2, ...],
        ctx: DeviceContext,
    ):
        """Run the op; shapes are in the module's docstring.

        Parameters:
            target: "cpu".
            has_bias: Whether `bias` is added.
            has_residual: Whether `residual` is added.
            silu: Whether SiLU follows the bias.
            widen: Whether to multiply bfloat16 as a processor without a product of them does.

        Args:
            output: The result.
            x: The rows.
            weight: The packed weights.
            bias: The bias.
            residual: The values added last.
            ctx: The device.
        """
        comptime assert (
            target == "cpu"
        ), "srm_linear is for CPUs; GPUs have srm_linear_sm90"
        comptime assert not has_residual or residual.dtype == output.dtype
        multiply[x.dtype, output.dtype, HAS_DOT and not widen](
            x.unsafe_ptr().unsafe_origin_cast[Untracked](),
            weight.unsafe_ptr().unsafe_origin_cast[Untracked](),
            output.unsafe_ptr().unsafe_origin_cast[Untracked](),
            Epilogue(
                bias.unsafe_ptr().unsafe_origin_cast[Untracked](),
                residual.unsafe_ptr()
                .unsafe_bitcast[Scalar[output.dtype]]()
                .unsafe_origin_cast[Untracked](),
                has_bias,
                has_residual,
                silu,
            ),
            output.dim_size(0),
            x.dim_size(1),
            output.dim_size(1),
            parallelism_level(None),
        )
