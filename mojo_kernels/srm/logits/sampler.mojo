"""Sampler (`srm_sample`): one token per decode row, drawn from that row's logits alone.

    z = logits / temperature,  p = softmax(z)
    kept: p >= min_p * max p; of these the top_k largest (0: all); of these, renormalised, the
          smallest set of likeliest tokens with mass >= top_p (>= 1: all). Ties stay together.
    token: where the running mass of the kept, in index order, passes u * (mass of the kept)
    logprob = log p[token], over all tokens

u in [0, 1) has 53 bits of Philox4x32-10 with key = seed and counter = position. Temperature 0 is
greedy: the lowest index of the maximum, and log softmax of the raw logits. A row with NaN or +inf,
or with nothing but -inf, gives token -1, logprob 0 and last token 0.

All three truncations are a threshold on the logit. The k-th largest logit and the edge of top_p are
found without sorting, by bisection: half way by value at first, then over the float's
order-preserving integer image, so exactly; tokens that are decided are not looked at again.
`_sample_row` is the algorithm; it asks a `LogitRow` for sums over the row: `CPURow` (rows are split
over the cores, vectors run along a row), or on a GPU, a block per row, `RegisterRow` or `GPURow`.

    tokens      [D]     int32             out
    logprobs    [D]     float32           out
    last_token  [S]     int32             mutated at the slots
    logits      [H, V]  any float         in, the first D rows are used
    sampling    [S, 6]  int32             in at the slots; a buffer, because `srm_expand` mutates it
    positions   [D]     int32             in
    slots       [D]     int32             in
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.math import log
from std.random.philox import Random
from std.utils.numerics import isfinite, isnan
from std.utils.static_tuple import StaticTuple

from ._cpu_row import CPURow
from ._gpu_row import GPURow
from ._logit_row import (
    FLOOR,
    LogitRow,
    Tally,
    inverse,
    logprob_of,
    rank,
    unrank,
)
from ._register_row import LONG, SHORT, RegisterRow
from ._sampling import Sampling
from .._values import untracked
from ..parallel import num_tasks

comptime _BLOCK = 256  # threads of a GPU block
comptime _LOOKS_BY_VALUE = 16
"""Thresholds tried half way between two logits: that halves a bell's tail soon, but takes long
between numbers of any size. Those after them halve the float's integer image."""


def _uniform(seed: UInt64, position: Int) -> Float64:
    """A number in [0, 1), the same for the same arguments on every device."""
    var generator = Random(seed=seed, offset=UInt64(position))
    var bits = generator.step().cast[DType.uint64]()
    comptime STEP = Float64(1) / Float64(1 << 53)
    return Float64((bits[0] >> 5) << 26 | bits[1] >> 6) * STEP


def _smallest_set[
    Row: LogitRow, //, by_mass: Bool
](
    mut row: Row, low: Float32, high: Float32, most: Int, target: Float64
) -> Float32:
    """The largest threshold, `low` or above, that still keeps the `target`.

    `by_mass` is how top_p is found: the target is a mass of probability. Without it the target is a
    count of tokens, which is how top_k is found. `low` keeps enough, at most `most` tokens; `high`
    is the largest logit.
    """
    var grain = row.grain()
    var threshold = low
    # In grains: thresholds between the two are left to try.
    var enough = rank(low) // grain
    var too_few = (rank(high) + grain) // grain
    var kept_enough = most
    var kept_too_few = Tally(0, 0)
    var looks = 0
    # When a single token lies between the two, it is the last one needed, wherever exactly it lies.
    while too_few - enough > 1 and kept_enough - kept_too_few.count > 1:
        var middle = _between(enough, too_few, grain, looks < _LOOKS_BY_VALUE)
        var kept = row.tally[by_mass](unrank(middle * grain))
        if (kept.mass if by_mass else Float64(kept.count)) >= target:
            enough = middle
            threshold = unrank(middle * grain)
            kept_enough = kept.count
        else:
            too_few = middle
            kept_too_few = kept
        row.narrow[by_mass](
            threshold,
            unrank(too_few * grain),
            kept_too_few,
            kept_enough - kept_too_few.count,
        )
        looks += 1
    return threshold


def _between(
    low: UInt32, high: UInt32, grain: UInt32, by_value: Bool
) -> UInt32:
    """A rank between two that are not neighbours, all in grains: half way by value or by rank.
    """
    if not by_value:
        return low + (high - low) // 2
    var half = unrank(low * grain) / 2 + unrank(high * grain) / 2
    return min(max(rank(half) // grain, low + 1), high - 1)


def _sample_row[
    Row: LogitRow, //
](
    mut row: Row,
    temperature: Float32,
    top_k: Int,
    top_p: Float32,
    min_p: Float32,
    u: Float64,
) -> Tuple[Int32, Float32]:
    """The token and its log-probability; -1 and 0 where there is none."""
    var top = row.largest()
    if not isfinite(top):
        return (Int32(-1), Float32(0))
    var scale = inverse(temperature)
    var all = row.weigh(top, scale)
    if isnan(all.mass):
        return (Int32(-1), Float32(0))
    var token: Int
    if temperature == 0:
        token = row.first(top)
    else:
        if top_k > 0 or top_p < 1 or min_p > 0:
            _truncate(row, all, top, temperature, top_k, top_p, min_p)
        token = row.draw(u)
    return (Int32(token), logprob_of(row.logit(token), top, scale, all.mass))


def _truncate[
    Row: LogitRow, //
](
    mut row: Row,
    var kept: Tally,
    top: Float32,
    temperature: Float32,
    top_k: Int,
    top_p: Float32,
    min_p: Float32,
):
    """Drop the tokens that may not be drawn.

    `kept` are all there are, `top` is the largest logit.
    """
    # Tokens without weight could not be drawn: no threshold need be lower than them.
    var floor = max(FLOOR, log(min_p)) if min_p > 0 else FLOOR
    var low = max(top + temperature * floor, row.smallest())
    if min_p > 0:
        row.keep(low)
        kept = row.kept()
    if 0 < top_k < kept.count:
        low = _smallest_set[by_mass=False](
            row, low, top, kept.count, Float64(top_k)
        )
        row.keep(low)
        kept = row.kept()
    if top_p < 1:
        low = _smallest_set[by_mass=True](
            row, low, top, kept.count, Float64(top_p) * kept.mass
        )
        row.keep(low)


@extensibility.register("srm_sample")
struct _Sample:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        tokens: OutputTensor[dtype=DType.int32, rank=1, ...],
        logprobs: OutputTensor[dtype=DType.float32, rank=1, ...],
        last_token: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        logits: InputTensor[rank=2, ...],
        sampling: MutableInputTensor[dtype=DType.int32, rank=2, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        slots: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var num_rows = tokens.dim_size(0)
        var vocab = logits.dim_size(1)
        var token_ptr = tokens.unsafe_ptr()
        var logprob_ptr = logprobs.unsafe_ptr()
        var last_ptr = last_token.unsafe_ptr()
        var logit_ptr = logits.unsafe_ptr().unsafe_origin_cast[
            MutUntrackedOrigin
        ]()
        var sampling_ptr = untracked(sampling.unsafe_ptr())
        var position_ptr = positions.unsafe_ptr()
        var slot_ptr = slots.unsafe_ptr()

        @always_inline
        def sample[Row: LogitRow, //](mut row: Row, i: Int, writes: Bool) {var}:
            var slot = slot_ptr[unsafe_offset=i]
            var asked = Sampling.of(sampling_ptr, slot)
            var token, logprob = _sample_row(
                row,
                asked.temperature,
                asked.top_k,
                asked.top_p,
                asked.min_p,
                _uniform(asked.seed, Int(position_ptr[unsafe_offset=i])),
            )
            if writes:
                token_ptr[unsafe_offset=i] = token
                logprob_ptr[unsafe_offset=i] = logprob
                last_ptr[unsafe_offset=Int(slot)] = max(token, 0)

        comptime if target == "cpu":
            var tasks = num_tasks(num_rows * vocab)

            def sample_share(task: Int) {imm}:
                var row = CPURow(logit_ptr, vocab)
                for i in range(
                    task * num_rows // tasks, (task + 1) * num_rows // tasks
                ):
                    row.load(logit_ptr.unsafe_offset(i * vocab))
                    sample(row, i, True)

            sync_parallelize(sample_share, tasks)
        else:
            var width = Int64(vocab)

            def launch[share: Int]() raises {var}:
                """With a `RegisterRow` of this share, or with 0 a `GPURow`."""

                @__llvm_metadata(
                    `nvvm.maxntid`=StaticTuple[Int32, 1](_BLOCK),
                    `nvvm.minctasm`=__mlir_attr.`2 : index`,
                )
                def sample_block() {var}:
                    var i = block_idx.x
                    var source = logit_ptr.unsafe_offset(i * Int(width))
                    comptime if share > 0:
                        var row = RegisterRow[block_size=_BLOCK, share=share](
                            source, Int(width)
                        )
                        sample(row, i, thread_idx.x == 0)
                    else:
                        var row = GPURow[block_size=_BLOCK](source, Int(width))
                        sample(row, i, thread_idx.x == 0)

                ctx.enqueue_function(
                    sample_block, grid_dim=num_rows, block_dim=_BLOCK
                )

            if num_rows == 0:
                return
            if vocab <= _BLOCK * SHORT:
                launch[SHORT]()
            elif vocab <= _BLOCK * LONG:
                launch[LONG]()
            else:
                launch[0]()
