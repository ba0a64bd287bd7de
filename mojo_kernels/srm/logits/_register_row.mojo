"""A row of logits in the registers of one block of threads: `RegisterRow`.

The row is read from memory once. A warp has neighbouring tokens, its lanes taking turns with 8 each,
so that a lane reads 16 bytes of bfloat16 and a warp whole lines. Once a search has left few tokens
undecided, they are dealt to the threads anew and the looks that follow cost little. Weights are
added in float32 within a warp, in float64 across, always in the same order. Every thread calls every
method and gets the same answer; every method leaves the shared memory free for the next one.
"""

from max.gpu import WARP_SIZE, barrier, lane_id, thread_idx, warp_id
from max.gpu.memory import AddressSpace
from max.gpu.primitives import block, warp
from std.math import exp2, fma
from std.memory import stack_allocation
from std.sys._assembly import inlined_assembly
from std.utils.numerics import inf, neg_inf

from ._logit_row import (
    LogitRow,
    Tally,
    grain_of,
    is_after,
    rank,
    unrank,
)
from .._values import on_16_bytes


comptime TURN = 8
"""Neighbouring tokens of a lane."""

comptime SHORT = TURN
"""Logits to a thread in most small vocabularies."""

comptime LONG = 32
"""The most: logits and weights take 64 registers, and two blocks of 256 threads have 128 each."""


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
def add_in_warp(value: Int32) -> Int32:
    """The sum of the lanes' values, in one instruction."""
    return inlined_assembly[
        "redux.sync.add.s32 $0, $1, 0xffffffff;",
        Int32,
        constraints="=r,r",
        has_side_effect=True,
    ](value)


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


struct RegisterRow[dtype: DType, block_size: Int, share: Int](LogitRow):
    """A row of 1 up to `block_size * share` logits, `share` to a thread."""

    comptime warps = Self.block_size // WARP_SIZE
    comptime span = WARP_SIZE * Self.share
    """Tokens of a warp; and the most undecided ones that are dealt anew."""
    comptime hand = Self.span // Self.block_size
    """Of `span` values, how many a thread is dealt."""

    comptime Share = SIMD[DType.float32, Self.share]
    comptime Hand = SIMD[DType.float32, Self.hand]
    comptime Shared[type: DType] = Pointer[
        Scalar[type], MutUntrackedOrigin, address_space=AddressSpace.SHARED
    ]

    var source: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]  # [vocab]
    var vocab: Int
    var logits: Self.Share  # -inf where dropped, and past the end
    var weights: Self.Share  # 0 there
    var undecided_logits: Self.Hand  # what `tally` looks at once dealt, and -inf
    var undecided_weights: Self.Hand  # and 0
    var num_dealt: Int  # undecided tokens; 0 while none are dealt
    var above: Tally  # of tokens that every threshold asked for keeps
    var top: Float32  # the largest logit
    var warp_mass: Float32  # of the weights of this thread's warp
    var sums: Self.Shared[DType.float32]  # [warps, 2] counts and masses
    var dealt: Self.Shared[DType.float32]  # [span, 2] logits and weights
    var maxima: Self.Shared[DType.uint32]  # [warps]
    var place: Self.Shared[DType.int32]  # [1] where `draw` ends

    def __init__(
        out self,
        source: Pointer[Scalar[Self.dtype], MutUntrackedOrigin],
        vocab: Int,
    ):
        self.source = source
        self.vocab = vocab
        self.logits = neg_inf[DType.float32]()
        self.weights = 0
        self.undecided_logits = neg_inf[DType.float32]()
        self.undecided_weights = 0
        self.num_dealt = 0
        self.above = Tally(0, 0)
        self.top = 0
        self.warp_mass = 0
        self.sums = Self.allocate[DType.float32, 2 * Self.warps]()
        self.dealt = Self.allocate[DType.float32, 2 * Self.span]()
        self.maxima = Self.allocate[DType.uint32, Self.warps]()
        self.place = Self.allocate[DType.int32, 1]()

        var first = Self.first_token()
        var all_there = (warp_id() + 1) * Self.span <= vocab
        if all_there and on_16_bytes(source):
            comptime for turn in range(Self.share // TURN):
                var there = source.unsafe_load[width=TURN, alignment=16](
                    first + turn * TURN * WARP_SIZE
                ).cast[DType.float32]()
                self.logits = self.logits.insert[offset=turn * TURN](there)
        else:
            comptime for i in range(Self.share):
                if first + Self.apart(i) < vocab:
                    self.logits[i] = self.logit(first + Self.apart(i))
        self.top = unrank(self.max(rank(self.logits.reduce_max())))

    @staticmethod
    def allocate[type: DType, size: Int]() -> Self.Shared[type]:
        """Memory that the threads of a block share."""
        return stack_allocation[
            size,
            Scalar[type],
            alignment=16,
            address_space=AddressSpace.SHARED,
        ]().unsafe_origin_cast[MutUntrackedOrigin]()

    @staticmethod
    def first_token() -> Int:
        """The first of this thread's tokens; the others lie `apart` from it."""
        return warp_id() * Self.span + lane_id() * TURN

    @staticmethod
    def apart(i: Int) -> Int:
        """How far the thread's token i lies from its first."""
        return i // TURN * TURN * WARP_SIZE + i % TURN

    @staticmethod
    def tokens() -> SIMD[DType.int32, Self.share]:
        """This thread's tokens, past the end too."""
        var tokens = SIMD[DType.int32, Self.share](Int32(Self.first_token()))
        comptime for i in range(Self.share):
            tokens[i] += Int32(Self.apart(i))
        return tokens

    def max(self, value: UInt32) -> UInt32:
        """The largest of the threads' values."""
        var most = largest_in_warp(value)
        if lane_id() == 0:
            self.maxima[unsafe_offset=warp_id()] = most
        barrier()
        var maxima = self.maxima.unsafe_load[width=Self.warps, alignment=16](0)
        barrier()
        return maxima.reduce_max()

    def min(self, value: UInt32) -> UInt32:
        """The smallest of the threads' values."""
        return ~self.max(~value)

    def tally_of[
        width: SIMDLength, //, by_mass: Bool
    ](
        self,
        logits: SIMD[DType.float32, width],
        weights: SIMD[DType.float32, width],
        threshold: Float32,
    ) -> Tally:
        """Tally some of each thread's tokens."""
        # Whole numbers this small are exact in float32. Sums are split to hide latency.
        comptime LANES = min(2, Int(width))
        var count = SIMD[DType.float32, LANES](0)
        var mass = SIMD[DType.float32, LANES](0)
        comptime for i in range(Int(width)):
            var is_kept = at_least(logits[i], threshold)
            count[i % LANES] += is_kept
            comptime if by_mass:
                mass[i % LANES] = fma(is_kept, weights[i], mass[i % LANES])
        return self.total(
            Int32(count.reduce_add()),
            warp.sum(mass.reduce_add()) if by_mass else 0,
        )

    def total(self, count: Int32, mass: Float32) -> Tally:
        """Add up the threads' counts, and the masses of the warps."""
        var warp_count = Float32(add_in_warp(count))
        if lane_id() == 0:
            self.sums.unsafe_store(
                2 * warp_id(), SIMD[DType.float32, 2](warp_count, mass)
            )
        barrier()
        var sum = self.sums.unsafe_load[width=4](0)
        comptime for i in range(2, Self.warps, 2):
            sum += self.sums.unsafe_load[width=4](2 * i)
        barrier()
        return Tally(Int(sum[0] + sum[2]), Float64(sum[1] + sum[3]))

    def largest(self) -> Float32:
        return self.top

    def smallest(self) -> Float32:
        var there = self.logits.gt(neg_inf[DType.float32]())
        var least = there.select(self.logits, inf[DType.float32]()).reduce_min()
        return max(unrank(self.min(rank(least))), Float32.MIN_FINITE)

    def grain(self) -> UInt32:
        return grain_of[Self.dtype]()

    def weigh(mut self, top: Float32, scale: Float32) -> Tally:
        # 0 below 2^-126, about where `weight` ends as well.
        comptime LOG2_E = Float32(1.4426950408889634)
        self.weights = exp2(
            (self.logits - top) * min(scale * LOG2_E, Float32.MAX_FINITE)
        )
        self.warp_mass = warp.sum(self.weights.reduce_add())
        return Tally(self.vocab, self.total(0, self.warp_mass).mass)

    def keep(mut self, threshold: Float32):
        var kept = self.logits.ge(threshold)
        self.logits = kept.select(self.logits, neg_inf[DType.float32]())
        self.weights = kept.select(self.weights, 0)
        self.warp_mass = warp.sum(self.weights.reduce_add())
        self.num_dealt = 0

    def kept(self) -> Tally:
        return self.tally_of[by_mass=True](
            self.logits, self.weights, Float32.MIN_FINITE
        )

    def tally[by_mass: Bool](self, threshold: Float32) -> Tally:
        if self.num_dealt == 0:
            return self.tally_of[by_mass](self.logits, self.weights, threshold)
        var between = self.tally_of[by_mass](
            self.undecided_logits, self.undecided_weights, threshold
        )
        return Tally(
            self.above.count + between.count, self.above.mass + between.mass
        )

    def narrow[
        by_mass: Bool
    ](mut self, low: Float32, high: Float32, above: Tally, undecided: Int):
        if self.num_dealt > 0 or undecided > Self.span:
            return
        var count = Float32(0)
        comptime for i in range(Self.share):
            count += at_least(self.logits[i], low)
            count -= at_least(self.logits[i], high)
        var at = block.prefix_sum[exclusive=True, block_size=Self.block_size](
            Int32(count)
        )
        comptime for i in range(Self.hand):
            self.dealt.unsafe_store(
                2 * (thread_idx.x + i * Self.block_size),
                SIMD[DType.float32, 2](neg_inf[DType.float32](), 0),
            )
        barrier()
        comptime for i in range(Self.share):
            if self.logits[i] >= low and self.logits[i] < high:
                self.dealt.unsafe_store(
                    Int(2 * at),
                    SIMD[DType.float32, 2](self.logits[i], self.weights[i]),
                )
                at += 1
        barrier()
        comptime for i in range(Self.hand):
            var token = self.dealt.unsafe_load[width=2](
                2 * (thread_idx.x + i * Self.block_size)
            )
            self.undecided_logits[i] = token[0]
            self.undecided_weights[i] = token[1]
        barrier()
        self.num_dealt = undecided
        self.above = above

    def first(self, logit: Float32) -> Int:
        return self.lowest(self.logits.eq(logit))

    def lowest(self, among: SIMD[DType.bool, Self.share]) -> Int:
        """The lowest token among some of each thread's."""
        var tokens = among.select(Self.tokens(), Int32.MAX)
        return Int(self.min(UInt32(tokens.reduce_min())))

    def draw(self, u: Float64) -> Int:
        # The warp whose tokens hold the target, of these the lanes' turn, of that the lane.
        if lane_id() == 0:
            self.sums[unsafe_offset=warp_id()] = self.warp_mass
        barrier()
        var masses = self.sums.unsafe_load[width=Self.warps, alignment=16](0)
        var total = Float64(0)
        comptime for i in range(Self.warps):
            total += Float64(masses[i])
        var chosen, before = passing(masses, 0, u * total)
        if warp_id() == chosen:
            self.draw_in_warp(before, u * total)
        barrier()
        var place = Int(self.place[unsafe_offset=0])
        barrier()
        return chosen * Self.span + place

    def draw_in_warp(self, before_warp: Float64, target: Float64):
        """Leave in `place` which of the warp's tokens passes the target."""
        comptime TURNS = Self.share // TURN
        var of_turns = SIMD[DType.float32, TURNS]()
        comptime for i in range(TURNS):
            of_turns[i] = warp.sum(
                self.weights.slice[TURN, offset=i * TURN]().reduce_add()
            )
        var turn, before_turn = passing(of_turns, before_warp, target)
        var weights = SIMD[DType.float32, TURN]()
        comptime for i in range(TURNS):
            if i == turn:
                weights = self.weights.slice[TURN, offset=i * TURN]()
        var mass = Float64(0)
        comptime for i in range(TURN):
            mass += Float64(weights[i])
        var before = before_turn + warp.prefix_sum[exclusive=True](mass)
        # The first lane that passes the target; where rounding lets none, the last with a weight.
        var lane = UInt32(lane_id())
        var order = UInt32(0)
        if mass > 0:
            order = (
                UInt32(3 * WARP_SIZE) - lane if before + mass
                > target else 1 + lane
            )
        if order == largest_in_warp(order):
            var token, _ = passing(weights, before, target)
            self.place[unsafe_offset=0] = Int32(
                turn * TURN * WARP_SIZE + Int(lane) * TURN + token
            )

    def logit(self, token: Int) -> Float32:
        return self.source[unsafe_offset=token].cast[DType.float32]()

    def before(self, token: Int) -> Int:
        # What lies past the end is after every token: -inf, and higher.
        var later = is_after(
            self.logits, Self.tokens(), self.logit(token), token
        )
        var count = later.cast[DType.int32]().reduce_add()
        comptime capacity = Self.block_size * Self.share
        return capacity - 1 - self.total(count, 0).count

    def after(self, token: Int) -> Int:
        var logit = self.logit(token) if token >= 0 else inf[DType.float32]()
        var later = is_after(self.logits, Self.tokens(), logit, token)
        var best = later.select(self.logits, neg_inf[DType.float32]())
        var next = unrank(self.max(rank(best.reduce_max())))
        return self.lowest(later & self.logits.eq(next))
