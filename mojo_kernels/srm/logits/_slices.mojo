"""Rows whose softmax the head left in slices (`products/sm90.mojo`), drawn by a warp each.

A warp reads two numbers of each slice: its largest logit, and what its tokens weigh against that one.
They tell the slice where the running mass passes the target; of the logits only its own are read.
That is the same token as `GPURow` draws, but for the rounding of sums. It is for rows without
truncations whose logits are as the head wrote them; who edits a row makes its first slice NaN.
Those that cannot be drawn so, greedy ones among them, are left, and then the whole block takes one
after the other. Which rows those are depends on each alone.

With `rejects` truncated rows are drawn so too, unless by top_k and top_p both, until a token is
kept. What has larger logits tells that. Slices without such are not read, others only until bounds
of the sum decide.
"""

from max.gpu import WARP_SIZE, barrier, lane_id, warp_id
from max.gpu.primitives import warp
from std.math import ceildiv, exp2, fma
from std.utils.numerics import isfinite, nan, neg_inf

from ._gpu_block import WARPS, at_least, largest_in_warp, shared
from ._gpu_row import TURN, passing
from ._logit_row import (
    LEAST_TOP_P,
    ROUNDS,
    floor_of,
    in_powers_of_2,
    inverse,
    logprob_of,
    next_above,
    rank,
    uniform,
    unrank,
    walk,
)
from ._sampling import Sampling
from .._pdl import start_after_last
from .._values import Values

comptime ROWS = WARPS
"""The most rows of a block."""

comptime SLICE = 256
"""Columns of a slice: BN of `_sm90_epilogue.mojo`, and a turn of each lane."""

comptime GROUP = 4
"""Slices that are read at a time."""


@always_inline
def invalidate(slices: Values[DType.float32], row: Int, width: Int):
    """Have a row that no longer is as the head wrote it left by `draw`."""
    slices[unsafe_offset=row * (width // SLICE) * 2] = nan[DType.float32]()


@always_inline
def sample_rows[
    Draw: def(Int) -> Bool, Sample: def(Int) -> None, //, pdl: Bool = False
](draw: Draw, sample: Sample, first: Int, count: Int):
    """Draw up to ROWS rows, a warp each; then sample those that are left, the whole block each.
    """
    start_after_last[pdl]()
    var left = shared[DType.uint32, ROWS]()
    var is_left = warp_id() < count and not draw(first + warp_id())
    if lane_id() == 0:
        left[unsafe_offset=warp_id()] = UInt32(is_left)
    barrier()
    if left.unsafe_load[width=ROWS, alignment=16](0).reduce_or() == 0:
        return
    for i in range(count):
        if left[unsafe_offset=i] != 0:
            sample(first + i)


@always_inline
def draw[
    dtype: DType, Write: def(Int32, Float32) -> None, //, rejects: Bool
](
    logits: Values[dtype],
    slices: Values[DType.float32],
    width: Int,
    asked: Sampling,
    position: Int,
    write: Write,
) -> Bool:
    """Draw a row on a warp, and write the token and its log-probability; False where it is left.
    """
    comptime assert SLICE == WARP_SIZE * TURN
    if not asked.is_drawn_from_all[rejects]():
        return False
    var scale = inverse(asked.temperature)
    var power = in_powers_of_2(scale)

    # A lane has neighbouring slices, or none.
    var each = ceildiv(width // SLICE, WARP_SIZE)
    var begin = min(lane_id() * each, width // SLICE)
    var end = min(begin + each, width // SLICE)

    @always_inline
    def slice_at(i: Int) {imm} -> SIMD[DType.float32, 2]:
        return slices.unsafe_load[width=2, alignment=8](i * 2)

    var top = neg_inf[DType.float32]()
    for i in range(begin, end):
        top = max(top, slice_at(i)[0])
    top = unrank(largest_in_warp(rank(top)))

    @always_inline
    def mass_of(i: Int) {imm} -> Float64:
        var slice = slice_at(i)
        return Float64(slice[1] * exp2((slice[0] - top) * power))

    @always_inline
    def logits_of(slice: Int) {imm} -> SIMD[DType.float32, TURN]:
        return logits.unsafe_load[width=TURN, alignment=16](
            slice * SLICE + lane_id() * TURN
        ).cast[DType.float32]()

    var mass = Float64(0)
    for i in range(begin, end):
        mass += mass_of(i)
    var up_to = warp.prefix_sum(mass)
    var all = warp.shuffle_idx(up_to, UInt32(WARP_SIZE - 1))
    if not isfinite(all):
        return False

    @always_inline
    def draw_at(u: Float64) {imm} -> Tuple[Int, Float32, UInt32]:
        """A token and its logit, which one lane knows, and that lane."""
        var target = u * all
        var lane = _passing_lane(mass, up_to, target)
        var slice = begin
        var before = up_to - mass
        if each > 1:
            slice, before = walk(mass_of, begin, end, before, target)
        slice = Int(warp.shuffle_idx(Int32(slice), lane))
        before = warp.shuffle_idx(before, lane)

        var token = slice * SLICE + lane_id() * TURN
        var weights = exp2((logits_of(slice) - top) * power)
        var own = Float64(weights.reduce_add())
        var sum = before + warp.prefix_sum(own)
        lane = _passing_lane(own, sum, target)
        var logit = Float32(0)
        if lane_id() == Int(lane):
            var at, _ = passing(weights, sum - own, target)
            token += at
            logit = logits[unsafe_offset=token].cast[DType.float32]()
        return (token, logit, lane)

    @always_inline
    def write_if_known(drawn: Tuple[Int, Float32, UInt32]) {imm} -> Bool:
        if lane_id() == Int(drawn[2]):
            write(Int32(drawn[0]), logprob_of(drawn[1], top, scale, all))
        return True

    comptime if not rejects:
        return write_if_known(draw_at(uniform(asked.seed, position, 0)))

    @always_inline
    def sum_from[
        of_mass: Bool
    ](threshold: Float32, target: Float32) {imm} -> Float32:
        """Count the tokens with a logit of at least that, or add up their weights; to where it is
        known on which side of the target the sum is.
        """

        @always_inline
        def most_of(i: Int) {imm} -> Float32:
            if i >= end or slice_at(i)[0] < threshold:
                return 0
            return Float32(mass_of(i)) if of_mass else Float32(SLICE)

        var sum = Float32(0)
        var unread = Float32(0)
        for i in range(begin, end):
            unread += most_of(i)
        for i in range(each):
            var most = most_of(begin + i)
            while True:
                var least = warp.sum(sum)
                var bound = least + warp.sum(unread)
                if least >= target or bound < target:
                    return least if least >= target else bound
                # The lanes whose slices are the next to be read, from 1 on.
                var lanes = SIMD[DType.uint32, GROUP](0)
                comptime for k in range(GROUP):
                    var own = UInt32(lane_id() + 1)
                    lanes[k] = largest_in_warp(own if most > 0 else 0)
                    if own == lanes[k]:
                        unread -= most
                        most = 0
                if lanes[0] == 0:
                    break
                var read = SIMD[DType.float32, GROUP * TURN](0)
                comptime for k in range(GROUP):
                    if lanes[k] > 0:
                        var slice = Int(lanes[k] - 1) * each + i
                        read = read.insert[offset=k * TURN](logits_of(slice))
                comptime for k in range(GROUP):
                    if lanes[k] > 0:
                        var z = read.slice[TURN, offset=k * TURN]()
                        var weights = exp2((z - top) * power)
                        comptime for j in range(TURN):
                            var kept = at_least(z[j], threshold)
                            sum = fma(kept, weights[j] if of_mass else 1, sum)
        return warp.sum(sum)

    var uniforms = uniform(asked.seed, position, lane_id())
    var least = top + asked.temperature * floor_of(asked.min_p)
    var kept = Float32(all)
    if asked.min_p > 0 and asked.top_p < 1:
        kept = sum_from[of_mass=True](least, nan[DType.float32]())
    var most = max(asked.top_p, LEAST_TOP_P) * kept
    var top_k = Float32(asked.top_k)
    for round in range(ROUNDS):
        var drawn = draw_at(warp.shuffle_idx(uniforms, UInt32(round)))
        var logit = warp.shuffle_idx(drawn[1], drawn[2])
        var above = next_above(logit)
        if (
            logit >= least
            and (top_k == 0 or sum_from[of_mass=False](above, top_k) < top_k)
            and (asked.top_p >= 1 or sum_from[of_mass=True](above, most) < most)
        ):
            return write_if_known(drawn)
    return False


@always_inline
def _passing_lane(mass: Float64, up_to: Float64, target: Float64) -> UInt32:
    """The first lane up to which the mass passes a target; where rounding lets none, the last with a mass.
    """
    var lane = UInt32(lane_id())
    var by = UInt32(0)
    if mass > 0:
        by = UInt32(3 * WARP_SIZE) - lane if up_to > target else 1 + lane
    by = largest_in_warp(by)
    return UInt32(3 * WARP_SIZE) - by if by > UInt32(WARP_SIZE) else by - 1
