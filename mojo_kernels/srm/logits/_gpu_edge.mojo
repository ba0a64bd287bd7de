"""The search for the edge of top_k or top_p: the smallest logit kept.

Tokens between two logits are sorted into 32 bins of one width by their logits, and the search goes
on in the bin that holds the edge. A thread has a counter of its own for each bin, so that no two
threads meet. Bins are 2^e wide and begin at multiples of that, so a bin is exactly a range of
logits; the last few thresholds are halved by rank.
"""

from max.gpu import WARP_SIZE, barrier, lane_id, thread_idx
from max.gpu.primitives import warp
from std.math import ceildiv, floor
from std.memory import bitcast
from std.sys._assembly import inlined_assembly

from ._gpu_block import BLOCK, VECTOR, Shared, largest_in_warp, shared

comptime _BINS = 32
comptime _LOOKS_BY_VALUE = 3
"""How often logits are sorted into bins: between numbers of any size that takes long."""
comptime _FEW = 8
"""So few thresholds are sooner halved than sorted into bins."""


@always_inline
def bin_at(
    logit: Float32, scale: Float32, start: Float32, first: UInt32
) -> UInt32:
    """The address of the counter of bin floor(32 * x), x being logit * scale + start from 0 to 1.

    Both roundings are down: x >= i / 32 holds as exactly as if none had been. The sum's last bits
    are the bin; what is above them falls off when multiplied by 4 * BLOCK.
    """
    var x = inlined_assembly[
        "fma.rm.sat.f32 $0, $1, $2, $3;",
        Float32,
        constraints="=f,f,f,f",
        has_side_effect=False,
    ](logit, scale, start)
    var bits = inlined_assembly[
        "add.rm.f32 $0, $1, 0f48800000;",  # 2^18
        UInt32,
        constraints="=r,f",
        has_side_effect=False,
    ](x)
    return inlined_assembly[
        "mad.lo.u32 $0, $1, 1024, $2;",
        UInt32,
        constraints="=r,r,r",
        has_side_effect=False,
    ](bits, first)


@always_inline
def order(value: Float32) -> Int:
    """Map floats to integers of the same order, so that zeros, and only they, share one.
    """
    var bits = bitcast[DType.int32](value)
    return Int(bits) if bits >= 0 else -Int(bits & Int32.MAX)


@always_inline
def float_of(order: Int) -> Float32:
    """Invert `order`."""
    var bits = Int32(order) if order >= 0 else Int32(-order) | Int32.MIN
    return bitcast[DType.float32](bits)


struct Edge(Copyable):
    """Between which logits the last one kept lies, by their `order`; what to ask to know more.
    """

    comptime FOUND = Float32(0)
    comptime BINS = Float32(1)
    comptime KEPT = Float32(2)

    var least: Int
    var most: Int
    var looks: Int
    var begin: Float32  # of the bins, in widths
    var width: Float32

    def __init__(out self, least: Int, most: Int):
        self.least = least
        self.most = most
        self.looks = 0
        self.begin = 0
        self.width = 0

    def middle(self) -> Int:
        return self.most - (self.most - self.least) // 2

    def question[step: Int](mut self) -> SIMD[DType.float32, 4]:
        """FOUND and the threshold, BINS and what `bin_at` wants, or KEPT and a threshold to try.
        """
        self.looks += 1
        if self.least >= self.most:
            return {Edge.FOUND, float_of(self.least << step), 0, 0}
        if self.most - self.least < _FEW or self.looks > _LOOKS_BY_VALUE:
            return {Edge.KEPT, float_of(self.middle() << step), 0, 0}
        # So wide that there are bins enough, and that their numbers are exact.
        var low = float_of(self.least << step)
        var high = float_of(self.most << step)
        comptime EXPONENT = Int32(0x7F800000)
        comptime ONE = Int32(1 << 23)
        var bits = bitcast[DType.int32](high / _BINS - low / _BINS)
        var size = bitcast[DType.int32](max(abs(low), abs(high)))
        bits = max((bits + ONE - 1) & EXPONENT, (size & EXPONENT) - 18 * ONE)
        bits = max(bits, 27 * ONE)
        var scale = bitcast[DType.float32](254 * ONE - bits)
        self.width = bitcast[DType.float32](bits)
        if floor(high * scale) - floor(low * scale) >= _BINS:
            self.width *= 2
            scale /= 2
        self.begin = floor(low * scale)
        return {Edge.BINS, scale / _BINS, -self.begin / _BINS, 0}

    def answer(mut self, kept_is_enough: Bool):
        if kept_is_enough:
            self.least = self.middle()
        else:
            self.most = self.middle() - 1

    def answer_bins[step: Int](mut self, kept: Float32, target: Float32):
        """Go on in one bin; `kept` is of a lane's bin and all above, the first lane has the last.
        """
        var bin = UInt32(_BINS - 1 - lane_id())
        var found = Int(largest_in_warp(bin if kept >= target else 0))
        if found < _BINS - 1:
            self.most = min(self.most, self.first_in[step](found + 1) - 1)
        if found > 0:  # of an empty one, if the target is 0
            self.least = max(self.least, self.first_in[step](found))
            self.least = min(self.least, self.most)

    def first_in[step: Int](self, bin: Int) -> Int:
        return ceildiv(
            order((self.begin + Float32(bin)) * self.width), 1 << step
        )


struct Bins(Copyable):
    """What the tokens of each bin weigh, or how many they are."""

    var counters: Shared[DType.float32]  # [_BINS + 1, BLOCK] of each thread
    var totals: Shared[DType.float32]  # [_BINS]

    def __init__(out self):
        self.counters = shared[DType.float32, (_BINS + 1) * BLOCK]()
        self.totals = shared[DType.float32, _BINS]()

    def clear(self):
        """Begin at 0."""
        comptime zeros = SIMD[DType.float32, VECTOR](0)
        comptime for i in range(_BINS // VECTOR):
            self.counters.unsafe_store[alignment=16](
                (i * BLOCK + thread_idx.x) * VECTOR, zeros
            )
        self.counters[unsafe_offset=_BINS * BLOCK + thread_idx.x] = 0
        barrier()

    @always_inline
    def add[
        width: SIMDLength
    ](
        self,
        logits: SIMD[DType.float32, width],
        amounts: SIMD[DType.float32, width],
        scale: Float32,
        start: Float32,
    ):
        """Put tokens into bins, as `Edge.question` says; those below the bins into the first one.

        Those above the bins are counted behind the last one.
        """
        var own = UInt32(Int(self.counters.unsafe_offset(thread_idx.x)))
        comptime for i in range(Int(width)):
            var counter = Shared[DType.float32](
                unsafe_from_address=Int(bin_at(logits[i], scale, start, own))
            )
            counter[] += amounts[i]

    def add_up(self):
        """Leave in `totals` what all threads put into a bin."""
        barrier()
        # Eight threads have a bin.
        comptime SOME = BLOCK // _BINS
        var first = thread_idx.x // SOME * BLOCK + thread_idx.x % SOME * VECTOR
        var sum = SIMD[DType.float32, VECTOR](0)
        comptime for i in range(BLOCK // SOME // VECTOR):
            sum += self.counters.unsafe_load[width=VECTOR, alignment=16](
                first + i * SOME * VECTOR
            )
        var total = sum.reduce_add()
        comptime for i in range(3):
            total += warp.shuffle_xor(total, UInt32(1 << i))
        if thread_idx.x % SOME == 0:
            self.totals[unsafe_offset=thread_idx.x // SOME] = total
        barrier()

    def from_each_up(self) -> Float32:
        """What the tokens of a bin and all above weigh: in the first lane of the last bin, and so on.
        """
        comptime EACH = BLOCK // WARP_SIZE // VECTOR
        var above = SIMD[DType.float32, VECTOR](0)
        comptime for i in range(EACH):
            above += self.counters.unsafe_load[width=VECTOR, alignment=16](
                _BINS * BLOCK + (i * WARP_SIZE + lane_id()) * VECTOR
            )
        return warp.sum(above.reduce_add()) + warp.prefix_sum(
            self.totals[unsafe_offset=_BINS - 1 - lane_id()]
        )
