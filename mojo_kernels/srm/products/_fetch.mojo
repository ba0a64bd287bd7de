"""Fetching what a matrix product will read soon, a few cache lines at a time: `Upcoming`.

While it multiplies, a tile fetches some of the rows and weights that later tiles will read: a few
lines every CHUNK steps, because a burst of them would hold up its own loads.
"""

from std.math import ceildiv
from std.sys import size_of
from std.sys.intrinsics import PrefetchOptions, prefetch

comptime LINE = 64
"""Bytes in a cache line."""

comptime CHUNK = 8
"""Steps of a sum between two looks at what to fetch."""


@fieldwise_init
struct Upcoming(ImplicitlyCopyable):
    """Runs of cache lines that will be needed soon, of which each look fetches one.
    """

    var first: Pointer[UInt8, UntrackedOrigin[mut=False]]
    """First byte of the first run."""
    var stride: Int
    """Distance of the runs in bytes."""
    var lines: Int
    """Lines of a run."""
    var looks: Int
    """Number of runs."""

    @staticmethod
    def columns[
        dtype: DType
    ](
        base: Pointer[Scalar[dtype], UntrackedOrigin[mut=False]],
        stride: Int,
        rows: Int,
        width: Int,
        part: Int,
        parts: Int,
    ) -> Self:
        """Take one of several equal parts of a matrix's columns, a row at each look.

        Parameters:
            dtype: Of its values.

        Args:
            base: First value of the matrix.
            stride: Distance of its rows.
            rows: Rows; none where nothing is upcoming.
            width: Values of a row.
            part: Which part.
            parts: How many parts.

        Returns:
            The part.
        """
        comptime SIZE = size_of[dtype]()
        var row_lines = ceildiv(width * SIZE, LINE)
        var begin = part * row_lines // parts
        return Self(
            base.unsafe_bitcast[UInt8]().unsafe_offset(begin * LINE),
            stride * SIZE,
            (part + 1) * row_lines // parts - begin,
            rows,
        )

    @staticmethod
    def piece(
        base: Pointer[UInt32, UntrackedOrigin[mut=False]],
        words: Int,
        looks: Int,
        part: Int,
        parts: Int,
    ) -> Self:
        """Take one of several equal parts of words that follow each other.

        Args:
            base: The first word.
            words: How many; none where nothing is upcoming.
            looks: In how many looks the part is to be fetched, at least 1.
            part: Which part.
            parts: How many parts.

        Returns:
            The part.
        """
        var lines = words * size_of[DType.uint32]() // LINE
        var begin = part * lines // parts
        var own = (part + 1) * lines // parts - begin
        var per_look = max(1, ceildiv(own, looks))
        return Self(
            base.unsafe_bitcast[UInt8]().unsafe_offset(begin * LINE),
            per_look * LINE,
            per_look,
            ceildiv(own, per_look),
        )

    @always_inline
    def fetch(self, look: Int):
        """Fetch a run into the second-level cache, if there is one more.

        Args:
            look: How many times this was done before.
        """
        if look < self.looks:
            var run = self.first.unsafe_offset(look * self.stride)
            for line in range(self.lines):
                prefetch[
                    PrefetchOptions()
                    .for_read()
                    .medium_locality()
                    .to_data_cache()
                ](run.unsafe_offset(line * LINE))
