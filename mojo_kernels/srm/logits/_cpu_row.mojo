"""A row of logits on one core, vectors running along it: `CPURow`.

Logits and weights live in scratch memory, padded to whole chunks, in the order of their tokens;
`keep` moves what is left together, `narrow` copies what a search has not decided yet. Weights are
added in float32 within a chunk, in float64 across.
"""

from std.bit import pop_count
from std.math import align_up, iota
from std.memory import pack_bits
from std.memory.alloc import unsafe_alloc
from std.sys import simd_width_of
from std.sys.intrinsics import compressed_store
from std.utils.numerics import inf, neg_inf

from ._logit_row import (
    LogitRow,
    floor_of,
    is_after,
    rank,
    uniform,
    unrank,
    walk,
    weight,
)

comptime CHUNK = 256
comptime WIDTH = simd_width_of[DType.float32]()
comptime VECTOR = 4 * WIDTH  # several registers, to hide latency; divides CHUNK


comptime _LOOKS_BY_VALUE = 16
"""Thresholds tried half way between two logits: that halves a bell's tail soon, but takes long
between numbers of any size. Those after them halve the float's integer image."""


@fieldwise_init
struct Tally(TrivialRegisterPassable):
    """What a threshold keeps: how many tokens, and the sum of their weights."""

    var count: Int
    var mass: Float64


struct CPURow[dtype: DType](LogitRow):
    """To be `load`ed before use; one object serves many rows of the same length.
    """

    var source: Pointer[
        Scalar[Self.dtype], MutUntrackedOrigin
    ]  # [vocab] the row loaded
    var logits: Pointer[
        Float32, MutUntrackedOrigin
    ]  # [size] those kept, then -inf
    var weights: Pointer[Float32, MutUntrackedOrigin]  # [size], then 0
    var tokens: Pointer[
        Int32, MutUntrackedOrigin
    ]  # [size] whose they are, unless all are kept
    var masses: Pointer[
        Float64, MutUntrackedOrigin
    ]  # sum of the weights of each chunk
    var undecided_logits: Pointer[
        Float32, MutUntrackedOrigin
    ]  # [undecided] what `tally` looks at, then -inf
    var undecided_weights: Pointer[
        Float32, MutUntrackedOrigin
    ]  # [undecided], then 0; or `weights`
    var logits_copy: Pointer[Float32, MutUntrackedOrigin]  # for `narrow`
    var weights_copy: Pointer[Float32, MutUntrackedOrigin]
    var vocab: Int
    var size: Int
    var undecided: Int
    var mass: Float64  # the sum of `masses`
    var above: Tally  # of tokens that every threshold asked for keeps
    var top: Float32  # the largest logit
    var least: Float32  # the smallest that is finite, or smaller

    def __init__(
        out self,
        source: Pointer[Scalar[Self.dtype], MutUntrackedOrigin],
        vocab: Int,
    ):
        var padded = align_up(vocab, CHUNK)
        self.source = source
        self.logits = unsafe_alloc[Float32](padded)
        self.weights = unsafe_alloc[Float32](padded)
        self.tokens = unsafe_alloc[Int32](padded)
        self.masses = unsafe_alloc[Float64](padded // CHUNK)
        self.logits_copy = unsafe_alloc[Float32](padded)
        self.weights_copy = unsafe_alloc[Float32](padded)
        self.undecided_logits = self.logits
        self.undecided_weights = self.weights
        self.vocab = vocab
        self.size = vocab
        self.undecided = vocab
        self.mass = 0
        self.above = Tally(0, 0)
        self.top = 0
        self.least = 0

    def __deinit__(deinit self):
        self.logits.unsafe_free()
        self.weights.unsafe_free()
        self.tokens.unsafe_free()
        self.masses.unsafe_free()
        self.logits_copy.unsafe_free()
        self.weights_copy.unsafe_free()

    def load(mut self, source: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]):
        """Take a row up."""
        self.source = source
        self.size = self.vocab
        self.search_all()
        var best = SIMD[DType.uint32, WIDTH](0)
        var least = SIMD[DType.uint32, WIDTH](UInt32.MAX)
        var whole = self.vocab // WIDTH * WIDTH
        for i in range(0, whole, WIDTH):
            var logits = source.unsafe_load[width=WIDTH](i).cast[
                DType.float32
            ]()
            best = max(best, rank(logits))
            least = min(least, rank(logits))
            self.logits.unsafe_store(i, logits)
        var best_left = UInt32(0)
        var least_left = UInt32.MAX
        for i in range(whole, self.vocab):
            best_left = max(best_left, rank(self.logit(i)))
            least_left = min(least_left, rank(self.logit(i)))
            self.logits[unsafe_offset=i] = self.logit(i)
        for i in range(self.vocab, self.padded()):
            self.logits[unsafe_offset=i] = neg_inf[DType.float32]()
        self.top = unrank(max(best.reduce_max(), best_left))
        self.least = max(
            unrank(min(least.reduce_min(), least_left)), Float32.MIN_FINITE
        )

    def padded(self) -> Int:
        """The length of `logits` and `weights`."""
        return align_up(self.size, CHUNK)

    def largest(self) -> Float32:
        return self.top

    def weigh(mut self, top: Float32, scale: Float32) -> Float64:
        for i in range(0, self.padded(), VECTOR):
            var logits = self.logits.unsafe_load[width=VECTOR](i)
            self.weights.unsafe_store(i, weight(logits, top, scale))
        self.add_up()
        return self.mass

    def add_up(mut self):
        """Set `masses` and `mass` from `weights`."""
        var total = Float64(0)
        for chunk in range(self.padded() // CHUNK):
            var sum = SIMD[DType.float32, VECTOR](0)
            for i in range(chunk * CHUNK, (chunk + 1) * CHUNK, VECTOR):
                sum += self.weights.unsafe_load[width=VECTOR](i)
            var mass = Float64(sum.reduce_add())
            self.masses[unsafe_offset=chunk] = mass
            total += mass
        self.mass = total

    def truncate(
        mut self,
        mass: Float64,
        temperature: Float32,
        top_k: Int,
        top_p: Float32,
        min_p: Float32,
    ):
        var low = max(self.top + temperature * floor_of(min_p), self.least)
        if min_p > 0:
            self.keep(low)
        if 0 < top_k < self.size:
            low = self.smallest_set[by_mass=False](low, Float64(top_k))
            self.keep(low)
        if top_p < 1:
            low = self.smallest_set[by_mass=True](
                low, Float64(top_p) * self.mass
            )
            self.keep(low)

    def smallest_set[
        by_mass: Bool
    ](mut self, low: Float32, target: Float64) -> Float32:
        """The largest threshold, `low` or above, that still keeps the `target`.

        `by_mass` is how top_p is found: the target is a mass of probability. Without it the target
        is a count of tokens, which is how top_k is found. `low` keeps enough.
        """
        # All 0 in the last bits of a bfloat16's rank, or below zero all 1: a multiple lies between
        # any two of different value.
        comptime grain = UInt32(1) << 16 if Self.dtype == DType.bfloat16 else 1
        var threshold = low
        # In grains: thresholds between the two are left to try.
        var enough = rank(low) // grain
        var too_few = (rank(self.top) + grain) // grain
        var kept_enough = self.size
        var kept_too_few = Tally(0, 0)
        var looks = 0
        # When a single token lies between the two, it is the last one needed, wherever exactly it lies.
        while too_few - enough > 1 and kept_enough - kept_too_few.count > 1:
            var middle = _between(
                enough, too_few, grain, looks < _LOOKS_BY_VALUE
            )
            var kept = self.tally[by_mass](unrank(middle * grain))
            if (kept.mass if by_mass else Float64(kept.count)) >= target:
                enough = middle
                threshold = unrank(middle * grain)
                kept_enough = kept.count
            else:
                too_few = middle
                kept_too_few = kept
            self.narrow[by_mass](
                threshold,
                unrank(too_few * grain),
                kept_too_few,
                kept_enough - kept_too_few.count,
            )
            looks += 1
        return threshold

    def keep(mut self, threshold: Float32):
        """Drop the tokens below a finite threshold."""
        var all_kept = self.size == self.vocab
        var size = 0
        for i in range(0, self.padded(), WIDTH):
            var logits = self.logits.unsafe_load[width=WIDTH](i)
            var weights = self.weights.unsafe_load[width=WIDTH](i)
            var tokens = iota[DType.int32, WIDTH](Int32(i))
            if not all_kept:
                tokens = self.tokens.unsafe_load[width=WIDTH](i)
            var kept = logits.ge(threshold)
            if not kept.reduce_or():
                continue
            compressed_store(logits, self.logits.unsafe_offset(size), kept)
            compressed_store(weights, self.weights.unsafe_offset(size), kept)
            compressed_store(tokens, self.tokens.unsafe_offset(size), kept)
            size += Int(pop_count(pack_bits(kept)))
        self.size = size
        for i in range(size, self.padded()):
            self.logits[unsafe_offset=i] = neg_inf[DType.float32]()
            self.weights[unsafe_offset=i] = 0
        self.search_all()
        self.add_up()

    def search_all(mut self):
        """Let `tally` look at all that is kept."""
        self.undecided_logits = self.logits
        self.undecided_weights = self.weights
        self.undecided = self.size
        self.above = Tally(0, 0)

    def narrow[
        by_mass: Bool
    ](mut self, low: Float32, high: Float32, above: Tally, undecided: Int):
        """Let `tally` answer only between two thresholds, faster, until `keep`.

        `above` is what `high` keeps; `low` keeps at most `undecided` more.
        """
        if max(CHUNK, 2 * undecided) > self.undecided:
            return  # it would cost more than it saves
        var size = 0
        for i in range(0, align_up(self.undecided, CHUNK), WIDTH):
            var logits = self.undecided_logits.unsafe_load[width=WIDTH](i)
            var between = logits.ge(low) & logits.lt(high)
            compressed_store(
                logits, self.logits_copy.unsafe_offset(size), between
            )
            comptime if by_mass:
                compressed_store(
                    self.undecided_weights.unsafe_load[width=WIDTH](i),
                    self.weights_copy.unsafe_offset(size),
                    between,
                )
            size += Int(pop_count(pack_bits(between)))
        for i in range(size, align_up(size, CHUNK)):
            self.logits_copy[unsafe_offset=i] = neg_inf[DType.float32]()
            self.weights_copy[unsafe_offset=i] = 0
        self.undecided_logits = self.logits_copy
        self.undecided_weights = self.weights_copy
        self.undecided = size
        self.above = above

    def tally[by_mass: Bool](self, threshold: Float32) -> Tally:
        """Say what a finite threshold would keep; without `by_mass`, of mass 0.
        """
        var count = SIMD[DType.int32, VECTOR](0)
        var mass = Float64(0)
        for chunk in range(0, align_up(self.undecided, CHUNK), CHUNK):
            var sum = SIMD[DType.float32, VECTOR](0)
            for i in range(chunk, chunk + CHUNK, VECTOR):
                var kept = self.undecided_logits.unsafe_load[width=VECTOR](
                    i
                ).ge(threshold)
                count += kept.cast[DType.int32]()
                comptime if by_mass:
                    sum += kept.select(
                        self.undecided_weights.unsafe_load[width=VECTOR](i), 0
                    )
            comptime if by_mass:
                mass += Float64(sum.reduce_add())
        return Tally(
            self.above.count + Int(count.reduce_add()), self.above.mass + mass
        )

    def first(self, logit: Float32) -> Int:
        var i = 0
        while (
            not self.logits.unsafe_load[width=VECTOR](i).eq(logit).reduce_or()
        ):
            i += VECTOR
        while self.logits[unsafe_offset=i] != logit:
            i += 1
        return i

    def count_from(self, threshold: Float32) -> Int:
        return self.tally[by_mass=False](threshold).count

    def mass_from(self, threshold: Float32) -> Float64:
        return self.tally[by_mass=True](threshold).mass

    def draw(self, seed: UInt64, position: Int, round: Int) -> Int:
        def mass_of(chunk: Int) {imm} -> Float64:
            return self.masses[unsafe_offset=chunk]

        def weight_of(i: Int) {imm} -> Float64:
            return Float64(self.weights[unsafe_offset=i])

        var chunks = self.padded() // CHUNK
        var target = uniform(seed, position, round) * self.mass
        var chunk, before = walk(mass_of, 0, chunks, 0, target)
        var i, _ = walk(
            weight_of, chunk * CHUNK, (chunk + 1) * CHUNK, before, target
        )
        return i if self.size == self.vocab else Int(
            self.tokens[unsafe_offset=i]
        )

    def logit(self, token: Int) -> Float32:
        return self.source[unsafe_offset=token].cast[DType.float32]()

    def before(self, token: Int) -> Int:
        # The padding is after every token: -inf, and higher.
        var logit = self.logit(token)
        var later = SIMD[DType.int32, VECTOR](0)
        for i in range(0, self.padded(), VECTOR):
            later += self.after_in(i, logit, token).cast[DType.int32]()
        return self.padded() - 1 - Int(later.reduce_add())

    def after(self, token: Int) -> Int:
        var logit = self.logit(token) if token >= 0 else inf[DType.float32]()
        var best = SIMD[DType.float32, VECTOR](neg_inf[DType.float32]())
        for i in range(0, self.padded(), VECTOR):
            best = max(
                best,
                self.after_in(i, logit, token).select(
                    self.logits.unsafe_load[width=VECTOR](i),
                    neg_inf[DType.float32](),
                ),
            )
        var next = best.reduce_max()
        var i = token + 1 if next == logit else 0
        while self.logits[unsafe_offset=i] != next:
            i += 1
        return i

    @always_inline
    def after_in(
        self, begin: Int, logit: Float32, token: Int
    ) -> SIMD[DType.bool, VECTOR]:
        """Which tokens of a vector come after one, all being kept."""
        return is_after(
            self.logits.unsafe_load[width=VECTOR](begin),
            iota[DType.int32, VECTOR](Int32(begin)),
            logit,
            token,
        )


def _between(
    low: UInt32, high: UInt32, grain: UInt32, by_value: Bool
) -> UInt32:
    """A rank between two that are not neighbours, all in grains: half way by value or by rank.
    """
    if not by_value:
        return low + (high - low) // 2
    var half = unrank(low * grain) / 2 + unrank(high * grain) / 2
    return min(max(rank(half) // grain, low + 1), high - 1)
