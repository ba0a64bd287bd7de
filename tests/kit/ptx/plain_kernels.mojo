"""Prints the PTX of `srm_linear_plain`, by dtype and what follows the sums."""

from max.gpu.host import get_gpu_target
from srm.products.plain import _Product
from srm._values import Values
from std.compile import compile_info

comptime TARGET = get_gpu_target["sm_90a"]()


def multiply[
    dtype: DType, has_bias: Bool, has_residual: Bool, silu: Bool
](
    out_: Values[dtype],
    x: Values[dtype],
    w: Values[dtype],
    bias: Values[dtype],
    residual: Values[dtype],
    num_rows: Int64,
    depth: Int64,
    columns: Int64,
):
    var product = _Product[dtype](
        out_, x, w, bias, residual, num_rows, depth, columns
    )
    product.multiply_tile[has_bias, has_residual, silu]()


def main():
    comptime for dtype in [DType.bfloat16, DType.float32]:
        comptime for kind in range(4):
            comptime has_bias = kind > 0
            comptime silu = kind == 1
            comptime has_residual = kind == 2
            var printed = compile_info[
                multiply[dtype, has_bias, has_residual, silu],
                emission_kind="asm",
                target=TARGET,
            ]()
            print("===", dtype, kind)
            print(printed.asm)
