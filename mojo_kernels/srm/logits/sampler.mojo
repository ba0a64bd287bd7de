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
found without sorting the row, exactly: a CPU halves the logits between which they may lie, by value
at first, then over the float's order-preserving integer image, and looks at undecided tokens alone;
a GPU sorts them into bins, and the bin's tokens again, or compares each with each where top_k leaves
few. `_sample_row` is the algorithm; it asks a `LogitRow` for sums over the row: `CPURow` (rows are
split over the cores, vectors run along a row), or on a GPU, a block per row, `GPURow`.
Where the head left slices of the logits (has_slices), rows without truncations are drawn from these
(`_slices.mojo`), and only the others so.

With `rejects` a truncated row has another token of the same distribution: the first of ROUNDS draws
from all tokens that is kept, or else one more draw from the kept. The round is the counter's third
word. A token is kept if its logit is within min_p, fewer than top_k tokens have larger ones, and
these weigh less than top_p of what min_p keeps; so equal ones are kept together, as above. Where
both top_k and top_p truncate, top_p is of a mass that takes the search: these rows are as above.

    tokens      [D]     int32             out
    logprobs    [D]     float32           out
    last_token  [S]     int32             mutated at the slots
    logits      [H, V + padding]  any float  in, the first D rows are used; slices
                                          include padding, which then is -inf
    sampling    [S, 9]  int32             in at the slots; a buffer, because `srm_expand` mutates it
    positions   [D]     int32             in
    slots       [D]     int32             in
    slices      [H, (V + padding) / 256, 2]  float32  in, of `srm_head_sm90`; any tensor when
                                          has_slices is False
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceAttribute, DeviceContext
from std.math import ceildiv
from std.utils.numerics import isfinite, isnan
from std.utils.static_tuple import StaticTuple

from ._cpu_row import CPURow
from ._gpu_block import BLOCK
from ._gpu_row import LONG, SHORT, GPURow
from ._logit_row import (
    ROUNDS,
    LEAST_TOP_P,
    LogitRow,
    floor_of,
    inverse,
    logprob_of,
    next_above,
)
from ._sampling import Sampling
from ._slices import ROWS, SLICE, draw, sample_rows
from .._pdl import launch_attributes
from .._values import untracked
from ..parallel import num_tasks


@always_inline
def _sample_row[
    Row: LogitRow, Random: def() -> Tuple[UInt64, Int], //, rejects: Bool
](
    mut row: Row,
    temperature: Float32,
    top_k: Int,
    top_p: Float32,
    min_p: Float32,
    random: Random,
    writes: Bool,
) -> Tuple[Int32, Float32]:
    """The token and its log-probability; -1 and 0 where there is none.

    Of the threads that call this for a row, one `writes` and gets the latter. `random` gives seed
    and position: read at the end, they take no registers before.
    """
    var top = row.largest()
    if not isfinite(top):
        return (Int32(-1), Float32(0))
    var scale = inverse(temperature)
    var mass = row.weigh(top, scale)
    if isnan(mass):
        return (Int32(-1), Float32(0))
    var token: Int
    if temperature == 0:
        token = row.first(top)
    else:
        token = -1
        var round = 0
        comptime if rejects:
            if top_k == 0 or top_p >= 1:
                var least = top + temperature * floor_of(min_p)
                var kept = mass
                if min_p > 0 and top_p < 1:
                    kept = row.mass_from(least)
                var most = Float64(max(top_p, LEAST_TOP_P)) * kept
                while token < 0 and round < ROUNDS:
                    var seed, position = random()
                    var drawn = row.draw(seed, position, round)
                    var logit = row.logit(drawn)
                    var above = next_above(logit)
                    if (
                        logit >= least
                        and (top_k == 0 or row.count_from(above) < top_k)
                        and (top_p >= 1 or row.mass_from(above) < most)
                    ):
                        token = drawn
                    round += 1
        if token < 0:
            if top_k > 0 or top_p < 1 or min_p > 0:
                row.truncate(mass, temperature, top_k, top_p, min_p)
            var seed, position = random()
            token = row.draw(seed, position, round)
    var logprob = Float32(0)
    if writes:
        logprob = logprob_of(row.logit(token), top, scale, mass)
    return (Int32(token), logprob)


@extensibility.register("srm_sample")
struct _Sample:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString,
        padding: Int,
        has_slices: Bool,
        rejects: Bool,
        pdl: Bool,
    ](
        tokens: OutputTensor[dtype=DType.int32, rank=1, ...],
        logprobs: OutputTensor[dtype=DType.float32, rank=1, ...],
        last_token: MutableInputTensor[dtype=DType.int32, rank=1, ...],
        logits: InputTensor[rank=2, ...],
        sampling: MutableInputTensor[dtype=DType.int32, rank=2, ...],
        positions: InputTensor[dtype=DType.int32, rank=1, ...],
        slots: InputTensor[dtype=DType.int32, rank=1, ...],
        slices: InputTensor[...],
        ctx: DeviceContext,
    ) raises:
        var num_rows = tokens.dim_size(0)
        var vocab = logits.dim_size(1) - padding
        var token_ptr = tokens.unsafe_ptr()
        var logprob_ptr = logprobs.unsafe_ptr()
        var last_ptr = last_token.unsafe_ptr()
        var logit_ptr = logits.unsafe_ptr().unsafe_origin_cast[
            MutUntrackedOrigin
        ]()
        var sampling_ptr = untracked(sampling.unsafe_ptr())
        var position_ptr = positions.unsafe_ptr()
        var slot_ptr = slots.unsafe_ptr()
        var slice_ptr = untracked(slices.unsafe_ptr()).unsafe_bitcast[Float32]()

        @always_inline
        def write(i: Int, token: Int32, logprob: Float32) {var}:
            token_ptr[unsafe_offset=i] = token
            logprob_ptr[unsafe_offset=i] = logprob
            var slot = Int(slot_ptr[unsafe_offset=i])
            last_ptr[unsafe_offset=slot] = max(token, 0)

        @always_inline
        def sample[Row: LogitRow, //](mut row: Row, i: Int, writes: Bool) {var}:
            var asked = Sampling.of(sampling_ptr, slot_ptr[unsafe_offset=i])

            @always_inline
            def random() {imm} -> Tuple[UInt64, Int]:
                var own = Sampling.of(sampling_ptr, slot_ptr[unsafe_offset=i])
                return (own.seed, Int(position_ptr[unsafe_offset=i]))

            var token, logprob = _sample_row[rejects](
                row,
                asked.temperature,
                asked.top_k,
                asked.top_p,
                asked.min_p,
                random,
                writes,
            )
            if writes:
                write(i, token, logprob)

        comptime if target == "cpu":
            var tasks = num_tasks(num_rows * vocab)

            def sample_share(task: Int) {imm}:
                var row = CPURow(logit_ptr, vocab)
                for i in range(
                    task * num_rows // tasks, (task + 1) * num_rows // tasks
                ):
                    row.load(logit_ptr.unsafe_offset(i * (vocab + padding)))
                    sample(row, i, True)

            sync_parallelize(sample_share, tasks)
        else:
            var tokens_of_a_row, rows = Int64(vocab), Int64(num_rows)
            comptime assert has_slices or not pdl
            # Several, but no fewer blocks than can run at once: two on a processor.
            var processors = ctx.get_attribute(
                DeviceAttribute.MULTIPROCESSOR_COUNT
            )
            var each = Int64(
                min(
                    ROWS, ceildiv(num_rows, 2 * processors)
                ) if has_slices else 1
            )

            def launch[share: Int]() raises {var}:
                """With so many logits to a thread, or any number with 0."""

                @__llvm_metadata(
                    `nvvm.maxntid`=StaticTuple[Int32, 1](BLOCK),
                    `nvvm.minctasm`=__mlir_attr.`2 : index`,
                )
                def sample_block() {var}:
                    var vocab = Int(tokens_of_a_row)
                    var width = vocab + padding

                    @always_inline
                    def sample_row(i: Int) {imm}:
                        var source = logit_ptr.unsafe_offset(i * width)
                        var row = GPURow[share=share](source, vocab)
                        sample(row, i, thread_idx.x == 0)

                    @always_inline
                    def draw_row(i: Int) {imm} -> Bool:
                        @always_inline
                        def write_row(token: Int32, logprob: Float32) {imm}:
                            write(i, token, logprob)

                        return draw[rejects](
                            logit_ptr.unsafe_offset(i * width),
                            slice_ptr.unsafe_offset(i * (width // SLICE) * 2),
                            width,
                            Sampling.of(
                                sampling_ptr, slot_ptr[unsafe_offset=i]
                            ),
                            Int(position_ptr[unsafe_offset=i]),
                            write_row,
                        )

                    comptime if has_slices:
                        var first = block_idx.x * Int(each)
                        var count = min(Int(each), Int(rows) - first)
                        sample_rows[pdl](draw_row, sample_row, first, count)
                    else:
                        sample_row(block_idx.x)

                ctx.enqueue_function(
                    sample_block,
                    grid_dim=ceildiv(num_rows, Int(each)),
                    block_dim=BLOCK,
                    attributes=launch_attributes[pdl](),
                )

            if num_rows == 0:
                return
            if vocab <= BLOCK * SHORT:
                launch[SHORT]()
            elif vocab <= BLOCK * LONG:
                launch[LONG]()
            else:
                launch[0]()
