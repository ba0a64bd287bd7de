"""Fetching what a matrix product will read soon, a few cache lines at a time: `Upcoming`.

While it multiplies, a tile fetches some of the rows and weights that later tiles will read: a few
lines every CHUNK steps, because a burst of them would hold up its own loads.
"""

from std.math import ceildiv
from std.sys import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

comptime LINE = 64
"""Bytes in a cache line."""

comptime CHUNK = 32
"""Steps of a sum between two looks at what to fetch."""

comptime MAX_FETCH = 8
"""Most lines of one kind to fetch at such a look: more would hold up the loads of the tile."""


@fieldwise_init
struct Upcoming(ImplicitlyCopyable):
    """Part of a matrix that will be needed soon."""

    var base: Pointer[UInt8, UntrackedOrigin[mut=False]]
    """First byte of the matrix."""
    var stride: Int
    """Distance of its rows in bytes."""
    var row_lines: Int
    """Lines to fetch of each row."""
    var first: Int
    """First line of this part."""
    var per_chunk: Int
    """Lines to fetch at a time."""

    @staticmethod
    def share[
        dtype: DType
    ](
        base: Pointer[Scalar[dtype], UntrackedOrigin[mut=False]],
        stride: Int,
        rows: Int,
        width: Int,
        steps: Int,
        part: Int,
        parts: Int,
    ) -> Self:
        """Take one of several equal parts of a matrix.

        Parameters:
            dtype: Of its values.

        Args:
            base: First value of the matrix.
            stride: Distance of its rows.
            rows: Rows; none where nothing is upcoming.
            width: Values of a row.
            steps: Steps of the sum during which the part is fetched.
            part: Which part.
            parts: How many parts.

        Returns:
            The part.
        """
        comptime SIZE = size_of[dtype]()
        var row_lines = ceildiv(width * SIZE, LINE)
        var chunks = ceildiv(steps, CHUNK)
        var per_chunk = min(
            MAX_FETCH, ceildiv(rows * row_lines, parts * chunks)
        )
        var first = part * chunks * per_chunk
        return Self(
            base.unsafe_bitcast[UInt8](),
            stride * SIZE,
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
