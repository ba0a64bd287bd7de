"""Matrix product with its epilogue, float32, on the CPU: `srm_linear`.

    out[m, n] = act(sum_k x[m, k] * w[k, n] + bias[n]) + residual[m, n]

act is the identity or SiLU; bias and residual may be absent. Only the first M rows of x are read, M
being the number of rows of `out`.

Weights come packed in panels of PANEL columns, [ceil(N / PANEL), K, PANEL], the last one padded with
zeros, so that a panel is read from front to back. A task owns a rectangle of `out`; in it, DEPTH of
K and BLOCK panels at a time (their weights stay in the second-level cache), tiles of at most ROWS
rows of x are copied to a buffer that stays in the first-level cache, and `multiply_tile` holds the
rows x COLS sums of a tile in registers.

The sum of an element is one chain of fused multiply-adds over k = 0 … K - 1 whatever the tile shape;
where DEPTH cuts it, it rests in `out` as a float32. So an element's bits do not depend on M, on the
other rows or on the number of cores.

Tensor shapes:

    out        f32[M, N]                        written
    x          f32[T >= M, K]
    weight     f32[ceil(N / PANEL), K, PANEL]
    bias       f32[N]     (any tensor when has_bias is False)
    residual   f32[M, N]  (any tensor when has_residual is False)
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv, exp
from std.memory import unsafe_stack_allocation
from std.sys import simd_width_of

comptime WIDTH = simd_width_of[DType.float32]()
"""Values in a vector."""

comptime Vector = SIMD[DType.float32, WIDTH]
"""As many values as a register holds."""

comptime Source = Pointer[Float32, UntrackedOrigin[mut=False]]
"""Values to read."""

comptime Target = Pointer[Float32, UntrackedOrigin[mut=True]]
"""Values to write."""

comptime PANEL = 32
"""Columns of a panel of packed weights: PANEL of engine/linear.py."""

comptime COLS = 2 * WIDTH
"""Columns of a tile: two vectors, so that a broadcast serves two multiplications."""

comptime ROWS = 12 if WIDTH == 16 else 6
"""Most rows of a tile. Its sums nearly fill the registers: 24 of 32, or 12 of 16 without AVX-512."""

comptime DEPTH = 512
"""Length of the sums a tile makes in one go; its rows of x take half the first-level cache."""

comptime BLOCK = 8
"""Panels whose weights, DEPTH long, are kept in the second-level cache: 512 KiB."""

comptime TILE_STRIDE = DEPTH + 16
"""Distance of a tile's rows; off a power of two, so that they do not share cache sets."""

comptime GRAIN = 1 << 20
"""Multiply-adds that are worth a task of their own."""

comptime FEW_ROWS = 64
"""Up to so many rows the time goes into reading weights, which are then what is shared out."""


@fieldwise_init
struct Epilogue(ImplicitlyCopyable):
    """What happens to a finished sum before it is stored."""

    var bias: Source
    """Per column, f32[N]."""
    var residual: Source
    """Per element, f32[M, N]."""
    var has_bias: Bool
    """Whether to add `bias`."""
    var has_residual: Bool
    """Whether to add `residual`, last."""
    var silu: Bool
    """Whether SiLU follows the bias."""

    @always_inline
    def apply[
        width: Int
    ](self, sum: SIMD[DType.float32, width], element: Int, column: Int) -> SIMD[
        DType.float32, width
    ]:
        """Finishes `width` neighbouring sums.

        Parameters:
            width: Number of columns.

        Args:
            sum: The products' sums.
            element: Flat index into `residual` of the first.
            column: Column of the first.

        Returns:
            The values to store.
        """
        var y = sum
        if self.has_bias:
            y += self.bias.unsafe_load[width=width](column)
        if self.silu:
            y = y / (1 + exp(-y))
        if self.has_residual:
            y += self.residual.unsafe_load[width=width](element)
        return y


@no_inline
def multiply_tile[
    rows: Int
](
    x: Source,
    weight: Source,
    depth: Int,
    sums: Target,
    stride: Int,
    resume: Bool,
):
    """Adds x @ weight to a tile of `rows` x COLS sums.

    Parameters:
        rows: Rows of the tile.

    Args:
        x: Copied rows, TILE_STRIDE apart.
        weight: The columns' weights, k rows PANEL apart.
        depth: Length of the sums.
        sums: The tile in `out`.
        stride: Row distance of `sums`.
        resume: Whether to start from `sums` instead of zero.
    """
    var acc = Array[Vector, 2 * rows](fill=Vector(0))
    if resume:
        comptime for r in range(rows):
            acc[2 * r] = sums.unsafe_load[width=WIDTH](r * stride)
            acc[2 * r + 1] = sums.unsafe_load[width=WIDTH](r * stride + WIDTH)
    for k in range(depth):
        var w0 = weight.unsafe_load[width=WIDTH](k * PANEL)
        var w1 = weight.unsafe_load[width=WIDTH](k * PANEL + WIDTH)
        comptime for r in range(rows):
            var value = Vector(x[unsafe_offset=r * TILE_STRIDE + k])
            acc[2 * r] = value.fma(w0, acc[2 * r])
            acc[2 * r + 1] = value.fma(w1, acc[2 * r + 1])
    comptime for r in range(rows):
        sums.unsafe_store(r * stride, acc[2 * r])
        sums.unsafe_store(r * stride + WIDTH, acc[2 * r + 1])


@no_inline
def multiply_panel(
    rows: Int,
    x: Source,
    weight: Source,
    depth: Int,
    sums: Target,
    stride: Int,
    resume: Bool,
):
    """Runs `multiply_tile` over a whole panel, for a number of rows known only now.

    Args:
        rows: Rows of the tile, 1 … ROWS.
        x: Copied rows, TILE_STRIDE apart.
        weight: The panel's weights.
        depth: Length of the sums.
        sums: The rows x PANEL sums.
        stride: Row distance of `sums`.
        resume: Whether to start from `sums` instead of zero.
    """
    comptime for r in range(1, ROWS + 1):
        if rows == r:
            for c in range(0, PANEL, COLS):
                multiply_tile[r](
                    x,
                    weight.unsafe_offset(c),
                    depth,
                    sums.unsafe_offset(c),
                    stride,
                    resume,
                )


@always_inline
def copy(source: Source, target: Target, count: Int):
    """Copies `count` values.

    Args:
        source: From where.
        target: To where.
        count: How many.
    """
    var whole = count - count % WIDTH
    for i in range(0, whole, WIDTH):
        target.unsafe_store(i, source.unsafe_load[width=WIDTH](i))
    for i in range(whole, count):
        target[unsafe_offset=i] = source[unsafe_offset=i]


@no_inline
def finish(
    out_: Target,
    epilogue: Epilogue,
    N: Int,
    row: Int,
    rows: Int,
    column: Int,
    cols: Int,
):
    """Applies the epilogue to a tile of finished sums in `out_`.

    Args:
        out_: The whole output, row-major.
        epilogue: What to apply.
        N: Columns of the output.
        row: First row of the tile.
        rows: Its rows.
        column: First column of the tile.
        cols: Its columns.
    """
    for r in range(row, row + rows):
        var c = column
        while c + WIDTH <= column + cols:
            var at = r * N + c
            out_.unsafe_store(
                at,
                epilogue.apply[WIDTH](out_.unsafe_load[width=WIDTH](at), at, c),
            )
            c += WIDTH
        while c < column + cols:
            var at = r * N + c
            out_.unsafe_store(
                at, epilogue.apply[1](out_.unsafe_load[width=1](at), at, c)
            )
            c += 1


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
    """Computes a rectangle of the output on one core.

    Args:
        x: Rows to multiply, row-major.
        weight: Packed weights.
        out_: The whole output, row-major.
        epilogue: What to apply to the sums.
        K: Columns of x.
        N: Columns of the output.
        row_start: First row.
        row_end: One past the last row.
        panel_start: First panel.
        panel_end: One past the last panel.
    """
    var tile = unsafe_stack_allocation[
        ROWS * TILE_STRIDE, Float32, alignment=64
    ]()
    var ragged = unsafe_stack_allocation[ROWS * PANEL, Float32, alignment=64]()
    var num_rows = row_end - row_start
    var tiles = ceildiv(num_rows, ROWS)
    for block in range(panel_start, panel_end, BLOCK):
        var block_end = min(block + BLOCK, panel_end)
        for start in range(0, K, DEPTH):
            var depth = min(DEPTH, K - start)
            for t in range(tiles):
                var row = row_start + t * num_rows // tiles
                var rows = row_start + (t + 1) * num_rows // tiles - row
                for r in range(rows):
                    copy(
                        x.unsafe_offset((row + r) * K + start),
                        tile.unsafe_offset(r * TILE_STRIDE).unsafe_origin_cast[
                            UntrackedOrigin[mut=True]
                        ](),
                        depth,
                    )
                for panel in range(block, block_end):
                    var a = tile.unsafe_origin_cast[UntrackedOrigin[mut=True]]()
                    var w = weight.unsafe_offset((panel * K + start) * PANEL)
                    var sums = out_.unsafe_offset(row * N + panel * PANEL)
                    var cols = min(PANEL, N - panel * PANEL)
                    if cols == PANEL:
                        multiply_panel(rows, a, w, depth, sums, N, start > 0)
                    else:
                        var whole = ragged.unsafe_origin_cast[
                            UntrackedOrigin[mut=True]
                        ]()
                        for r in range(rows):
                            copy(
                                sums.unsafe_offset(r * N),
                                whole.unsafe_offset(r * PANEL),
                                cols,
                            )
                        multiply_panel(
                            rows, a, w, depth, whole, PANEL, start > 0
                        )
                        for r in range(rows):
                            copy(
                                whole.unsafe_offset(r * PANEL),
                                sums.unsafe_offset(r * N),
                                cols,
                            )
                    if start + depth == K:
                        finish(
                            out_, epilogue, N, row, rows, panel * PANEL, cols
                        )


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
    """Computes out_ = epilogue(x @ weight) on at most `cores` cores.

    Args:
        x: Rows to multiply, row-major, f32[M, K].
        weight: Packed weights.
        out_: The output, row-major, f32[M, N].
        epilogue: What to apply to the sums.
        M: Rows.
        K: Length of the sums.
        N: Columns of the output.
        cores: Cores to use at most.
    """
    if M == 0:
        return
    var panels = ceildiv(N, PANEL)
    var workers = min(cores, ceildiv(M * K * N, GRAIN))
    # Sharing out columns, each core reads its own weights; a core wants a whole block of them.
    var col_parts = min(
        workers, panels if M <= FEW_ROWS else ceildiv(panels, BLOCK)
    )
    var row_parts = min(workers // col_parts, ceildiv(M, ROWS))

    def task(i: Int) {imm}:
        var r, c = divmod(i, col_parts)
        multiply_block(
            x,
            weight,
            out_,
            epilogue,
            K,
            N,
            r * M // row_parts,
            (r + 1) * M // row_parts,
            c * panels // col_parts,
            (c + 1) * panels // col_parts,
        )

    sync_parallelize(task, row_parts * col_parts)


@extensibility.register("srm_linear")
struct Linear:
    """The operation `srm_linear`."""

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
        """Runs the product; see the module.

        Parameters:
            target: Device kind; only "cpu" has this operation.
            has_bias: Whether `bias` is added.
            has_residual: Whether `residual` is added.
            silu: Whether SiLU follows the bias.

        Args:
            output: The f32[M, N] result.
            x: The f32[T, K] rows, T >= M.
            weight: The packed weights.
            bias: The f32[N] bias.
            residual: The f32[M, N] values added last.
            ctx: The device.
        """
        comptime assert (
            target == "cpu"
        ), "srm_linear runs on the CPU; a GPU has its own matmul"
        multiply(
            x.unsafe_ptr().unsafe_origin_cast[UntrackedOrigin[mut=True]](),
            weight.unsafe_ptr().unsafe_origin_cast[UntrackedOrigin[mut=True]](),
            output.unsafe_ptr().unsafe_origin_cast[UntrackedOrigin[mut=True]](),
            Epilogue(
                bias.unsafe_ptr().unsafe_origin_cast[
                    UntrackedOrigin[mut=True]
                ](),
                residual.unsafe_ptr().unsafe_origin_cast[
                    UntrackedOrigin[mut=True]
                ](),
                has_bias,
                has_residual,
                silu,
            ),
            output.dim_size(0),
            x.dim_size(1),
            output.dim_size(1),
            parallelism_level(None),
        )
