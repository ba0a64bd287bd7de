"""The inner part of `srm_linear`: the sums of a tile of the output, held in registers.

A tile is at most ROWS rows of x by COLS columns of a panel of weights. Each sum is one chain of
fused multiply-adds in the order of k, whatever the tile's size. While it multiplies, a tile fetches
some of the rows and weights that later tiles will read: a few lines every CHUNK steps, because a
burst of them would hold up its own loads.
"""

from std.math import ceildiv, exp
from std.sys import simd_width_of
from std.sys.intrinsics import PrefetchOptions, prefetch

comptime WIDTH = simd_width_of[DType.float32]()
"""Values in a vector."""

comptime Vector = SIMD[DType.float32, WIDTH]
"""As many values as a register holds."""

comptime Untracked = UntrackedOrigin[mut=True]
"""Of pointers to tensors: the graph keeps those alive while an op runs."""

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

comptime LINE = 16
"""Values in a cache line."""

comptime TILE_STRIDE = DEPTH + LINE
"""Distance of a tile's rows; off a power of two, so that they do not share cache sets."""

comptime CHUNK = 32
"""Steps of a sum between two looks at what to fetch."""

comptime MAX_FETCH = 8
"""Most lines of one kind to fetch at such a look: more would hold up the loads of the tile."""


@fieldwise_init
struct Upcoming(ImplicitlyCopyable):
    """Part of a matrix that will be needed soon, to fetch a few lines at a time.
    """

    var base: Source
    """First value of the matrix."""
    var stride: Int
    """Distance of its rows."""
    var row_lines: Int
    """Lines to fetch of each row."""
    var first: Int
    """First line of this part."""
    var per_chunk: Int
    """Lines to fetch at a time."""

    @staticmethod
    def share(
        base: Source,
        stride: Int,
        rows: Int,
        width: Int,
        depth: Int,
        step: Int,
        steps: Int,
    ) -> Self:
        """Take one of several equal parts of a matrix.

        Args:
            base: First value of the matrix.
            stride: Distance of its rows.
            rows: Rows; none where nothing is upcoming.
            width: Values of a row.
            depth: Length of the sums during which the part is fetched.
            step: Which part.
            steps: How many parts.

        Returns:
            The part.
        """
        var row_lines = ceildiv(width, LINE)
        var chunks = ceildiv(depth, CHUNK)
        var per_chunk = min(
            MAX_FETCH, ceildiv(rows * row_lines, steps * chunks)
        )
        var first = step * chunks * per_chunk
        return Self(
            base,
            stride,
            row_lines,
            first,
            per_chunk if first < rows * row_lines else 0,
        )

    @always_inline
    def fetch(self, chunk: Int):
        """Fetch some lines into the second-level cache.

        Args:
            chunk: How many times this was done before.
        """
        var first = self.first + chunk * self.per_chunk
        for line in range(first, first + self.per_chunk):
            var row, column = divmod(line, self.row_lines)
            prefetch[
                PrefetchOptions().for_read().medium_locality().to_data_cache()
            ](self.base.unsafe_offset(row * self.stride + column * LINE))


@fieldwise_init
struct Sums(ImplicitlyCopyable):
    """Where the sums of some columns of a tile come from and go to."""

    var begin: Source
    """What they start from: partial sums, or the bias."""
    var begin_stride: Int
    """Distance of the rows of `begin`; 0 for a bias."""
    var out: Target
    """Where they go."""
    var residual: Source
    """Added last, if wanted."""
    var stride: Int
    """Distance of the rows of `out` and `residual`."""
    var has_residual: Bool
    """Whether to add the residual."""

    @always_inline
    def from_column(self, column: Int) -> Self:
        """Skip some columns.

        Args:
            column: How many.

        Returns:
            The sums of the columns after them.
        """
        return Self(
            self.begin.unsafe_offset(column),
            self.begin_stride,
            self.out.unsafe_offset(column),
            self.residual.unsafe_offset(column),
            self.stride,
            self.has_residual,
        )


@no_inline
def multiply_tile[
    rows: Int
](
    x: Source,
    weight: Source,
    depth: Int,
    sums: Sums,
    next_x: Upcoming,
    next_weight: Upcoming,
):
    """Add x @ weight to `rows` x COLS sums.

    Parameters:
        rows: Rows of the tile.

    Args:
        x: The copied rows, TILE_STRIDE apart.
        weight: Weights of the columns, PANEL apart.
        depth: Length of the sums.
        sums: The sums.
        next_x: Rows to fetch meanwhile.
        next_weight: Weights to fetch meanwhile.
    """
    var acc = Array[Vector, 2 * rows](uninitialized=True)
    comptime for r in range(rows):
        comptime for v in range(2):
            acc[2 * r + v] = sums.begin.unsafe_load[width=WIDTH](
                r * sums.begin_stride + v * WIDTH
            )
    for chunk in range(0, depth, CHUNK):
        next_x.fetch(chunk // CHUNK)
        next_weight.fetch(chunk // CHUNK)
        for k in range(chunk, min(chunk + CHUNK, depth)):
            var w0 = weight.unsafe_load[width=WIDTH](k * PANEL)
            var w1 = weight.unsafe_load[width=WIDTH](k * PANEL + WIDTH)
            comptime for r in range(rows):
                var value = Vector(x[unsafe_offset=r * TILE_STRIDE + k])
                acc[2 * r] = value.fma(w0, acc[2 * r])
                acc[2 * r + 1] = value.fma(w1, acc[2 * r + 1])
    if sums.has_residual:
        comptime for r in range(rows):
            comptime for v in range(2):
                acc[2 * r + v] += sums.residual.unsafe_load[width=WIDTH](
                    r * sums.stride + v * WIDTH
                )
    comptime for r in range(rows):
        comptime for v in range(2):
            sums.out.unsafe_store(r * sums.stride + v * WIDTH, acc[2 * r + v])


@no_inline
def multiply_panel(
    rows: Int,
    x: Source,
    weight: Source,
    depth: Int,
    sums: Sums,
    next_x: Upcoming,
    next_weight: Upcoming,
):
    """Run `multiply_tile` over a panel, for a number of rows known only now.

    Args:
        rows: Rows of the tile, 1 … ROWS.
        x: The copied rows, TILE_STRIDE apart.
        weight: The panel.
        depth: Length of the sums.
        sums: The rows x PANEL sums.
        next_x: Rows to fetch meanwhile.
        next_weight: Weights to fetch meanwhile.
    """
    comptime for r in range(1, ROWS + 1):
        if rows == r:
            for column in range(0, PANEL, COLS):
                multiply_tile[r](
                    x,
                    weight.unsafe_offset(column),
                    depth,
                    sums.from_column(column),
                    next_x,
                    next_weight,
                )


@no_inline
def apply_silu(values: Target, stride: Int, rows: Int):
    """Replace y by y / (1 + exp(-y)) in PANEL columns.

    Args:
        values: The first value.
        stride: Distance of the rows.
        rows: Rows.
    """
    for row in range(rows):
        comptime for column in range(0, PANEL, WIDTH):
            var at = values.unsafe_offset(row * stride + column)
            var y = at.unsafe_load[width=WIDTH](0)
            at.unsafe_store(0, y / (1 + exp(-y)))
