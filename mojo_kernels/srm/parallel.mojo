"""How much of the machine one op takes.

On a CPU the Mojo runtime's task pool costs a few microseconds to enter, so an op enters it only with
enough work: at batch 1 everything runs on the calling thread. On a GPU a block has `BLOCK` threads
or fewer.
"""

from max.gpu import block_dim, block_idx, thread_idx
from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv

comptime GRAIN = 32_768
"""Elements that are worth a task of their own."""

comptime BLOCK = 256
"""Most threads of a GPU block."""


def num_tasks(elements: Int) -> Int:
    """Tasks to split `elements` of work into: at least 1, at most one per core.

    Args:
        elements: Tensor elements the op touches.

    Returns:
        The number of tasks.
    """
    return max(1, min(parallelism_level(None), ceildiv(elements, GRAIN)))


struct RowGrid:
    """A GPU grid whose threads copy rows: each has one piece of one row."""

    var block: Tuple[Int, Int]
    """Threads on the axis of pieces and on that of rows."""
    var blocks: Tuple[Int, Int]
    """Blocks on the axis of rows and on that of pieces."""

    def __init__(out self, rows: Int, pieces: Int):
        """Lay the threads out.

        Args:
            rows: Rows, at least 1.
            pieces: Pieces of a row, at least 1.
        """
        var x = min(pieces, BLOCK)
        var y = BLOCK // x
        self.block = (x, y)
        self.blocks = (ceildiv(rows, y), ceildiv(pieces, x))

    @staticmethod
    @always_inline
    def row() -> Int:
        """Find the row of this thread.

        Returns:
            The row, which may lie past the last.
        """
        return block_idx.x * block_dim.y + thread_idx.y

    @staticmethod
    @always_inline
    def piece() -> Int:
        """Find the piece of this thread.

        Returns:
            The piece, which may lie past the last.
        """
        return block_idx.y * block_dim.x + thread_idx.x
