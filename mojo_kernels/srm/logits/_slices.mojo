"""Rows whose softmax the head left in slices (`products/sm90.mojo`), drawn by a warp each.

A warp reads two numbers of each slice: its largest logit, and what its tokens weigh against that one.
They tell the slice where the running mass passes the target; of the logits only its own are read.
That is the same token as `GPURow` draws, but for the rounding of sums. It is for rows without
truncations whose logits are as the head wrote them; who edits a row makes its first slice NaN.
Those that cannot be drawn so, greedy ones among them, are left, and then the whole block takes one
after the other. Which rows those are depends on each alone.
"""

from max.gpu import WARP_SIZE, barrier, lane_id, warp_id
from max.gpu.primitives import warp
from std.math import ceildiv, exp2
from std.utils.numerics import isfinite, nan, neg_inf

from ._gpu_block import WARPS, largest_in_warp, shared
from ._gpu_row import TURN, passing
from ._logit_row import (
    in_powers_of_2,
    inverse,
    logprob_of,
    rank,
    uniform,
    unrank,
    walk,
)
from ._sampling import Sampling
from .._values import Values

comptime ROWS = WARPS
"""The most rows of a block."""

comptime SLICE = 256
"""Columns of a slice: BN of `_sm90_epilogue.mojo`, and a turn of each lane."""


@always_inline
def invalidate(slices: Values[DType.float32], row: Int, vocab: Int):
    """Have a row that no longer is as the head wrote it left by `draw`."""
    slices[unsafe_offset=row * (vocab // SLICE) * 2] = nan[DType.float32]()


@always_inline
def sample_rows[
    Draw: def(Int) -> Bool, Sample: def(Int) -> None, //
](draw: Draw, sample: Sample, first: Int, count: Int):
    """Draw up to ROWS rows, a warp each; then sample those that are left, the whole block each.
    """
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
    dtype: DType, Write: def(Int32, Float32) -> None, //
](
    logits: Values[dtype],
    slices: Values[DType.float32],
    vocab: Int,
    asked: Sampling,
    position: Int,
    write: Write,
) -> Bool:
    """Draw a row on a warp, and write the token and its log-probability; False where it is left.
    """
    comptime assert SLICE == WARP_SIZE * TURN
    if not asked.is_plain():
        return False
    var scale = inverse(asked.temperature)
    var power = in_powers_of_2(scale)

    # A lane has neighbouring slices, or none.
    var each = ceildiv(vocab // SLICE, WARP_SIZE)
    var begin = min(lane_id() * each, vocab // SLICE)
    var end = min(begin + each, vocab // SLICE)

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

    var mass = Float64(0)
    for i in range(begin, end):
        mass += mass_of(i)
    var up_to = warp.prefix_sum(mass)
    var all = warp.shuffle_idx(up_to, UInt32(WARP_SIZE - 1))
    if not isfinite(all):
        return False
    var target = uniform(asked.seed, position) * all
    var lane = _passing_lane(mass, up_to, target)
    var slice = begin
    var before = up_to - mass
    if each > 1:
        slice, before = walk(mass_of, begin, end, before, target)
    slice = Int(warp.shuffle_idx(Int32(slice), lane))
    before = warp.shuffle_idx(before, lane)

    var token = slice * SLICE + lane_id() * TURN
    var z = logits.unsafe_load[width=TURN, alignment=16](token)
    var weights = exp2((z.cast[DType.float32]() - top) * power)
    mass = Float64(weights.reduce_add())
    up_to = before + warp.prefix_sum(mass)
    if lane_id() == Int(_passing_lane(mass, up_to, target)):
        var at, _ = passing(weights, up_to - mass, target)
        var logit = logits[unsafe_offset=token + at].cast[DType.float32]()
        write(Int32(token + at), logprob_of(logit, top, scale, all))
    return True


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
