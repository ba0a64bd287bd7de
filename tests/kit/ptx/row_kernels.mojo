"""Prints the PTX of the sampler, of the scores and of constraints over each kind of row that a GPU has.

As `sampler.mojo`, `score.mojo` and `constraints.mojo` launch them, with plain pointers for tensors.
With `-D pdl` the sampler of slices starts while the kernel before it ends.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import get_gpu_target
from srm.logits._gpu_block import BLOCK
from srm.logits._gpu_row import LONG, SHORT, GPURow
from srm.logits._logit_row import LogitRow
from srm.logits._sampling import FIELDS, Sampling
from srm.logits._slices import SLICE, draw, sample_rows
from srm.logits.constraints import (
    MAX_CLASSES,
    TABLE,
    _Table,
    _constrain_row,
)
from srm.logits.sampler import _sample_row
from srm.logits.score import _score_row
from std.compile import compile_info
from std.math import ceildiv
from std.memory import AddressSpace, unsafe_stack_allocation
from std.sys import is_defined
from std.utils.static_tuple import StaticTuple

comptime Out[type: DType] = Pointer[Scalar[type], MutUntrackedOrigin]


@__llvm_metadata(
    `nvvm.maxntid`=StaticTuple[Int32, 1](BLOCK),
    `nvvm.minctasm`=__mlir_attr.`2 : index`,
)
def sample[
    dtype: DType, share: Int, has_slices: Bool, rejects: Bool
](
    logits: Out[dtype],
    slices: Out[DType.float32],
    vocab: Int64,
    rows: Int64,
    rows_of_a_block: Int64,
    temperature: Out[DType.float32],
    top_k: Out[DType.int32],
    top_p: Out[DType.float32],
    min_p: Out[DType.float32],
    seeds: Out[DType.uint64],
    tokens: Out[DType.int32],
    logprobs: Out[DType.float32],
):
    var width = Int(vocab)
    comptime if has_slices:
        width = ceildiv(width, SLICE) * SLICE

    @always_inline
    def asked(i: Int) {imm} -> Sampling:
        return Sampling(
            temperature[unsafe_offset=i],
            Int(top_k[unsafe_offset=i]),
            top_p[unsafe_offset=i],
            min_p[unsafe_offset=i],
            seeds[unsafe_offset=i],
        )

    @always_inline
    def sample_row(i: Int) {imm}:
        var row = GPURow[share=share](
            logits.unsafe_offset(i * width), Int(vocab)
        )
        var how = asked(i)

        @always_inline
        def random() {imm} -> Tuple[UInt64, Int]:
            return (seeds[unsafe_offset=i], i)

        var token, logprob = _sample_row[rejects](
            row,
            how.temperature,
            how.top_k,
            how.top_p,
            how.min_p,
            random,
            thread_idx.x == 0,
        )
        if thread_idx.x == 0:
            tokens[unsafe_offset=i] = token
            logprobs[unsafe_offset=i] = logprob

    @always_inline
    def draw_row(i: Int) {imm} -> Bool:
        @always_inline
        def write(token: Int32, logprob: Float32) {imm}:
            tokens[unsafe_offset=i] = token
            logprobs[unsafe_offset=i] = logprob

        return draw[rejects](
            logits.unsafe_offset(i * width),
            slices.unsafe_offset(i * (width // SLICE) * 2),
            width,
            asked(i),
            i,
            write,
        )

    comptime if has_slices:
        var first = block_idx.x * Int(rows_of_a_block)
        var count = min(Int(rows_of_a_block), Int(rows) - first)
        sample_rows[is_defined["pdl"]()](draw_row, sample_row, first, count)
    else:
        sample_row(block_idx.x)


@__llvm_metadata(
    `nvvm.maxntid`=StaticTuple[Int32, 1](BLOCK),
    `nvvm.minctasm`=__mlir_attr.`2 : index`,
)
def score[
    dtype: DType, share: Int
](
    logits: Out[dtype],
    vocab: Int64,
    temperature: Out[DType.float32],
    targets: Out[DType.int32],
    num_top: Out[DType.int32],
    named: Out[DType.int32],
    size: Int64,
    top_ids: Pointer[Int32, MutUnsafeAnyOrigin],
    top_logprobs: Pointer[Float32, MutUnsafeAnyOrigin],
    ranks: Out[DType.int32],
    logprobs: Out[DType.float32],
):
    var i = block_idx.x
    var source = logits.unsafe_offset(i * Int(vocab))

    def run[Row: LogitRow, //](mut row: Row) {imm}:
        var logprob, rank = _score_row(
            row,
            Int(vocab),
            temperature[unsafe_offset=i],
            Int(targets[unsafe_offset=i]),
            Int(num_top[unsafe_offset=i]),
            named,
            top_ids.unsafe_offset(i * Int(size)),
            top_logprobs.unsafe_offset(i * Int(size)),
            Int(size),
            thread_idx.x == 0,
        )
        if thread_idx.x == 0:
            ranks[unsafe_offset=i] = rank
            logprobs[unsafe_offset=i] = logprob

    var row = GPURow[share=share](source, Int(vocab))
    run(row)


def constrain(
    logits: Out[DType.bfloat16],
    vocab: Int64,
    records: Out[DType.int32],
    lasts: Out[DType.int32],
    positions: Out[DType.int32],
    tables: Out[DType.uint16],
):
    var allowed = unsafe_stack_allocation[
        MAX_CLASSES, Int32, address_space=AddressSpace.SHARED
    ]().unsafe_origin_cast[MutUntrackedOrigin]()
    var i = block_idx.x
    var record = records.unsafe_offset(i * FIELDS)
    _constrain_row[on_gpu=True](
        logits.unsafe_offset(i * Int(vocab)),
        _Table(tables.unsafe_offset(Int(record[unsafe_offset=TABLE])), vocab),
        allowed,
        record,
        Int(lasts[unsafe_offset=i]),
        Int(positions[unsafe_offset=i]),
    )


def main():
    comptime TARGET = get_gpu_target["sm_90a"]()
    comptime KIND = "object" if is_defined["object"]() else "asm"
    comptime BF16 = DType.bfloat16
    comptime F32 = DType.float32
    comptime for share in [SHORT, LONG, 0]:
        comptime for rejects in [False, True]:
            comptime name = "reject" if rejects else "sample"
            var sampler = compile_info[
                sample[BF16, share, False, rejects],
                emission_kind=KIND,
                target=TARGET,
            ]()
            print("===", name, "bfloat16", share)
            print(sampler.asm)
            var slicer = compile_info[
                sample[BF16, share, True, rejects],
                emission_kind=KIND,
                target=TARGET,
            ]()
            print("===", name + "_slices", "bfloat16", share)
            print(slicer.asm)
        var scorer = compile_info[
            score[BF16, share], emission_kind=KIND, target=TARGET
        ]()
        print("=== score bfloat16", share)
        print(scorer.asm)
    var constrainer = compile_info[
        constrain, emission_kind=KIND, target=TARGET
    ]()
    print("=== constrain bfloat16")
    print(constrainer.asm)
    var wide = compile_info[
        sample[F32, LONG, False, False], emission_kind=KIND, target=TARGET
    ]()
    print("=== sample float32", LONG)
    print(wide.asm)
