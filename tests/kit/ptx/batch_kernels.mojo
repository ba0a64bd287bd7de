"""Prints the PTX of the ops over rows of activations and states, with plain pointers for tensors.

A name tells the op, the dtype of activations, and how many values a thread has. With `-D pdl` those
that then start while the kernel before them ends do.
"""

from max.gpu.host import get_gpu_target
from srm.embedding import embed_thread
from srm.expand import _Rows
from srm.mixer import _Unit
from srm.norm_8bit import normalise_rows
from srm.slots import _SlotCopy
from srm.taps import _Taps
from srm._values import Values
from std.compile import compile_info
from std.sys import is_defined, size_of

comptime TARGET = get_gpu_target["sm_90a"]()
comptime KIND = "object" if is_defined["object"]() else "asm"
comptime PDL = is_defined["pdl"]()


def mix[
    dtype: DType, width: Int, parts: Int, all: Bool
](
    y: Values[dtype],
    state: Values[DType.float32],
    x: Values[dtype],
    read_slots: Values[DType.int32],
    write_slots: Values[DType.int32],
    positions: Values[DType.int32],
    row_offsets: Values[DType.int32],
    alpha_in: Values[DType.float32],
    alpha_out: Values[DType.float32],
    beta: Values[DType.float32],
    decay: Values[DType.float32],
    gamma: Values[DType.float32],
    residual: Values[dtype],
    num_rows: Int64,
    num_heads: Int64,
    head_dim: Int64,
    n_ctx: Int64,
    pool_width: Int64,
    pool_column: Int64,
):
    """`all` is with gamma, SiLU and residual; else none of them."""
    var unit = _Unit[dtype, DType.float32, all, all, all](
        y,
        state,
        x,
        read_slots,
        write_slots,
        positions,
        row_offsets,
        alpha_in,
        alpha_out,
        beta,
        decay,
        gamma,
        residual,
        num_rows,
        num_heads,
        head_dim,
        n_ctx,
        pool_width,
        pool_column,
    )
    unit.mix_thread[width, parts, PDL]()


def copy_slots[
    gathers: Bool, values: Int
](
    state: Values[DType.float32],
    last_token: Values[DType.int32],
    packed: Values[DType.float32],
    slots: Values[DType.int32],
    num_slots: Int64,
    width: Int64,
):
    var all = _SlotCopy[gathers](
        state, last_token, packed, slots, num_slots, width
    )
    all.copy_thread[values]()


def taps[
    dtype: DType, width: Int
](
    y: Values[dtype],
    q: Values[dtype],
    positions: Values[DType.int32],
    row_offsets: Values[DType.int32],
    weights: Values[DType.float32],
    beta: Values[DType.float32],
    residual: Values[dtype],
    num_tokens: Int64,
    num_rows: Int64,
    dim: Int64,
    num_taps: Int64,
    n_ctx: Int64,
):
    var all = _Taps[dtype](
        y,
        q,
        positions,
        row_offsets,
        weights,
        beta,
        residual,
        num_tokens,
        num_rows,
        dim,
        num_taps,
        n_ctx,
    )
    all.tap_thread[width]()


def expand(
    token_ids: Values[DType.int32],
    read_slots: Values[DType.int32],
    write_slots: Values[DType.int32],
    positions: Values[DType.int32],
    row_offsets: Values[DType.int32],
    sampling: Values[DType.int32],
    slots: Values[DType.int32],
    decode_positions: Values[DType.int32],
    new: Values[DType.int32],
    prefill: Values[DType.int32],
    prompt_tokens: Values[DType.int32],
    num_tokens: Int64,
    num_rows: Int64,
    num_decode: Int64,
    num_new: Int64,
):
    var rows = _Rows(
        token_ids,
        read_slots,
        write_slots,
        positions,
        row_offsets,
        sampling,
        slots,
        decode_positions,
        new,
        prefill,
        prompt_tokens,
        num_tokens,
        num_rows,
        num_decode,
        num_new,
    )
    rows.expand_thread()


def main():
    var expander = compile_info[expand, emission_kind=KIND, target=TARGET]()
    print("=== expand")
    print(expander.asm)
    comptime for dtype in [DType.bfloat16, DType.float32]:
        comptime for parts in [2, 1]:
            comptime for all in [False, True]:
                comptime width = 4 if parts == 2 else 1
                var mixer = compile_info[
                    mix[dtype, width, parts, all],
                    emission_kind=KIND,
                    target=TARGET,
                ]()
                print("=== mix" + ("_all" if all else ""), dtype, parts * width)
                print(mixer.asm)
        comptime for width in [16 // size_of[dtype](), 1]:
            var embedder = compile_info[
                embed_thread[dtype=dtype, width, pdl=PDL],
                emission_kind=KIND,
                target=TARGET,
            ]()
            print("=== embed", dtype, width)
            print(embedder.asm)
            var tapper = compile_info[
                taps[dtype, width], emission_kind=KIND, target=TARGET
            ]()
            print("=== taps", dtype, width)
            print(tapper.asm)
    comptime for width in [8, 4]:
        var streamer = compile_info[
            embed_thread[dtype=DType.bfloat16, width, True, PDL],
            emission_kind=KIND,
            target=TARGET,
        ]()
        print("=== embed_stream bfloat16", width)
        print(streamer.asm)
    comptime for values in [4, 1]:
        comptime for gathers in [True, False]:
            var copier = compile_info[
                copy_slots[gathers, values], emission_kind=KIND, target=TARGET
            ]()
            print("===", "gather" if gathers else "scatter", values)
            print(copier.asm)
    comptime for d in [512, 1024]:
        comptime for dtype in [DType.float8_e4m3fn, DType.int8]:
            var normaliser = compile_info[
                normalise_rows[dtype=dtype, d, 16 * 512 // d, PDL],
                emission_kind=KIND,
                target=TARGET,
            ]()
            comptime name = "norm_int8" if dtype == DType.int8 else "norm_e4m3"
            print("===", name, d)
            print(normaliser.asm)
