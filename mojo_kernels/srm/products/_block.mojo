"""A rectangle of the output of `srm_linear` on one core: `multiply_block`.

For a BLOCK of panels and DEPTH words of K at a time (weights that stay in the second-level cache),
tiles of at most ROWS rows of x are copied to a buffer that stays in the first-level cache, and
`multiply_panel` holds their sums in registers. Meanwhile the rows and weights that come next are
fetched bit by bit. A sum that DEPTH cuts rests in float32.
"""

from std.math import align_down, align_up, ceildiv
from std.memory import unsafe_stack_allocation
from std.memory.alloc import unsafe_alloc

from ._epilogue import Epilogue
from ._fetch import CHUNK, Upcoming
from ._tile import (
    DEPTH,
    PANEL,
    ROWS,
    TILE_STRIDE,
    WIDTH,
    Source,
    Target,
    Untracked,
    multiply_panel,
    values_per_word,
)

comptime BLOCK = 8
"""Panels whose weights, DEPTH long, are kept in the second-level cache: 512 KiB."""


@always_inline
def copy_rows[
    dtype: DType
](
    source: Source[dtype],
    stride: Int,
    tile: Target[DType.uint32],
    rows: Int,
    values: Int,
):
    """Copy part of some rows of x into a tile, as words.

    Parameters:
        dtype: Of the values.

    Args:
        source: The first value.
        stride: Distance of the rows.
        tile: To where, TILE_STRIDE apart.
        rows: Rows.
        values: Values of each row; half a word left over is zero.
    """
    comptime PAIR = values_per_word[dtype]()
    var whole = align_down(values, WIDTH * PAIR)
    for row in range(rows):
        var read = source.unsafe_offset(row * stride)
        var write = tile.unsafe_offset(row * TILE_STRIDE).unsafe_bitcast[
            Scalar[dtype]
        ]()
        for i in range(0, whole, WIDTH * PAIR):
            write.unsafe_store(i, read.unsafe_load[width=WIDTH * PAIR](i))
        for i in range(whole, values):
            write[unsafe_offset=i] = read[unsafe_offset=i]
        for i in range(values, align_up(values, PAIR)):
            write[unsafe_offset=i] = 0


@always_inline
def allocate[dtype: DType, count: Int]() -> Target[dtype]:
    """Reserve values on the caller's stack.

    Parameters:
        dtype: Of the values.
        count: How many.

    Returns:
        The first.
    """
    return unsafe_stack_allocation[
        count, Scalar[dtype], alignment=64
    ]().unsafe_origin_cast[Untracked]()


@no_inline
def multiply_block[
    dtype: DType, out_dtype: DType, dot: Bool
](
    x: Source[dtype],
    weight: Source[DType.uint32],
    out_: Target[out_dtype],
    epilogue: Epilogue[dtype, out_dtype],
    K: Int,
    N: Int,
    row_start: Int,
    row_end: Int,
    panel_start: Int,
    panel_end: Int,
):
    """Compute a rectangle of the output on one core.

    Parameters:
        dtype: Of x and the weights.
        out_dtype: Of the output.
        dot: Whether to use the processor's own product of bfloat16 pairs.

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
    comptime PAIR = values_per_word[dtype]()
    var words = ceildiv(K, PAIR)
    var num_rows = row_end - row_start
    var num_tiles = ceildiv(num_rows, ROWS)
    var tile = allocate[DType.uint32, ROWS * TILE_STRIDE]()
    var bias = allocate[DType.float32, BLOCK * PANEL]()
    var whole_sums = allocate[DType.float32, ROWS * PANEL]()
    # Where sums rest that DEPTH cuts: [panel of the block][row][PANEL].
    var is_cut = words > DEPTH
    var resting = unsafe_alloc[Float32](
        BLOCK * num_rows * PANEL if is_cut else 0
    ).unsafe_origin_cast[Untracked]()

    # Few tiles have soon read a block: what comes next is fetched at its pace, and not long before.
    var width = min(BLOCK, num_tiles)
    for block in range(panel_start, panel_end, width):
        var num_panels = min(width, panel_end - block)
        epilogue.begin(
            block * PANEL, min(num_panels * PANEL, N - block * PANEL), bias
        )
        for start in range(0, words, DEPTH):
            var steps = min(DEPTH, words - start)
            var values = min(steps * PAIR, K - start * PAIR)
            var last = start + steps == words
            var weight_at = weight.unsafe_offset(
                (block * words + start) * PANEL
            )
            # The weights of the next round; the last round's are other layers'.
            var next_at = weight_at.unsafe_offset(DEPTH * PANEL)
            var next_panels = num_panels
            var next_steps = min(DEPTH, words - start - steps)
            if last:
                next_at = weight.unsafe_offset((block + width) * words * PANEL)
                next_panels = max(0, min(width, panel_end - block - width))
                next_steps = min(DEPTH, words)
            for t in range(num_tiles):
                var row = row_start + t * num_rows // num_tiles
                var row_stop = row_start + (t + 1) * num_rows // num_tiles
                var rows = row_stop - row
                var x_at = x.unsafe_offset(row * K + start * PAIR)
                copy_rows[dtype](x_at, K, tile, rows, values)
                for panel in range(num_panels):
                    var column = (block + panel) * PANEL
                    var cols = min(PANEL, N - column)
                    var rest = resting.unsafe_offset(
                        (panel * num_rows + row - row_start) * PANEL
                    )
                    var sums = whole_sums if last else rest
                    var begin = rest
                    if start == 0:
                        begin = bias.unsafe_offset(panel * PANEL)
                    multiply_panel[dtype, dot](
                        rows,
                        tile,
                        weight_at.unsafe_offset(panel * words * PANEL),
                        steps,
                        begin,
                        0 if start == 0 else PANEL,
                        sums,
                        Upcoming.columns(
                            x_at.unsafe_offset(rows * K),
                            K,
                            min(ROWS, row_end - row_stop),
                            values,
                            panel,
                            num_panels,
                        ),
                        Upcoming.piece(
                            next_at.unsafe_offset(panel * words * PANEL),
                            next_steps * PANEL if panel < next_panels else 0,
                            ceildiv(steps, CHUNK),
                            t,
                            num_tiles,
                        ),
                    )
                    if last:
                        epilogue.finish(
                            sums, out_, row * N + column, N, rows, cols
                        )
    resting.unsafe_free()
