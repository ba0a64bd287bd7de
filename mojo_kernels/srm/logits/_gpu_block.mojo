"""What the threads of a block do together: `Block`, and the instructions of it.

Every thread calls every method and gets the same answer; every method leaves the shared memory free
for the next one.
"""

from max.gpu import WARP_SIZE, barrier, lane_id, warp_id
from max.gpu.memory import AddressSpace
from std.memory import stack_allocation
from std.sys._assembly import inlined_assembly

comptime BLOCK = 256
"""Threads of a row."""

comptime WARPS = BLOCK // WARP_SIZE
"""Warps of a row."""

comptime VECTOR = 4
"""Numbers that a thread reads of shared memory at a time."""

comptime Shared[type: DType] = Pointer[
    Scalar[type], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]
"""The first value of an array that the threads of a block share."""


def shared[type: DType, size: Int]() -> Shared[type]:
    """Such an array."""
    return stack_allocation[
        size,
        Scalar[type],
        alignment=16,
        address_space=AddressSpace.SHARED,
    ]().unsafe_origin_cast[MutUntrackedOrigin]()


@always_inline
def at_least(value: Float32, threshold: Float32) -> Float32:
    """1 or 0, in one instruction where a comparison and a choice are two."""
    return inlined_assembly[
        "set.ge.f32.f32 $0, $1, $2;",
        Float32,
        constraints="=f,f,f",
        has_side_effect=False,
    ](value, threshold)


@always_inline
def largest_in_warp(value: UInt32) -> UInt32:
    """The largest of the lanes' values, in one instruction."""
    return inlined_assembly[
        "redux.sync.max.u32 $0, $1, 0xffffffff;",
        UInt32,
        constraints="=r,r",
        has_side_effect=True,
    ](value)


@always_inline
def log_of(value: Float32) -> Float32:
    """The natural logarithm to 1e-6 or so, in two instructions."""
    comptime LN_2 = Float32(0.6931471805599453)
    return LN_2 * inlined_assembly[
        "lg2.approx.f32 $0, $1;",
        Float32,
        constraints="=f,f",
        has_side_effect=False,
    ](value)


struct Block(Copyable):
    """Reductions over the threads of a block."""

    var sums: Shared[DType.float32]  # [WARPS]
    var maxima: Shared[DType.uint32]  # [WARPS]

    def __init__(out self):
        self.sums = shared[DType.float32, WARPS]()
        self.maxima = shared[DType.uint32, WARPS]()

    def max(self, value: UInt32) -> UInt32:
        """The largest of the threads' values."""
        var most = largest_in_warp(value)
        if lane_id() == 0:
            self.maxima[unsafe_offset=warp_id()] = most
        barrier()
        var maxima = self.maxima.unsafe_load[width=WARPS, alignment=16](0)
        barrier()
        return maxima.reduce_max()

    def min(self, value: UInt32) -> UInt32:
        """The smallest of the threads' values."""
        return ~self.max(~value)

    def total(self, warp_sum: Float32) -> Float32:
        """Add up the sums of the warps."""
        var total, _ = self.total_and_before(warp_sum)
        return total

    def total_and_before(self, warp_sum: Float32) -> Tuple[Float32, Float32]:
        """Add up the sums of all warps, and of those before this thread's."""
        if lane_id() == 0:
            self.sums[unsafe_offset=warp_id()] = warp_sum
        barrier()
        var sums = self.sums.unsafe_load[width=WARPS, alignment=16](0)
        barrier()
        var before = Float32(0)
        comptime for i in range(WARPS):
            before += sums[i] if i < warp_id() else 0
        return (sums.reduce_add(), before)
