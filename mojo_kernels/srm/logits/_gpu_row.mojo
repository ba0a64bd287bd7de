"""A row of logits of any length on one block of threads: `GPURow`.

For rows too long for `RegisterRow`. Nothing is kept: every pass reads the logits again, neighbouring threads neighbouring tokens, and
computes weights anew. Every thread calls every method and gets the same answer.
"""

from max.gpu import barrier, thread_idx
from max.gpu.primitives import block
from std.math import ceildiv
from std.utils.numerics import inf, neg_inf

from ._logit_row import (
    LogitRow,
    Tally,
    grain_of,
    is_after,
    rank,
    unrank,
    walk,
    weight,
)


struct GPURow[dtype: DType, block_size: Int](LogitRow):
    """A row of `vocab` logits."""

    var source: Pointer[Scalar[Self.dtype], MutUntrackedOrigin]  # [vocab]
    var vocab: Int
    var top: Float32
    var scale: Float32
    var threshold: Float32  # the smallest logit kept

    def __init__(
        out self,
        source: Pointer[Scalar[Self.dtype], MutUntrackedOrigin],
        vocab: Int,
    ):
        self.source = source
        self.vocab = vocab
        self.top = 0
        self.scale = 1
        self.threshold = neg_inf[DType.float32]()

    @staticmethod
    def sum[type: DType, //](value: Scalar[type]) -> Scalar[type]:
        """Add the threads' values up."""
        var result = block.sum[block_size=Self.block_size](value)
        barrier()  # the next reduction may use the same shared memory
        return result

    @staticmethod
    def max[type: DType, //](value: Scalar[type]) -> Scalar[type]:
        """The largest of the threads' values."""
        var result = block.max[block_size=Self.block_size](value)
        barrier()  # the next reduction may use the same shared memory
        return result

    @staticmethod
    def min(value: Int32) -> Int32:
        """The smallest of the threads' values, of which none is the very smallest integer.
        """
        return -Self.max(-value)

    def weight_of(self, token: Int) -> Float64:
        """The weight of a token, 0 if it is not kept."""
        var logit = self.logit(token)
        if logit < self.threshold:
            return 0
        return Float64(weight(logit, self.top, self.scale))

    def largest(self) -> Float32:
        var best = UInt32(0)
        for i in range(thread_idx.x, self.vocab, Self.block_size):
            best = max(best, rank(self.logit(i)))
        return unrank(Self.max(best))

    def smallest(self) -> Float32:
        return Float32.MIN_FINITE

    def grain(self) -> UInt32:
        return grain_of[Self.dtype]()

    def weigh(mut self, top: Float32, scale: Float32) -> Tally:
        self.top = top
        self.scale = scale
        return self.tally[by_mass=True](self.threshold)

    def keep(mut self, threshold: Float32):
        self.threshold = threshold

    def kept(self) -> Tally:
        return self.tally[by_mass=True](self.threshold)

    def tally[by_mass: Bool](self, threshold: Float32) -> Tally:
        var count = Int32(0)
        var mass = Float64(0)
        for i in range(thread_idx.x, self.vocab, Self.block_size):
            var logit = self.logit(i)
            if logit >= threshold:
                count += 1
                comptime if by_mass:
                    mass += Float64(weight(logit, self.top, self.scale))
        comptime if by_mass:
            mass = Self.sum(mass)
        return Tally(Int(Self.sum(count)), mass)

    def narrow[
        by_mass: Bool
    ](mut self, low: Float32, high: Float32, above: Tally, undecided: Int):
        pass  # there is no memory to put the undecided in

    def first(self, logit: Float32) -> Int:
        var lowest = self.vocab
        for i in range(thread_idx.x, self.vocab, Self.block_size):
            if self.logit(i) == logit:
                lowest = min(lowest, i)
        return Int(Self.min(Int32(lowest)))

    def draw(self, u: Float64) -> Int:
        # Each thread adds up a run of neighbouring tokens; the one whose run holds the target walks
        # it again.
        var run = ceildiv(self.vocab, Self.block_size)
        var begin = min(thread_idx.x * run, self.vocab)
        var end = min(begin + run, self.vocab)
        var mass = Float64(0)
        for i in range(begin, end):
            mass += self.weight_of(i)
        var up_to = block.prefix_sum[block_size=Self.block_size](mass)
        barrier()  # the next reduction may use the same shared memory
        var target = u * Self.max(up_to)

        comptime NOBODY = Int32(Self.block_size)
        var thread = Int32(thread_idx.x)
        var owner = Self.min(thread if mass > 0 and up_to > target else NOBODY)
        if (
            owner == NOBODY
        ):  # by rounding: then it is the last one with a weight above 0
            owner = Self.max(thread if mass > 0 else Int32(-1))

        def weight_of(i: Int) {imm} -> Float64:
            return self.weight_of(i)

        var token = Int32(-1)
        if thread == owner:
            token = Int32(walk(weight_of, begin, end, up_to - mass, target)[0])
        return Int(Self.max(token))

    def logit(self, token: Int) -> Float32:
        return self.source[unsafe_offset=token].cast[DType.float32]()

    def before(self, token: Int) -> Int:
        var logit = self.logit(token)
        var later = Int32(0)
        for i in range(thread_idx.x, self.vocab, Self.block_size):
            if is_after(self.logit(i), Int32(i), logit, token):
                later += 1
        return self.vocab - 1 - Int(Self.sum(later))

    def after(self, token: Int) -> Int:
        var logit = self.logit(token) if token >= 0 else inf[DType.float32]()
        var best = UInt32(0)
        for i in range(thread_idx.x, self.vocab, Self.block_size):
            if is_after(self.logit(i), Int32(i), logit, token):
                best = max(best, rank(self.logit(i)))
        var next = unrank(Self.max(best))
        var lowest = self.vocab
        for i in range(thread_idx.x, self.vocab, Self.block_size):
            if self.logit(i) == next and is_after(next, Int32(i), logit, token):
                lowest = min(lowest, i)
        return Int(Self.min(Int32(lowest)))
