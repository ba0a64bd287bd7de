"""Scores (`srm_score`): of the token that follows a row of logits, and of the likeliest ones.

    z = logits / temperature in decode rows (0 reads as 1), logits in the others
    logprobs[q] = log softmax(z)[target],  ranks[q] = 1 + tokens before the target
    top_ids[q, i] = the i-th token for i < num_top[q],  top_logprobs[q, i] = log softmax(z)[it]

Where num_top[q] < 0, the tokens are not the likeliest but those of a list, in its order: at
named[~num_top[q]] is how many there are, and they follow.

Tokens are ordered by logit, the largest first, and equal ones by id, the lowest first. The target is
the token given; of a decode row the one just sampled. So a row's numbers depend on that row alone,
and a target among the likeliest has the same bits in both places. What is not asked for, or not
there, is id -1 and logprob 0. A row with NaN or +inf, or with nothing but -inf, gives logprob NaN,
rank 0 and no likeliest tokens.

`_score_row` is the algorithm, over the rows that the sampler has: `CPURow` (rows are split over the
cores, vectors run along a row) or, a block per row, `GPURow`. Each of the likeliest is one search
for the largest logit after the one before, so few cost little.

    logprobs      [Q]     float32   out
    ranks         [Q]     int32     out
    top_ids       [Q, N]  int32     out
    top_logprobs  [Q, N]  float32   out
    logits        [H, V + padding]  any float  in
    sampling      [S, 9]  int32     in at the slots; a buffer, because `srm_expand` mutates it
    slots         [D]     int32     in
    tokens        [D]     int32     in; the first D rows of the logits are the decode rows
    targets       [1 + H - D]  int32  in, of the others from 1 on
    rows          [Q]     int32     in
    num_top       [Q]     int32     in, at most N
    named         [*]     int32     in, lists of at most N tokens
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from extensibility import _MutableInputTensor as MutableInputTensor
from max.algorithm import sync_parallelize
from max.gpu import block_idx, thread_idx
from max.gpu.host import DeviceContext
from std.utils.numerics import isfinite, isnan, nan
from std.utils.static_tuple import StaticTuple

from ._cpu_row import CPURow
from ._gpu_block import BLOCK
from ._gpu_row import LONG, SHORT, GPURow
from ._logit_row import LogitRow, inverse, logprob_of
from ._sampling import Sampling
from .._pdl import launch_attributes, start_after_last
from .._values import untracked
from ..parallel import num_tasks


def _score_row[
    Row: LogitRow, //
](
    mut row: Row,
    vocab: Int,
    temperature: Float32,
    next: Int,
    num_top: Int,
    named: Pointer[Int32, _],
    top_ids: Pointer[Int32, MutUnsafeAnyOrigin],
    top_logprobs: Pointer[Float32, MutUnsafeAnyOrigin],
    size: Int,
    writes: Bool,
) -> Tuple[Float32, Int32]:
    """The log-probability and the rank of the token `next`.

    Of the threads that call this for a row, one `writes` the `num_top` likeliest, or those `named`.
    """
    if writes:
        for i in range(size):
            top_ids[unsafe_offset=i] = -1
            top_logprobs[unsafe_offset=i] = 0
    var top = row.largest()
    if not isfinite(top):
        return (nan[DType.float32](), Int32(0))
    var scale = inverse(temperature)
    var mass = row.weigh(top, scale)
    if isnan(mass):
        return (nan[DType.float32](), Int32(0))
    var token = -1
    var is_listed = num_top < 0
    var count = min(num_top, vocab)
    if is_listed:
        count = min(Int(named[unsafe_offset=~num_top]), size)
    for i in range(count):
        if is_listed:
            token = Int(named[unsafe_offset=~num_top + 1 + i])
        else:
            token = row.after(token)
        if writes:
            top_ids[unsafe_offset=i] = Int32(token)
            top_logprobs[unsafe_offset=i] = logprob_of(
                row.logit(token), top, scale, mass
            )
    return (
        logprob_of(row.logit(next), top, scale, mass),
        Int32(row.before(next) + 1),
    )


@extensibility.register("srm_score")
struct _Score:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString, padding: Int, pdl: Bool
    ](
        logprobs: OutputTensor[dtype=DType.float32, rank=1, ...],
        ranks: OutputTensor[dtype=DType.int32, rank=1, ...],
        top_ids: OutputTensor[dtype=DType.int32, rank=2, ...],
        top_logprobs: OutputTensor[dtype=DType.float32, rank=2, ...],
        logits: InputTensor[rank=2, ...],
        sampling: MutableInputTensor[dtype=DType.int32, rank=2, ...],
        slots: InputTensor[dtype=DType.int32, rank=1, ...],
        tokens: InputTensor[dtype=DType.int32, rank=1, ...],
        targets: InputTensor[dtype=DType.int32, rank=1, ...],
        rows: InputTensor[dtype=DType.int32, rank=1, ...],
        num_top: InputTensor[dtype=DType.int32, rank=1, ...],
        named: InputTensor[dtype=DType.int32, rank=1, ...],
        ctx: DeviceContext,
    ) raises:
        var num_rows = rows.dim_size(0)
        # An Int may not cross to the device: its width is the host's.
        var vocab = Int64(logits.dim_size(1) - padding)
        var num_decode = Int64(tokens.dim_size(0))
        var size = Int64(top_ids.dim_size(1))
        var logprob_ptr = logprobs.unsafe_ptr()
        var rank_ptr = ranks.unsafe_ptr()
        var top_id_ptr = top_ids.unsafe_ptr()
        var top_logprob_ptr = top_logprobs.unsafe_ptr()
        var logit_ptr = logits.unsafe_ptr().unsafe_origin_cast[
            MutUntrackedOrigin
        ]()
        var sampling_ptr = untracked(sampling.unsafe_ptr())
        var slot_ptr = slots.unsafe_ptr()
        var token_ptr = tokens.unsafe_ptr()
        var target_ptr = targets.unsafe_ptr()
        var row_ptr = rows.unsafe_ptr()
        var num_top_ptr = num_top.unsafe_ptr()
        var named_ptr = named.unsafe_ptr()

        @always_inline
        def score[Row: LogitRow, //](mut row: Row, q: Int, writes: Bool) {var}:
            var i = Int(row_ptr[unsafe_offset=q])
            var temperature = Float32(1)
            var next: Int32
            if i < Int(num_decode):
                var slot = slot_ptr[unsafe_offset=i]
                temperature = Sampling.of(sampling_ptr, slot).temperature
                next = token_ptr[unsafe_offset=i]
            else:
                next = target_ptr[unsafe_offset=1 + i - Int(num_decode)]
            var logprob, rank = _score_row(
                row,
                Int(vocab),
                temperature,
                Int(next),
                Int(num_top_ptr[unsafe_offset=q]),
                named_ptr,
                top_id_ptr.unsafe_offset(q * Int(size)),
                top_logprob_ptr.unsafe_offset(q * Int(size)),
                Int(size),
                writes,
            )
            if writes:
                logprob_ptr[unsafe_offset=q] = logprob
                rank_ptr[unsafe_offset=q] = rank

        @always_inline
        def logits_of(
            q: Int,
        ) {var} -> Pointer[Scalar[logits.dtype], MutUntrackedOrigin]:
            return logit_ptr.unsafe_offset(
                Int(row_ptr[unsafe_offset=q]) * (Int(vocab) + padding)
            )

        comptime if target == "cpu":
            var tasks = num_tasks(num_rows * Int(vocab))

            def score_share(task: Int) {imm}:
                var row = CPURow(logit_ptr, Int(vocab))
                for q in range(
                    task * num_rows // tasks, (task + 1) * num_rows // tasks
                ):
                    row.load(logits_of(q))
                    score(row, q, True)

            if num_rows > 0:
                sync_parallelize(score_share, tasks)
        else:

            def launch[share: Int]() raises {var}:
                """With so many logits to a thread, or any number with 0."""

                @__llvm_metadata(
                    `nvvm.maxntid`=StaticTuple[Int32, 1](BLOCK),
                    `nvvm.minctasm`=__mlir_attr.`2 : index`,
                )
                def score_block() {var}:
                    start_after_last[pdl]()
                    var q = block_idx.x
                    var row = GPURow[share=share](logits_of(q), Int(vocab))
                    score(row, q, thread_idx.x == 0)

                ctx.enqueue_function(
                    score_block,
                    grid_dim=num_rows,
                    block_dim=BLOCK,
                    attributes=launch_attributes[pdl](),
                )

            if num_rows == 0:
                return
            if Int(vocab) <= BLOCK * SHORT:
                launch[SHORT]()
            elif Int(vocab) <= BLOCK * LONG:
                launch[LONG]()
            else:
                launch[0]()
