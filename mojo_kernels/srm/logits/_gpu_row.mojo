"""A row of logits on one block of threads: `GPURow`.

A warp has neighbouring tokens, its lanes taking turns with 8 each, so that a lane reads 16 bytes of
bfloat16 and a warp whole lines. A short row is read from memory once and held in registers; a longer
one is read and weighed again by every pass. Sums are float32 within a warp (within a thread of a
long row float64), in one order whatever the other rows. Every thread calls every method and gets the
same answer; every method leaves the shared memory free for the next one.
"""

from max.gpu import WARP_SIZE, barrier, lane_id, thread_idx, warp_id
from max.gpu.primitives import warp
from std.math import ceildiv, exp2, fma
from std.utils.numerics import inf, neg_inf

from ._gpu_block import (
    BLOCK,
    WARPS,
    Block,
    Shared,
    at_least,
    largest_in_warp,
    log_of,
    shared,
)
from ._gpu_edge import Bins, Edge, order
from ._gpu_few import FEW, Few, store_if
from ._logit_row import (
    LogitRow,
    floor_of,
    in_powers_of_2,
    is_after,
    rank,
    uniform,
    unrank,
)
from .._values import Values, on_16_bytes

comptime TURN = 8
"""Neighbouring tokens of a lane."""

comptime SHORT = TURN
"""Logits to a thread in most small vocabularies."""

comptime LONG = 32
"""The most that are held: logits and weights take 64 registers, and two blocks have 128 each."""

comptime _Sum = Int
"""What is added up of tokens: one of these."""
comptime _COUNT: _Sum = 0
comptime _MASS: _Sum = 1
comptime _PEAKS: _Sum = 2
"""The number of threads' largest logits, in place of all."""

comptime _Turn = SIMD[DType.float32, TURN]


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
    var peak: Float32  # this thread's largest logit
    var top: Float32  # the largest of all
    var scale: Float32  # of logits, in powers of 2
    var threshold: Float32  # the smallest logit kept
    var warp_mass: Float32  # of the kept tokens of this thread's warp
    var block: Block
    var bins: Bins
    var few: Few
    var question: Shared[DType.float32]  # [4] what `Edge` asks
    var bounds: Shared[DType.float64]  # [2] of the chosen warp's `draw`
    var place: Shared[DType.int32]  # [2] the warp and the token chosen

    def __init__(out self, source: Values[Self.dtype], vocab: Int):
        self.source = source
        self.vocab = vocab
        self.turns = ceildiv(vocab, BLOCK * TURN)
        self.logits = neg_inf[DType.float32]()
        self.weights = 0
        self.peak = 0
        self.top = 0
        self.scale = 1
        self.threshold = neg_inf[DType.float32]()
        self.warp_mass = 0
        self.block = Block()
        self.bins = Bins()
        self.few = Few()
        self.question = shared[DType.float32, 4]()
        self.bounds = shared[DType.float64, 2]()
        self.place = shared[DType.int32, 2]()

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
        self.peak = best.reduce_max()
        self.top = unrank(self.block.max(rank(self.peak)))

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

    def in_lane[of: _Sum](self, threshold: Float32) -> Float32:
        """The sum of those of this thread's tokens that a threshold keeps."""
        comptime if of == _PEAKS:
            return at_least(self.peak, threshold)
        var sum = SIMD[Self.Sum, 1](0)

        def add(token: Int, logits: _Turn, weights: _Turn) {mut sum, threshold}:
            var part = SIMD[DType.float32, 2](0)
            comptime for i in range(TURN):
                var kept = at_least(logits[i], threshold)
                comptime if of == _MASS:
                    part[i % 2] = fma(kept, weights[i], part[i % 2])
                else:
                    part[i % 2] += kept
            sum += part.reduce_add().cast[Self.Sum]()

        self.visit(add)
        return sum[0].cast[DType.float32]()

    def in_warp[of: _Sum](self, threshold: Float32) -> Float32:
        """The sum of those of the warp's tokens that a threshold keeps."""
        return warp.sum(self.in_lane[of](threshold))

    def largest(self) -> Float32:
        return self.top

    def weigh(mut self, top: Float32, scale: Float32) -> Float64:
        self.scale = in_powers_of_2(scale)
        comptime if Self.is_held:
            self.weights = self.weigh_some(self.logits)
            self.warp_mass = warp.sum(self.weights.reduce_add())
        else:
            self.warp_mass = self.in_warp[_MASS](self.threshold)
        return Float64(self.block.total(self.warp_mass))

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
        var count = self.vocab
        if top_k > 0:
            # As many threads have a token so large: if likely ones lie anywhere, not many more are.
            if top_k <= BLOCK // 2:
                self.raise_threshold[_PEAKS](
                    unrank(self.block.min(rank(self.peak))), Float32(top_k)
                )
            count = self.truncate_few(top_k, top_p)
            if count <= FEW:
                return
        if 0 < top_k < count:
            self.raise_threshold[_COUNT](self.smallest(), Float32(top_k))
        if top_p < 1:
            var kept = Float32(mass)
            if top_k > 0 or min_p > 0:
                kept = self.block.total(self.in_warp[_MASS](self.threshold))
            self.raise_threshold[_MASS](
                self.below_top_p(temperature, top_p, kept), top_p * kept
            )
        self.warp_mass = self.in_warp[_MASS](self.threshold)

    def truncate_few(mut self, top_k: Int, top_p: Float32) -> Int:
        """Count the tokens kept, and if they are few, drop those that top_k and top_p do not keep.
        """
        self.few.clear()
        var own = self.in_lane[_COUNT](self.threshold)
        var in_warp = warp.sum(own)
        var count, before = self.block.total_and_before(in_warp)
        if count <= Float32(FEW):
            self.gather(Int(before + warp.prefix_sum[exclusive=True](own)))
            self.threshold = self.few.edge(self.block, Int(count), top_k, top_p)
            self.warp_mass = self.few.mass(
                Int(before), Int(before + in_warp), self.threshold
            )
        return Int(count)

    def below_top_p(
        self, temperature: Float32, top_p: Float32, kept: Float32
    ) -> Float32:
        """A logit below the edge of top_p, `kept` being what the tokens weigh of which it is one.
        """
        # If all that is below weighed so much each, it would be little enough to drop.
        var least = 0.9 * (1 - top_p) * kept / Float32(self.vocab)
        var low = self.top + temperature * log_of(least)
        low -= abs(self.top) * Float32(2.4e-7)  # which rounding may have added
        # Where many are as likely as the top, the smallest is a better one.
        if kept > 0.1 * Float32(self.vocab):
            low = max(low, self.smallest())
        return low

    def smallest(self) -> Float32:
        """The smallest logit."""
        var least = _Turn(inf[DType.float32]())

        def find_least(token: Int, logits: _Turn, weights: _Turn) {mut least}:
            least = min(least, logits)

        self.visit(find_least)
        return unrank(self.block.min(rank(least.reduce_min())))

    def gather(self, before: Int):
        """Put the tokens kept into `few`, `before` being those of the threads before this one.
        """
        var threshold = self.threshold
        var address = UInt32(Int(self.few.logits.unsafe_offset(before)))

        def store(
            token: Int, logits: _Turn, weights: _Turn
        ) {mut address, threshold}:
            comptime for i in range(TURN):
                store_if(logits[i] >= threshold, logits[i], address)

        self.visit(store)
        barrier()
        if thread_idx.x < FEW:
            self.few.weights[unsafe_offset=thread_idx.x] = self.weigh_some(
                self.few.logits[unsafe_offset=thread_idx.x]
            )
        barrier()

    def raise_threshold[of: _Sum](mut self, low: Float32, target: Float32):
        """Raise the threshold as far as it still keeps a sum; to `low` it does.

        The first warp alone thinks, to save the others the instructions.
        """
        var edge = Edge(
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
            if asked[0] == Edge.FOUND:
                self.threshold = asked[1]
                barrier()
                return
            if asked[0] == Edge.BINS:
                self.fill_bins[of](asked[1], asked[2])
                if warp_id() == 0:
                    edge.answer_bins[Self.step](
                        self.bins.from_each_up(), target
                    )
            else:
                var kept = self.block.total(self.in_warp[of](asked[1]))
                edge.answer(kept >= target)

    def fill_bins[of: _Sum](self, scale: Float32, start: Float32):
        """Leave in `bins` the sums of the tokens in each."""
        self.bins.clear()

        def add(token: Int, logits: _Turn, weights: _Turn) {self, scale, start}:
            self.bins.add(logits, weights if of == _MASS else 1, scale, start)

        comptime if of == _PEAKS:
            self.bins.add[1](self.peak, 1, scale, start)
        else:
            self.visit(add)
        self.bins.add_up()

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
        return Int(self.block.min(UInt32(lowest)))

    def count_from(self, threshold: Float32) -> Int:
        return Int(self.block.total(self.in_warp[_COUNT](threshold)))

    def mass_from(self, threshold: Float32) -> Float64:
        return Float64(self.block.total(self.in_warp[_MASS](threshold)))

    def draw(self, seed: UInt64, position: Int, round: Int) -> Int:
        # The warp whose tokens hold the target, of these the lanes' turn, of that the lane.
        if lane_id() == 0:
            self.block.sums[unsafe_offset=warp_id()] = self.warp_mass
        barrier()
        if warp_id() == 0:
            var masses = self.block.sums.unsafe_load[width=WARPS, alignment=16](
                0
            )
            var all = masses.cast[DType.float64]().reduce_add()
            var target = uniform(seed, position, round) * all
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
        return Int(self.block.total(warp.sum(earlier)))

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
        var next = unrank(self.block.max(rank(best.reduce_max())))
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
