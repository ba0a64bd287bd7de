"""A row of logits, as sampler and scores see it: what they need summed over the vocabulary.

A token weighs exp((logit - top) * scale), `top` being the largest logit, so the heaviest weighs 1;
below e^-87, where float32's normal range ends, it weighs nothing. Sums of many weights are float64.
`CPURow` is a row on a core, `GPURow` one on a block of threads.
"""

from std.math import exp, log
from std.memory import bitcast
from std.random.philox import Random
from std.sys.info import is_gpu
from std.utils.numerics import isnan, nan

comptime ROUNDS = 8
"""The most draws by rejection, before what is kept is searched for."""

comptime LEAST_TOP_P = Float32(1.2e-38)
"""As which 0 counts: of that share too the likeliest are kept, since nothing is above them."""

comptime FLOOR = Float32(-87)
"""Log of the smallest weight that counts."""


trait LogitRow:
    """Sums over a row of logits."""

    def largest(self) -> Float32:
        """The largest logit; where one is NaN, that or NaN."""
        ...

    def weigh(mut self, top: Float32, scale: Float32) -> Float64:
        """Weigh all tokens, `scale` being the inverse temperature, and add the weights up; NaN where
        `largest` hid one.
        """
        ...

    def truncate(
        mut self,
        mass: Float64,
        temperature: Float32,
        top_k: Int,
        top_p: Float32,
        min_p: Float32,
    ):
        """Drop the tokens that may not be drawn, `mass` being what all weigh.
        """
        ...

    def first(self, logit: Float32) -> Int:
        """Find the lowest token with a logit, of which there is one."""
        ...

    def count_from(self, threshold: Float32) -> Int:
        """Count the tokens with a logit of at least that; before `truncate`."""
        ...

    def mass_from(self, threshold: Float32) -> Float64:
        """Add up what they weigh."""
        ...

    def draw(self, seed: UInt64, position: Int, round: Int) -> Int:
        """Find the token where the running sum of the weights left passes a share of it, `uniform`.
        """
        ...

    def logit(self, token: Int) -> Float32:
        """The logit of a token."""
        ...

    def before(self, token: Int) -> Int:
        """Count the tokens with a larger logit, and the lower ones with an equal one.
        """
        ...

    def after(self, token: Int) -> Int:
        """Find the next token in this order, of which there is one; after -1 the first.
        """
        ...


def uniform(seed: UInt64, position: Int, round: Int) -> Float64:
    """A number in [0, 1), the same for the same arguments on every device."""
    var generator = Random(
        seed=seed, subsequence=UInt64(round), offset=UInt64(position)
    )
    var bits = generator.step().cast[DType.uint64]()
    comptime STEP = Float64(1) / Float64(1 << 53)
    return Float64((bits[0] >> 5) << 26 | bits[1] >> 6) * STEP


@always_inline
def floor_of(min_p: Float32) -> Float32:
    """Log of the smallest weight, the largest being 1, that may be drawn."""
    # Tokens without weight could not be drawn: no threshold need be lower than them.
    return max(FLOOR, log(min_p)) if min_p > 0 else FLOOR


@always_inline
def next_above(logit: Float32) -> Float32:
    """The next larger float; of both zeros the same, and on a CPU of all that it compares as 0.
    """
    comptime LEAST = Float32(1.4e-45 if is_gpu() else 1.1754944e-38)
    return LEAST if abs(logit) < LEAST else unrank(rank(logit) + 1)


@always_inline
def is_after[
    width: SIMDLength
](
    logits: SIMD[DType.float32, width],
    tokens: SIMD[DType.int32, width],
    logit: Float32,
    token: Int,
) -> SIMD[DType.bool, width]:
    """Which tokens come later than one: smaller logits, and equal ones of higher tokens.
    """
    return logits.lt(logit) | (logits.eq(logit) & tokens.gt(Int32(token)))


@always_inline
def inverse(temperature: Float32) -> Float32:
    """The scale of logits; temperature 0 is greedy and its probabilities those of 1.
    """
    # That of a tiny temperature must stay finite, for the top token's own 0 * scale.
    return Float32(1) if temperature == 0 else min(
        1 / temperature, Float32.MAX_FINITE
    )


@always_inline
def in_powers_of_2(scale: Float32) -> Float32:
    """What logits are multiplied with as exponents of 2, `scale` as those of e.
    """
    comptime LOG2_E = Float32(1.4426950408889634)
    return min(scale * LOG2_E, Float32.MAX_FINITE)


@always_inline
def logprob_of(
    logit: Float32, top: Float32, scale: Float32, mass: Float64
) -> Float32:
    """The log-probability, `mass` being the sum of the weights of all tokens.
    """
    return (logit - top) * scale - log(Float32(mass))


@always_inline
def rank[
    width: SIMDLength
](value: SIMD[DType.float32, width]) -> SIMD[DType.uint32, width]:
    """Map floats to integers of the same order, NaN above infinity."""
    var bits = bitcast[DType.int32](
        isnan(value).select(nan[DType.float32](), value)
    )
    return bitcast[DType.uint32](bits ^ ((bits >> 31) | Int32.MIN))


@always_inline
def unrank(rank: UInt32) -> Float32:
    """Invert `rank`."""
    var bits = bitcast[DType.int32](rank)
    return bitcast[DType.float32](bits ^ (~(bits >> 31) | Int32.MIN))


@always_inline
def weight[
    width: SIMDLength
](logit: SIMD[DType.float32, width], top: Float32, scale: Float32) -> SIMD[
    DType.float32, width
]:
    """The weights of logits."""
    var z = (logit - top) * scale
    return z.gt(FLOOR).select(exp(z), 0)


@always_inline
def walk[
    Weights: def(Int) -> Float64, //
](
    weights: Weights, begin: Int, end: Int, before: Float64, target: Float64
) -> Tuple[Int, Float64]:
    """Add weights up one by one until the sum, `before` at `begin`, passes a target.

    Returns the index that passes it, or where rounding lets none the last one with a weight above
    0; and the sum before that index.
    """
    var last = begin
    var before_last = before
    var sum = before
    for i in range(begin, end):
        var w = weights(i)
        if w > 0:
            last = i
            before_last = sum
            sum += w
            if sum > target:
                break
    return (last, before_last)
