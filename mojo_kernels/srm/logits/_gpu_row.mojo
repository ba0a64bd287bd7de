"""A row of logits on one block of threads: `GPURow`.

A warp has neighbouring tokens, its lanes taking turns with 8 each, so that a lane reads 16 bytes of
bfloat16 and a warp whole lines. A short row is read from memory once and held in registers; a longer
one is read and weighed again by every pass. Sums are float32 within a warp (within a thread of a
long row float64), in one order whatever the other rows. Every thread calls every method and gets the
same answer; every method leaves the shared memory free for the next one.

The edge of top_k or top_p lies between two logits. Tokens between them are sorted into 32 bins of
one width by their logits, and the search goes on in the bin that holds the edge. A thread has a
counter of its own for each bin, so that no two threads meet. Bins are 2^e wide and begin at
multiples of that, so a bin is exactly a range of logits; the last few thresholds are halved by rank.
"""

from max.gpu import WARP_SIZE, barrier, lane_id, thread_idx, warp_id
from max.gpu.memory import AddressSpace
from max.gpu.primitives import warp
from std.math import ceildiv, exp2, floor, fma
from std.memory import bitcast, stack_allocation
from std.sys._assembly import inlined_assembly
from std.utils.numerics import inf, neg_inf

from ._logit_row import (
    LogitRow,
    floor_of,
    is_after,
    rank,
    uniform,
    unrank,
)
from .._values import Values, on_16_bytes

comptime BLOCK = 256
"""Threads of a row."""

comptime TURN = 8
"""Neighbouring tokens of a lane."""

comptime SHORT = TURN
"""Logits to a thread in most small vocabularies."""

comptime LONG = 32
"""The most that are held: logits and weights take 64 registers, and two blocks have 128 each."""

comptime _WARPS = BLOCK // WARP_SIZE
comptime _BINS = 32
comptime _LOOKS_BY_VALUE = 3
"""How often logits are sorted into bins: between numbers of any size that takes long."""
comptime _FEW = 8
"""So few thresholds are sooner halved than sorted into bins."""

comptime VECTOR = 4
"""Numbers that a thread reads of shared memory at a time."""

comptime _Turn = SIMD[DType.float32, TURN]
comptime _Shared[type: DType] = Pointer[
    Scalar[type], MutUntrackedOrigin, address_space=AddressSpace.SHARED
]


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


struct _Edge(Copyable):
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
            return {_Edge.FOUND, float_of(self.least << step), 0, 0}
        if self.most - self.least < _FEW or self.looks > _LOOKS_BY_VALUE:
            return {_Edge.KEPT, float_of(self.middle() << step), 0, 0}
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
        return {_Edge.BINS, scale / _BINS, -self.begin / _BINS, 0}

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


struct GPURow[dtype: DType, share: Int](LogitRow):
    """A row of 1 up to `BLOCK * share` logits, held; or with share 0 of any number.
    """

    comptime is_held = Self.share > 0
    comptime Held = SIMD[DType.float32, max(Self.share, TURN)]
    comptime Sum = DType.float32 if Self.is_held else DType.float64
    comptime step = 16 if Self.dtype == DType.bfloat16 else 0
    """Bits of an `order` that are 0 for every logit."""

    var source: Values[Self.dtype]  # [vocab]
    var vocab: Int
    var turns: Int
    var logits: Self.Held  # if held; -inf past the end
    var weights: Self.Held
    var top: Float32  # the largest logit
    var scale: Float32  # of logits, in powers of 2
    var threshold: Float32  # the smallest logit kept
    var warp_mass: Float32  # of the kept tokens of this thread's warp
    var sums: _Shared[DType.float32]  # [_WARPS]
    var maxima: _Shared[DType.uint32]  # [_WARPS]
    var bins: _Shared[DType.float32]  # [_BINS + 1, BLOCK] of each thread
    var totals: _Shared[DType.float32]  # [_BINS]
    var question: _Shared[DType.float32]  # [4] what `_Edge` asks
    var bounds: _Shared[DType.float64]  # [2] of the chosen warp's `draw`
    var place: _Shared[DType.int32]  # [2] the warp and the token chosen

    def __init__(out self, source: Values[Self.dtype], vocab: Int):
        self.source = source
        self.vocab = vocab
        self.turns = ceildiv(vocab, BLOCK * TURN)
        self.logits = neg_inf[DType.float32]()
        self.weights = 0
        self.top = 0
        self.scale = 1
        self.threshold = neg_inf[DType.float32]()
        self.warp_mass = 0
        self.sums = Self.allocate[DType.float32, _WARPS]()
        self.maxima = Self.allocate[DType.uint32, _WARPS]()
        self.bins = Self.allocate[DType.float32, (_BINS + 1) * BLOCK]()
        self.totals = Self.allocate[DType.float32, _BINS]()
        self.question = Self.allocate[DType.float32, 4]()
        self.bounds = Self.allocate[DType.float64, 2]()
        self.place = Self.allocate[DType.int32, 2]()

        comptime if Self.is_held:
            var first = self.first_token()
            var all_there = (warp_id() + 1) * self.span() <= vocab
            if all_there and on_16_bytes(source):
                comptime for turn in range(Self.share // TURN):
                    self.logits = self.logits.insert[offset=turn * TURN](
                        self.aligned(first + turn * TURN * WARP_SIZE)
                    )
            else:
                comptime for turn in range(Self.share // TURN):
                    self.logits = self.logits.insert[offset=turn * TURN](
                        self.some(first + turn * TURN * WARP_SIZE)
                    )
        var best = _Turn(neg_inf[DType.float32]())

        def find_best(token: Int, logits: _Turn, weights: _Turn) {mut best}:
            best = max(best, logits)

        self.visit(find_best)
        self.top = unrank(self.max(rank(best.reduce_max())))

    @staticmethod
    def allocate[type: DType, size: Int]() -> _Shared[type]:
        """Memory that the threads of a block share."""
        return stack_allocation[
            size,
            Scalar[type],
            alignment=16,
            address_space=AddressSpace.SHARED,
        ]().unsafe_origin_cast[MutUntrackedOrigin]()

    def span(self) -> Int:
        """How many tokens a warp has."""
        comptime if Self.is_held:
            return WARP_SIZE * Self.share
        return self.turns * TURN * WARP_SIZE

    def first_token(self) -> Int:
        """The first of this thread's tokens."""
        return warp_id() * self.span() + lane_id() * TURN

    def aligned(self, token: Int) -> _Turn:
        """The logits of a lane's turn that is all there, on 16 bytes."""
        return self.source.unsafe_load[width=TURN, alignment=16](token).cast[
            DType.float32
        ]()

    def some(self, token: Int) -> _Turn:
        """The logits of any turn, -inf past the end."""
        var logits = _Turn(neg_inf[DType.float32]())
        comptime for i in range(TURN):
            if token + i < self.vocab:
                logits[i] = self.logit(token + i)
        return logits

    @always_inline
    def visit[
        Visit: def(Int, _Turn, _Turn) -> None, //
    ](self, mut visit: Visit):
        """Call with each turn of this thread: its first token, and logits and weights.
        """
        var first = self.first_token()
        comptime if Self.is_held:
            comptime for turn in range(Self.share // TURN):
                visit(
                    first + turn * TURN * WARP_SIZE,
                    self.logits.slice[TURN, offset=turn * TURN](),
                    self.weights.slice[TURN, offset=turn * TURN](),
                )
        else:
            var is_aligned = on_16_bytes(self.source)
            for turn in range(self.turns):
                var token = first + turn * TURN * WARP_SIZE
                var logits: _Turn
                if is_aligned and token + TURN <= self.vocab:
                    logits = self.aligned(token)
                else:
                    logits = self.some(token)
                visit(token, logits, self.weigh_some(logits))

    @always_inline
    def weigh_some[
        width: SIMDLength
    ](self, logits: SIMD[DType.float32, width]) -> SIMD[DType.float32, width]:
        # 0 below 2^-126, about where `weight` ends as well.
        return exp2((logits - self.top) * self.scale)

    def max(self, value: UInt32) -> UInt32:
        """The largest of the threads' values."""
        var most = largest_in_warp(value)
        if lane_id() == 0:
            self.maxima[unsafe_offset=warp_id()] = most
        barrier()
        var maxima = self.maxima.unsafe_load[width=_WARPS, alignment=16](0)
        barrier()
        return maxima.reduce_max()

    def min(self, value: UInt32) -> UInt32:
        """The smallest of the threads' values."""
        return ~self.max(~value)

    def total(self, warp_sum: Float32) -> Float32:
        """Add up the sums of the warps."""
        if lane_id() == 0:
            self.sums[unsafe_offset=warp_id()] = warp_sum
        barrier()
        var sums = self.sums.unsafe_load[width=_WARPS, alignment=16](0)
        barrier()
        return sums.reduce_add()

    def in_warp[by_mass: Bool](self, threshold: Float32) -> Float32:
        """The mass, or the count, of those of the warp's tokens that a threshold keeps.
        """
        var sum = SIMD[Self.Sum, 1](0)

        def add(token: Int, logits: _Turn, weights: _Turn) {mut sum, threshold}:
            var part = SIMD[DType.float32, 2](0)
            comptime for i in range(TURN):
                var kept = at_least(logits[i], threshold)
                comptime if by_mass:
                    part[i % 2] = fma(kept, weights[i], part[i % 2])
                else:
                    part[i % 2] += kept
            sum += part.reduce_add().cast[Self.Sum]()

        self.visit(add)
        return warp.sum(sum[0].cast[DType.float32]())

    def largest(self) -> Float32:
        return self.top

    def weigh(mut self, top: Float32, scale: Float32) -> Float64:
        comptime LOG2_E = Float32(1.4426950408889634)
        self.scale = min(scale * LOG2_E, Float32.MAX_FINITE)
        comptime if Self.is_held:
            self.weights = self.weigh_some(self.logits)
            self.warp_mass = warp.sum(self.weights.reduce_add())
        else:
            self.warp_mass = self.in_warp[by_mass=True](self.threshold)
        return Float64(self.total(self.warp_mass))

    def truncate(
        mut self,
        mass: Float64,
        temperature: Float32,
        top_k: Int,
        top_p: Float32,
        min_p: Float32,
    ):
        self.threshold = max(
            self.top + temperature * floor_of(min_p), Float32.MIN_FINITE
        )
        var count = Float32(self.vocab)
        if min_p > 0 and top_k > 0:
            count = self.total(self.in_warp[by_mass=False](self.threshold))
        if 0 < top_k < Int(count):
            self.raise_threshold[by_mass=False](self.smallest(), Float32(top_k))
        if top_p < 1:
            var kept = Float32(mass)
            if top_k > 0 or min_p > 0:
                kept = self.total(self.in_warp[by_mass=True](self.threshold))
            # If all that is below weighed so much each, it would be little enough to drop.
            var least = 0.9 * (1 - top_p) * kept / Float32(self.vocab)
            var low = self.top + temperature * log_of(least)
            low -= abs(self.top) * Float32(
                2.4e-7
            )  # which rounding may have added
            if kept > 0.1 * Float32(
                self.vocab
            ):  # many are as likely as the top
                low = max(low, self.smallest())
            self.raise_threshold[by_mass=True](low, top_p * kept)
        self.warp_mass = self.in_warp[by_mass=True](self.threshold)

    def smallest(self) -> Float32:
        """The smallest logit."""
        var least = _Turn(inf[DType.float32]())

        def find_least(token: Int, logits: _Turn, weights: _Turn) {mut least}:
            least = min(least, logits)

        self.visit(find_least)
        return unrank(self.min(rank(least.reduce_min())))

    def raise_threshold[by_mass: Bool](mut self, low: Float32, target: Float32):
        """Raise the threshold as far as it still keeps a mass, or a count; to `low` it does.

        The first warp alone thinks, to save the others the instructions.
        """
        var edge = _Edge(
            ceildiv(order(max(low, self.threshold)), 1 << Self.step),
            order(self.top) >> Self.step,
        )
        while True:
            if warp_id() == 0:
                var ask = edge.question[Self.step]()
                if lane_id() == 0:
                    self.question.unsafe_store(0, ask)
            barrier()
            var asked = self.question.unsafe_load[width=4](0)
            if asked[0] == _Edge.FOUND:
                self.threshold = asked[1]
                barrier()
                return
            if asked[0] == _Edge.BINS:
                self.fill_bins[by_mass](asked[1], asked[2])
                if warp_id() == 0:
                    edge.answer_bins[Self.step](self.up_to_bins(), target)
            else:
                var kept = self.total(self.in_warp[by_mass](asked[1]))
                edge.answer(kept >= target)

    def fill_bins[by_mass: Bool](self, scale: Float32, start: Float32):
        """Leave in `totals` what tokens of each bin weigh, or how many they are.

        Those below the bins are in the first one, those above in `bins` behind the last.
        """
        comptime zeros = SIMD[DType.float32, VECTOR](0)
        comptime for i in range(_BINS // VECTOR):
            self.bins.unsafe_store[alignment=16](
                (i * BLOCK + thread_idx.x) * VECTOR, zeros
            )
        self.bins[unsafe_offset=_BINS * BLOCK + thread_idx.x] = 0
        barrier()
        var own = UInt32(Int(self.bins.unsafe_offset(thread_idx.x)))

        def add(token: Int, logits: _Turn, weights: _Turn) {scale, start, own}:
            comptime for i in range(TURN):
                var counter = _Shared[DType.float32](
                    unsafe_from_address=Int(
                        bin_at(logits[i], scale, start, own)
                    )
                )
                counter[] += weights[i] if by_mass else 1

        self.visit(add)
        barrier()
        # Eight threads have a bin.
        comptime SOME = BLOCK // _BINS
        var first = thread_idx.x // SOME * BLOCK + thread_idx.x % SOME * VECTOR
        var sum = SIMD[DType.float32, VECTOR](0)
        comptime for i in range(BLOCK // SOME // VECTOR):
            sum += self.bins.unsafe_load[width=VECTOR, alignment=16](
                first + i * SOME * VECTOR
            )
        var total = sum.reduce_add()
        comptime for i in range(3):
            total += warp.shuffle_xor(total, UInt32(1 << i))
        if thread_idx.x % SOME == 0:
            self.totals[unsafe_offset=thread_idx.x // SOME] = total
        barrier()

    def up_to_bins(self) -> Float32:
        """What the tokens of a bin and all above weigh: in the first lane of the last bin, and so on.
        """
        comptime EACH = BLOCK // WARP_SIZE // VECTOR
        var above = SIMD[DType.float32, VECTOR](0)
        comptime for i in range(EACH):
            above += self.bins.unsafe_load[width=VECTOR, alignment=16](
                _BINS * BLOCK + (i * WARP_SIZE + lane_id()) * VECTOR
            )
        return warp.sum(above.reduce_add()) + warp.prefix_sum(
            self.totals[unsafe_offset=_BINS - 1 - lane_id()]
        )

    def first(self, logit: Float32) -> Int:
        return self.lowest_after(logit, inf[DType.float32](), -1)

    def lowest_after(self, logit: Float32, than: Float32, token: Int) -> Int:
        """The lowest token with a logit, among those after another."""
        var lowest = Int32.MAX

        def find(
            at: Int, logits: _Turn, weights: _Turn
        ) {mut lowest, logit, than, token}:
            comptime for i in reversed(range(TURN)):
                if logits[i] == logit and (logit < than or at + i > token):
                    lowest = min(lowest, Int32(at + i))

        self.visit(find)
        return Int(self.min(UInt32(lowest)))

    def draw(self, seed: UInt64, position: Int) -> Int:
        # The warp whose tokens hold the target, of these the lanes' turn, of that the lane.
        if lane_id() == 0:
            self.sums[unsafe_offset=warp_id()] = self.warp_mass
        barrier()
        if warp_id() == 0:
            var masses = self.sums.unsafe_load[width=_WARPS, alignment=16](0)
            var all = masses.cast[DType.float64]().reduce_add()
            var target = uniform(seed, position) * all
            var chosen, before = passing(masses, 0, target)
            if lane_id() == 0:
                self.place[unsafe_offset=0] = Int32(chosen)
                self.bounds.unsafe_store(
                    0, SIMD[DType.float64, 2](before, target)
                )
        barrier()
        if warp_id() == Int(self.place[unsafe_offset=0]):
            var bounds = self.bounds.unsafe_load[width=2](0)
            self.draw_in_warp(bounds[0], bounds[1])
        barrier()
        var token = Int(self.place[unsafe_offset=1])
        barrier()
        return token

    def draw_in_warp(self, before_warp: Float64, target: Float64):
        """Leave in `place` which of the warp's tokens passes the target."""
        var sum = before_warp
        var before = (
            before_warp  # the turn that passes, or the last with a mass
        )
        var first = 0
        var chosen = _Turn(0)
        var threshold = self.threshold

        def find(
            token: Int, logits: _Turn, weights: _Turn
        ) {mut sum, mut before, mut first, mut chosen, target, threshold}:
            var kept = _Turn(0)
            comptime for i in range(TURN):
                kept[i] = weights[i] * at_least(logits[i], threshold)
            var mass = warp.sum(kept.reduce_add())
            if mass > 0 and sum <= target:
                before = sum
                first = token
                chosen = kept
                sum += Float64(mass)

        self.visit(find)
        var mass = Float64(0)
        comptime for i in range(TURN):
            mass += Float64(chosen[i])
        before += warp.prefix_sum[exclusive=True](mass)
        # The first lane that passes the target; where rounding lets none, the last with a weight.
        var lane = UInt32(lane_id())
        var by = UInt32(0)
        if mass > 0:
            by = (
                UInt32(3 * WARP_SIZE) - lane if before + mass
                > target else 1 + lane
            )
        if by == largest_in_warp(by):
            var at, _ = passing(chosen, before, target)
            self.place[unsafe_offset=1] = Int32(first + at)

    def logit(self, token: Int) -> Float32:
        return self.source[unsafe_offset=token].cast[DType.float32]()

    def before(self, token: Int) -> Int:
        # What lies past the end is after every token: -inf, and higher.
        var logit = self.logit(token)
        var earlier = Float32(0)

        def count(
            at: Int, logits: _Turn, weights: _Turn
        ) {mut earlier, logit, token}:
            comptime for i in range(TURN):
                if logits[i] > logit or (logits[i] == logit and at + i < token):
                    earlier += 1

        self.visit(count)
        return Int(self.total(warp.sum(earlier)))

    def after(self, token: Int) -> Int:
        var logit = self.logit(token) if token >= 0 else inf[DType.float32]()
        var best = _Turn(neg_inf[DType.float32]())

        def find(
            at: Int, logits: _Turn, weights: _Turn
        ) {mut best, logit, token}:
            comptime for i in range(TURN):
                if is_after(logits[i], Int32(at + i), logit, token):
                    best[i] = max(best[i], logits[i])

        self.visit(find)
        var next = unrank(self.max(rank(best.reduce_max())))
        return self.lowest_after(next, logit, token)


@always_inline
def passing[
    width: SIMDLength
](
    masses: SIMD[DType.float32, width], before: Float64, target: Float64
) -> Tuple[Int, Float64]:
    """Add masses up until the sum, `before` at the first, passes a target: as `walk`, without a loop.
    """
    var up_to = SIMD[DType.float64, width]()
    var sum = before
    comptime for i in range(Int(width)):
        sum += Float64(masses[i])
        up_to[i] = sum
    var at = 0
    var before_it = before
    comptime for i in range(Int(width) - 1):
        # Where rounding lets none pass, it is the last with a mass: the first at the whole sum.
        if up_to[i] <= target and up_to[i] < sum:
            at = i + 1
            before_it = up_to[i]
    return (at, before_it)
