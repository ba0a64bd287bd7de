"""A row of logits, as the sampler sees it: what `sample_row` needs summed over the vocabulary.

A token weighs exp((logit - top) * scale), `top` being the largest logit, so the heaviest weighs 1;
below e^-87, where float32's normal range ends, it weighs nothing. Sums of many weights are float64.
`CPURow` and `GPURow` are the two rows.
"""

from std.math import exp
from std.memory import bitcast
from std.utils.numerics import isnan, nan

comptime FLOOR = Float32(-87)
"""Log of the smallest weight that counts."""


@fieldwise_init
struct Tally(TrivialRegisterPassable):
    """What a threshold keeps: how many tokens, and the sum of their weights."""

    var count: Int
    var mass: Float64


trait LogitRow:
    """Sums over a row of logits."""

    def largest(self) -> Float32:
        """The largest logit; NaN if the row has one."""
        ...

    def weigh(mut self, top: Float32, scale: Float32) -> Tally:
        """Weigh all tokens, `scale` being the inverse temperature."""
        ...

    def keep(mut self, threshold: Float32) -> Tally:
        """Drop the tokens below a finite threshold; return what is left."""
        ...

    def tally[by_mass: Bool](self, threshold: Float32) -> Tally:
        """Say what a finite threshold would keep; without `by_mass`, of mass 0.
        """
        ...

    def first(self, logit: Float32) -> Int:
        """Find the lowest token with a logit, of which there is one."""
        ...

    def draw(self, u: Float64) -> Int:
        """Find the token where the running sum of the weights left passes the share u in [0, 1).
        """
        ...

    def logit(self, token: Int) -> Float32:
        """The logit of a token."""
        ...


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
