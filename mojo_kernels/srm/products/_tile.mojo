"""The inner part of `srm_linear`: the sums of a tile of the output, held in registers.

Rows and weights are read as words of 32 bits: a float32, or two bfloat16 that follow each other in
k, the even one in the lower half. One step multiplies a word of x by the words of COLS columns.

A tile is at most ROWS rows of x by COLS columns of a panel of weights. Each sum is one chain of
fused multiply-adds in the order of the words, whatever the tile's size. Of two bfloat16 the odd one
is added first: what `vdpbf16ps` does, and what widening to float32 does where the processor lacks it.
"""

from std.memory import bitcast
from std.sys import CompilationTarget, llvm_intrinsic, simd_width_of, size_of

from ._fetch import CHUNK, Upcoming

comptime WIDTH = simd_width_of[DType.float32]()
"""Words in a vector."""

comptime Vector = SIMD[DType.float32, WIDTH]
"""As many sums as a register holds."""

comptime Words = SIMD[DType.uint32, WIDTH]
"""As many words as a register holds."""

comptime Untracked = UntrackedOrigin[mut=True]
"""Of pointers to tensors: the graph keeps those alive while an op runs."""

comptime Source[dtype: DType] = Pointer[
    Scalar[dtype], UntrackedOrigin[mut=False]
]
"""Values to read."""

comptime Target[dtype: DType] = Pointer[Scalar[dtype], Untracked]
"""Values to write."""

comptime HAS_DOT = WIDTH == 16 and CompilationTarget._has_feature[
    "avx512bf16"
]()
"""Whether the processor multiplies pairs of bfloat16 by itself."""

comptime PANEL = 32
"""Columns of a panel of packed weights: PANEL of engine/device/linear.py."""

comptime COLS = 2 * WIDTH
"""Columns of a tile: two vectors, so that a broadcast serves two multiplications."""

comptime ROWS = 12 if WIDTH == 16 else 6
"""Most rows of a tile. Its sums nearly fill the registers: 24 of 32, or 12 of 16 without AVX-512."""

comptime DEPTH = 512
"""Words of the sums a tile makes in one go; its rows of x take half the first-level cache."""

comptime TILE_STRIDE = DEPTH + 16
"""Distance of a tile's rows in words; off a power of two, so that they do not share cache sets."""


def values_per_word[dtype: DType]() -> Int:
    """Count the values of a word.

    Parameters:
        dtype: Of the values: float32 or bfloat16.

    Returns:
        1 or 2.
    """
    comptime assert dtype == DType.float32 or dtype == DType.bfloat16
    return 4 // size_of[dtype]()


@always_inline
def add_product[
    dtype: DType, dot: Bool
](x: Words, weight: Words, sums: Vector) -> Vector:
    """Add the products of two vectors of words to sums.

    Parameters:
        dtype: Of the values in the words.
        dot: Whether to use the processor's own product of bfloat16 pairs.

    Args:
        x: Words of x.
        weight: Words of weights.
        sums: What to add to.

    Returns:
        The new sums.
    """
    comptime if dtype == DType.float32:
        return bitcast[DType.float32](x).fma(
            bitcast[DType.float32](weight), sums
        )
    elif dot:
        comptime Pairs = SIMD[DType.bfloat16, 2 * WIDTH]
        return llvm_intrinsic["llvm.x86.avx512bf16.dpbf16ps.512", Vector](
            sums,
            bitcast[DType.bfloat16, 2 * WIDTH](x),
            bitcast[DType.bfloat16, 2 * WIDTH](weight),
        )
    else:
        comptime ODD = Words(0xFFFF0000)
        var odd = bitcast[DType.float32](x & ODD).fma(
            bitcast[DType.float32](weight & ODD), sums
        )
        return bitcast[DType.float32](x << 16).fma(
            bitcast[DType.float32](weight << 16), odd
        )


@no_inline
def multiply_tile[
    dtype: DType, dot: Bool, rows: Int
](
    x: Source[DType.uint32],
    weight: Source[DType.uint32],
    steps: Int,
    begin: Source[DType.float32],
    begin_stride: Int,
    sums: Target[DType.float32],
    next_x: Upcoming,
    next_weight: Upcoming,
):
    """Compute begin + x @ weight for `rows` x COLS sums.

    Parameters:
        dtype: Of the values in the words.
        dot: Whether to use the processor's own product of bfloat16 pairs.
        rows: Rows of the tile.

    Args:
        x: The copied rows, TILE_STRIDE apart.
        weight: Weights of the columns, PANEL apart.
        steps: Words of the sums.
        begin: What the sums start from: partial sums, or the bias.
        begin_stride: Distance of the rows of `begin`; 0 for a bias.
        sums: Where the sums go, PANEL apart.
        next_x: Rows to fetch meanwhile.
        next_weight: Weights to fetch meanwhile.
    """
    var acc = Array[Vector, 2 * rows](uninitialized=True)
    comptime for r in range(rows):
        comptime for v in range(2):
            acc[2 * r + v] = begin.unsafe_load[width=WIDTH](
                r * begin_stride + v * WIDTH
            )
    for chunk in range(0, steps, CHUNK):
        next_x.fetch(chunk // CHUNK)
        next_weight.fetch(chunk // CHUNK)
        for step in range(chunk, min(chunk + CHUNK, steps)):
            var w0 = weight.unsafe_load[width=WIDTH](step * PANEL)
            var w1 = weight.unsafe_load[width=WIDTH](step * PANEL + WIDTH)
            comptime for r in range(rows):
                var word = Words(x[unsafe_offset=r * TILE_STRIDE + step])
                acc[2 * r] = add_product[dtype, dot](word, w0, acc[2 * r])
                acc[2 * r + 1] = add_product[dtype, dot](
                    word, w1, acc[2 * r + 1]
                )
    comptime for r in range(rows):
        comptime for v in range(2):
            sums.unsafe_store(r * PANEL + v * WIDTH, acc[2 * r + v])


@no_inline
def multiply_panel[
    dtype: DType, dot: Bool
](
    rows: Int,
    x: Source[DType.uint32],
    weight: Source[DType.uint32],
    steps: Int,
    begin: Source[DType.float32],
    begin_stride: Int,
    sums: Target[DType.float32],
    next_x: Upcoming,
    next_weight: Upcoming,
):
    """Run `multiply_tile` over a panel, for a number of rows known only now.

    Parameters:
        dtype: Of the values in the words.
        dot: Whether to use the processor's own product of bfloat16 pairs.

    Args:
        rows: Rows of the tile, 1 … ROWS.
        x: The copied rows, TILE_STRIDE apart.
        weight: The panel.
        steps: Words of the sums.
        begin: What the sums start from: partial sums, or the bias.
        begin_stride: Distance of the rows of `begin`; 0 for a bias.
        sums: Where the rows x PANEL sums go.
        next_x: Rows to fetch meanwhile.
        next_weight: Weights to fetch meanwhile.
    """
    comptime for r in range(1, ROWS + 1):
        if rows == r:
            for column in range(0, PANEL, COLS):
                multiply_tile[dtype, dot, r](
                    x,
                    weight.unsafe_offset(column),
                    steps,
                    begin.unsafe_offset(column),
                    begin_stride,
                    sums.unsafe_offset(column),
                    next_x,
                    next_weight,
                )
