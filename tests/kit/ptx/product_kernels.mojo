"""Prints the PTX of the products of `sm90.mojo`, each (N, K, epilogue) under its name.

With `-D wide` those of both benchmark widths, with `-D narrow` those of small models, whose tiles
may have 128 columns and whose heads may have columns that w has not, else small ones of every
epilogue. With
`-D variants=NAMES` they are those of the variants, and small ones only of epilogues that have any.
Those whose tiles have LEAST_ROWS are named "small_" and so on.
"""

from max.gpu.host import get_gpu_target
from srm.products._sm90_epilogue import E4M3, I8, Parts
from srm.products._sm90_kernel import LEAST_ROWS, MOST_ROWS, product_kernel
from std.compile import compile_info
from std.sys import get_defined_string, is_defined

comptime TARGET = get_gpu_target["sm_90a"]()
comptime KIND = "object" if is_defined["object"]() else "asm"
comptime VARIANTS = get_defined_string["variants", ""]()
comptime UP = Parts(bias=True, silu=True)
comptime DOWN = Parts(bias=True, residual=True)
comptime PROJ_IN = Parts(bias=True)
comptime HEAD = Parts()
comptime SLICES = Parts(slices=True, variants=VARIANTS)
comptime NORMED_UP = Parts(norm=True, silu=True, variants=VARIANTS)
comptime NORMED_PROJ_IN = Parts(norm=True, variants=VARIANTS)
comptime MIXED_PROJ_IN = Parts(
    norm=True, heads=4, variants="pdl" if "pdl" in VARIANTS else ""
)
comptime PADDED[padding: Int] = Parts(
    slices=True, variants=VARIANTS, padding=padding
)
comptime MEASURED_DOWN = Parts(
    bias=True, residual=True, moments=True, variants=VARIANTS
)
comptime UP_E4M3 = Parts(silu=True, factors=E4M3, variants=VARIANTS)
comptime DOWN_E4M3 = Parts(
    residual=True, moments=True, factors=E4M3, variants=VARIANTS
)
comptime UP_INT8 = Parts(silu=True, factors=I8, variants=VARIANTS)
comptime DOWN_INT8 = Parts(
    residual=True, moments=True, factors=I8, variants=VARIANTS
)


def show[N: Int, K: Int, parts: Parts, BM: Int = MOST_ROWS](name: String):
    var made = compile_info[
        product_kernel[N, K, parts, BM], emission_kind=KIND, target=TARGET
    ]()
    print("=== " + name, N, K)
    print(made.asm)


def show_both[N: Int, K: Int, parts: Parts](name: String):
    show[N, K, parts](name)
    show[N, K, parts, LEAST_ROWS]("small_" + name)


def main():
    comptime if is_defined["wide"]():
        comptime for d in [512, 1024]:
            show[4 * d, d, UP]("up")
            show[4 * d, d, NORMED_UP]("normed_up")
            show[d, 4 * d, DOWN]("down")
            show_both[d, 4 * d, MEASURED_DOWN]("measured_down")
            show_both[d, d, MEASURED_DOWN]("measured_down")
            show[d, d, PROJ_IN]("proj_in")
            show_both[d, d, NORMED_PROJ_IN]("normed_proj_in")
            show_both[d, d, MIXED_PROJ_IN]("mixed_proj_in")
            show[8192, d, HEAD]("head")
            show[8192, d, SLICES]("slices")
            show[4 * d, d, UP_E4M3]("up_e4m3")
            show_both[d, 4 * d, DOWN_E4M3]("down_e4m3")
            show[4 * d, d, UP_INT8]("up_int8")
            show_both[d, 4 * d, DOWN_INT8]("down_int8")
    elif is_defined["narrow"]():
        comptime for d in [128, 256, 384]:
            show[4 * d, d, NORMED_UP]("normed_up")
            show_both[d, 4 * d, MEASURED_DOWN]("measured_down")
            show_both[d, d, MEASURED_DOWN]("measured_down")
            show_both[d, d, NORMED_PROJ_IN]("normed_proj_in")
        show[384, 384, Parts(norm=True, heads=6)]("mixed_proj_in")
        show[2048, 256, SLICES]("slices")
        show_both[1024, 128, PADDED[10]]("slices")
        show[1024, 384, PADDED[24]]("slices")
        show[1280, 128, PADDED[255]]("slices")
    else:
        comptime for K in [256, 512]:
            comptime if not is_defined["variants"]():
                show[512, K, UP]("up")
                show[512, K, DOWN]("down")
                show[512, K, PROJ_IN]("proj_in")
                show[512, K, HEAD]("head")
            show[512, K, SLICES]("slices")
            show[512, K, NORMED_UP]("normed_up")
            show[512, K, NORMED_PROJ_IN]("normed_proj_in")
            show[512, K, MIXED_PROJ_IN]("mixed_proj_in")
            show[512, K, MEASURED_DOWN]("measured_down")
        comptime for K in [512, 1024]:
            show[512, K, UP_E4M3]("up_e4m3")
            show[512, K, DOWN_E4M3]("down_e4m3")
            show[512, K, UP_INT8]("up_int8")
            show[512, K, DOWN_INT8]("down_int8")
        comptime if not is_defined["variants"]():
            show[512, 256, UP, LEAST_ROWS]("small_up")
            show[512, 256, DOWN, LEAST_ROWS]("small_down")
            show[512, 256, PROJ_IN, LEAST_ROWS]("small_proj_in")
            show[512, 256, HEAD, LEAST_ROWS]("small_head")
        show[512, 256, SLICES, LEAST_ROWS]("small_slices")
        show[512, 256, NORMED_UP, LEAST_ROWS]("small_normed_up")
        show[512, 256, NORMED_PROJ_IN, LEAST_ROWS]("small_normed_proj_in")
        show[512, 256, MIXED_PROJ_IN, LEAST_ROWS]("small_mixed_proj_in")
        show[512, 256, MEASURED_DOWN, LEAST_ROWS]("small_measured_down")
        show[512, 512, UP_E4M3, LEAST_ROWS]("small_up_e4m3")
        show[512, 512, DOWN_E4M3, LEAST_ROWS]("small_down_e4m3")
        show[512, 512, UP_INT8, LEAST_ROWS]("small_up_int8")
        show[512, 512, DOWN_INT8, LEAST_ROWS]("small_down_int8")
