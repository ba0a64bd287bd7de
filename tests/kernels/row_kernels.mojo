"""Prints the PTX of the sampler and of the scores over each kind of row that a GPU has.

As `sampler.mojo` and `score.mojo` launch them, with plain pointers for tensors.
"""

from max.gpu import block_idx, thread_idx
from max.gpu.host import get_gpu_target
from srm.logits._gpu_block import BLOCK
from srm.logits._gpu_row import LONG, SHORT, GPURow
from srm.logits._logit_row import LogitRow
from srm.logits.sampler import _sample_row
from srm.logits.score import _score_row
from std.compile import compile_info
from std.sys import is_defined
from std.utils.static_tuple import StaticTuple

comptime Out[type: DType] = Pointer[Scalar[type], MutUntrackedOrigin]


@__llvm_metadata(
    `nvvm.maxntid`=StaticTuple[Int32, 1](BLOCK),
    `nvvm.minctasm`=__mlir_attr.`2 : index`,
)
def sample[
    dtype: DType, share: Int
](
    logits: Out[dtype],
    vocab: Int64,
    temperature: Out[DType.float32],
    top_k: Out[DType.int32],
    top_p: Out[DType.float32],
    min_p: Out[DType.float32],
    seeds: Out[DType.uint64],
    tokens: Out[DType.int32],
    logprobs: Out[DType.float32],
):
    var i = block_idx.x
    var source = logits.unsafe_offset(i * Int(vocab))

    @always_inline
    def run[Row: LogitRow, //](mut row: Row) {imm}:
        var token, logprob = _sample_row(
            row,
            temperature[unsafe_offset=i],
            Int(top_k[unsafe_offset=i]),
            top_p[unsafe_offset=i],
            min_p[unsafe_offset=i],
            seeds[unsafe_offset=i],
            i,
            thread_idx.x == 0,
        )
        if thread_idx.x == 0:
            tokens[unsafe_offset=i] = token
            logprobs[unsafe_offset=i] = logprob

    var row = GPURow[share=share](source, Int(vocab))
    run(row)


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


def main():
    comptime TARGET = get_gpu_target["sm_90a"]()
    comptime KIND = "object" if is_defined["object"]() else "asm"
    comptime BF16 = DType.bfloat16
    comptime F32 = DType.float32
    comptime for share in [SHORT, LONG, 0]:
        var sampler = compile_info[
            sample[BF16, share], emission_kind=KIND, target=TARGET
        ]()
        print("=== sample bfloat16", share)
        print(sampler.asm)
        var scorer = compile_info[
            score[BF16, share], emission_kind=KIND, target=TARGET
        ]()
        print("=== score bfloat16", share)
        print(scorer.asm)
    var wide = compile_info[
        sample[F32, LONG], emission_kind=KIND, target=TARGET
    ]()
    print("=== sample float32", LONG)
    print(wide.asm)
