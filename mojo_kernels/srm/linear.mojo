"""Matrix product with its epilogue (`srm_linear`), float32, on the CPU.

    out[m, n] = act(bias[n] + sum_k x[m, k] * w[k, n]) + residual[m, n]

act is the identity or SiLU; bias and residual may be absent, and SiLU excludes a residual. M is the number of rows of `out`: only
the first M rows of x are read.

Weights come packed in panels of PANEL columns, the last one padded with zeros, so that a panel is
read from front to back. A task owns a rectangle of `out`. In it, for a BLOCK of panels and DEPTH of
K at a time (weights that stay in the second-level cache), tiles of at most ROWS rows of x are copied
to a buffer that stays in the first-level cache, and `multiply_tile` holds the sums of rows x COLS
elements in registers. Meanwhile the rows and weights that come next are fetched bit by bit.

The sum of an element is one chain of fused multiply-adds, from its bias over k = 0 … K - 1, whatever
the tile; where DEPTH cuts the chain, the sum rests in `out` as a float32. So an element's bits do
not depend on M, on the other rows or on the number of cores.

    out        [M, N]                        float32   out
    x          [T, K]                        float32   in; T >= M
    weight     [ceil(N / PANEL), K, PANEL]   float32   in
    bias       [N]                           float32   in; any tensor when has_bias is False
    residual   [M, N]                        float32   in; any tensor when has_residual is False
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from max.runtime.asyncrt import parallelism_level
from std.math import align_down, ceildiv
from std.memory import unsafe_stack_allocation

from ._tile import (
    DEPTH,
    PANEL,
    ROWS,
    TILE_STRIDE,
    WIDTH,
    Source,
    Sums,
    Target,
    Untracked,
    Upcoming,
    apply_silu,
    multiply_panel,
)

comptime BLOCK = 8
"""Panels whose weights, DEPTH long, are kept in the second-level cache: 512 KiB."""

comptime GRAIN = 1 << 21
"""Multiply-adds that are worth a task of their own: 16 us, twice the cost of the task."""

comptime FEW_ROWS = 8
"""With fewer rows the time goes into reading weights, not into multiplying them."""


@fieldwise_init
struct Epilogue(ImplicitlyCopyable):
    """What happens to a sum besides the product."""

    var bias: Source
    """Where its chain starts, per column; [N]."""
    var residual: Source
    """Added last, per element; [M, N]."""
    var has_bias: Bool
    """Whether there is a bias."""
    var has_residual: Bool
    """Whether there is a residual."""
    var silu: Bool
    """Whether SiLU follows the sum."""


@always_inline
def copy(
    source: Source,
    source_stride: Int,
    target: Target,
    stride: Int,
    rows: Int,
    cols: Int,
):
    """Copy a matrix.

    Args:
        source: From where.
        source_stride: Distance of its rows.
        target: To where.
        stride: Distance of its rows.
        rows: Rows.
        cols: Columns.
    """
    var whole = align_down(cols, WIDTH)
    for row in range(rows):
        var read = source.unsafe_offset(row * source_stride)
        var write = target.unsafe_offset(row * stride)
        for i in range(0, whole, WIDTH):
            write.unsafe_store(i, read.unsafe_load[width=WIDTH](i))
        for i in range(whole, cols):
            write[unsafe_offset=i] = read[unsafe_offset=i]


@always_inline
def allocate[count: Int]() -> Target:
    """Reserve values on the caller's stack.

    Parameters:
        count: How many.

    Returns:
        The first.
    """
    return unsafe_stack_allocation[
        count, Float32, alignment=64
    ]().unsafe_origin_cast[Untracked]()


@no_inline
def multiply_block(
    x: Source,
    weight: Source,
    out_: Target,
    epilogue: Epilogue,
    K: Int,
    N: Int,
    row_start: Int,
    row_end: Int,
    panel_start: Int,
    panel_end: Int,
):
    """Compute a rectangle of the output on one core.

    Args:
        x: The rows, [.., K].
        weight: The packed weights.
        out_: The whole output, [.., N].
        epilogue: What else goes into an element.
        K: Length of the sums.
        N: Columns of the output.
        row_start: First row.
        row_end: One past the last row.
        panel_start: First panel.
        panel_end: One past the last panel.
    """
    var tile = allocate[ROWS * TILE_STRIDE]()
    var bias = allocate[PANEL]()
    # The last panel may stick out of the output: it is computed here.
    var edge = allocate[ROWS * PANEL]()
    var edge_residual = allocate[ROWS * PANEL]()
    for i in range(PANEL):
        bias[unsafe_offset=i] = 0

    var num_rows = row_end - row_start
    var num_tiles = ceildiv(num_rows, ROWS)
    for block in range(panel_start, panel_end, BLOCK):
        var num_panels = min(BLOCK, panel_end - block)
        for start in range(0, K, DEPTH):
            var depth = min(DEPTH, K - start)
            var last = start + depth == K
            var weight_at = weight.unsafe_offset((block * K + start) * PANEL)
            # The weights of the next round; the last round's are other layers'.
            var next_at = weight_at.unsafe_offset(DEPTH * PANEL)
            var next_panels = num_panels
            if last:
                next_at = weight.unsafe_offset((block + BLOCK) * K * PANEL)
                next_panels = max(0, min(BLOCK, panel_end - block - BLOCK))
            for t in range(num_tiles):
                var row = row_start + t * num_rows // num_tiles
                var row_stop = row_start + (t + 1) * num_rows // num_tiles
                var rows = row_stop - row
                var x_at = x.unsafe_offset(row * K + start)
                copy(x_at, K, tile, TILE_STRIDE, rows, depth)
                for panel in range(num_panels):
                    var column = (block + panel) * PANEL
                    var cols = min(PANEL, N - column)
                    var out_at = out_.unsafe_offset(row * N + column)
                    var sums = Sums(
                        out_at,
                        N,
                        out_at,
                        epilogue.residual.unsafe_offset(row * N + column),
                        N,
                        last and epilogue.has_residual,
                    )
                    if cols < PANEL:
                        if start > 0:
                            copy(out_at, N, edge, PANEL, rows, cols)
                        if sums.has_residual:
                            copy(
                                sums.residual,
                                N,
                                edge_residual,
                                PANEL,
                                rows,
                                cols,
                            )
                        sums = Sums(
                            edge,
                            PANEL,
                            edge,
                            edge_residual,
                            PANEL,
                            sums.has_residual,
                        )
                    if start == 0:
                        if epilogue.has_bias:
                            copy(
                                epilogue.bias.unsafe_offset(column),
                                0,
                                bias,
                                0,
                                1,
                                cols,
                            )
                        sums.begin = bias
                        sums.begin_stride = 0
                    multiply_panel(
                        rows,
                        tile,
                        weight_at.unsafe_offset(panel * K * PANEL),
                        depth,
                        sums,
                        Upcoming.share(
                            x_at.unsafe_offset(rows * K),
                            K,
                            min(ROWS, row_end - row_stop),
                            depth,
                            depth,
                            panel,
                            num_panels,
                        ),
                        Upcoming.share(
                            next_at,
                            K * PANEL,
                            next_panels,
                            depth * PANEL,
                            depth,
                            t * num_panels + panel,
                            num_tiles * num_panels,
                        ),
                    )
                    if last and epilogue.silu:
                        apply_silu(sums.out, sums.stride, rows)
                    if cols < PANEL:
                        copy(edge, PANEL, out_at, N, rows, cols)


@no_inline
def multiply(
    x: Source,
    weight: Source,
    out_: Target,
    epilogue: Epilogue,
    M: Int,
    K: Int,
    N: Int,
    cores: Int,
):
    """Compute the whole output.

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
    var tasks = min(cores, ceildiv(max(M, FEW_ROWS) * K * N, GRAIN))
    # Tasks that share out columns each read their own weights, but want a whole block of them,
    # unless there are so few rows that it pays to use all cores on them.
    var wide = ceildiv(num_panels, BLOCK)
    var col_tasks = min(tasks, max(wide, num_panels // ceildiv(M, ROWS)))
    var row_tasks = min(tasks // col_tasks, ceildiv(M, ROWS))

    def multiply_share(task: Int) {imm}:
        var r, c = divmod(task, col_tasks)
        multiply_block(
            x,
            weight,
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
    ](
        output: OutputTensor[dtype=DType.float32, rank=2, ...],
        x: InputTensor[dtype=DType.float32, rank=2, ...],
        weight: InputTensor[dtype=DType.float32, rank=3, ...],
        bias: InputTensor[dtype=DType.float32, ...],
        residual: InputTensor[dtype=DType.float32, rank=2, ...],
        ctx: DeviceContext,
    ):
        """Run the op; shapes are in the module's docstring.

        Parameters:
            target: "cpu".
            has_bias: Whether `bias` is added.
            has_residual: Whether `residual` is added.
            silu: Whether SiLU follows the bias.

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
        ), "srm_linear is for CPUs; GPUs have MAX's own"
        multiply(
            x.unsafe_ptr().unsafe_origin_cast[Untracked](),
            weight.unsafe_ptr().unsafe_origin_cast[Untracked](),
            output.unsafe_ptr().unsafe_origin_cast[Untracked](),
            Epilogue(
                bias.unsafe_ptr().unsafe_origin_cast[Untracked](),
                residual.unsafe_ptr().unsafe_origin_cast[Untracked](),
                has_bias,
                has_residual,
                silu,
            ),
            output.dim_size(0),
            x.dim_size(1),
            output.dim_size(1),
            parallelism_level(None),
        )
