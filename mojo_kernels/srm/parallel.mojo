"""How much of the machine one op takes on a CPU.

The Mojo runtime's task pool costs a few microseconds to enter, so an op enters it only with enough
work: at batch 1 everything runs on the calling thread.
"""

from max.runtime.asyncrt import parallelism_level
from std.math import ceildiv

comptime GRAIN = 32_768
"""Elements that are worth a task of their own."""


def num_tasks(elements: Int) -> Int:
    """Tasks to split `elements` of work into: at least 1, at most one per core.

    Args:
        elements: Tensor elements the op touches.

    Returns:
        The number of tasks.
    """
    return max(1, min(parallelism_level(None), ceildiv(elements, GRAIN)))
