"""Layer normalisation on the CPU (`srm_layer_norm`), computed in float32.

    y = (x - mean(x)) / sqrt(variance(x) + EPSILON) * weight + bias      row by row

The variance is the biased one, of the differences from the mean in a pass of its own. A row is
summed by one core in one order, so its bits do not depend on the other rows.

    y         [T, d]   any float   out
    x         [T, d]   as y        in
    weight    [d]      as y        in
    bias      [d]      as y        in
"""

import extensibility
from extensibility import InputTensor, OutputTensor
from max.algorithm import sync_parallelize
from max.gpu.host import DeviceContext
from std.math import align_down, sqrt
from std.sys import simd_width_of

from .parallel import num_tasks

comptime EPSILON = 1e-5
"""What torch adds to the variance."""

comptime WIDTH = simd_width_of[DType.float32]()
"""Values in a vector."""

comptime Vector = SIMD[DType.float32, WIDTH]
"""As many values as a register holds."""


@always_inline
def load[
    dtype: DType, //, width: Int
](values: Pointer[Scalar[dtype], MutAnyOrigin], at: Int) -> SIMD[
    DType.float32, width
]:
    """Read neighbouring values as float32.

    Parameters:
        dtype: Of the values in memory.
        width: How many.

    Args:
        values: The first value of a row.
        at: Where in the row.

    Returns:
        The values.
    """
    return values.unsafe_load[width=width](at).cast[DType.float32]()


def normalise_row[
    dtype: DType, //
](
    y: Pointer[Scalar[dtype], MutAnyOrigin],
    x: Pointer[Scalar[dtype], MutAnyOrigin],
    weight: Pointer[Scalar[dtype], MutAnyOrigin],
    bias: Pointer[Scalar[dtype], MutAnyOrigin],
    dim: Int,
):
    """Normalise one row.

    Parameters:
        dtype: Of all values.

    Args:
        y: The normalised row.
        x: The row.
        weight: Scale of each column.
        bias: Added to each column.
        dim: Columns.
    """
    var whole = align_down(dim, WIDTH)

    var sums = Vector(0)
    for i in range(0, whole, WIDTH):
        sums += load[WIDTH](x, i)
    var sum = sums.reduce_add()
    for i in range(whole, dim):
        sum += load[1](x, i)
    var mean = sum / Float32(dim)

    var squares = Vector(0)
    for i in range(0, whole, WIDTH):
        var centred = load[WIDTH](x, i) - mean
        squares = centred.fma(centred, squares)
    var square = squares.reduce_add()
    for i in range(whole, dim):
        var centred = load[1](x, i) - mean
        square = centred.fma(centred, square)
    var scale = 1 / sqrt(square / Float32(dim) + EPSILON)

    @always_inline
    def normalise[width: Int](i: Int) {imm}:
        var centred = load[width](x, i) - mean
        var value = (centred * scale).fma(
            load[width](weight, i), load[width](bias, i)
        )
        y.unsafe_store(i, value.cast[dtype]())

    for i in range(0, whole, WIDTH):
        normalise[WIDTH](i)
    for i in range(whole, dim):
        normalise[1](i)


@extensibility.register("srm_layer_norm")
struct LayerNorm:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString
    ](
        y: OutputTensor[rank=2, ...],
        x: InputTensor[dtype=y.dtype, rank=2, ...],
        weight: InputTensor[dtype=y.dtype, rank=1, ...],
        bias: InputTensor[dtype=y.dtype, rank=1, ...],
        ctx: DeviceContext,
    ):
        """Run the op; shapes are in the module's docstring.

        Parameters:
            target: "cpu".

        Args:
            y: The normalised rows.
            x: The rows.
            weight: Scale of each column.
            bias: Added to each column.
            ctx: The device.
        """
        comptime assert (
            target == "cpu"
        ), "srm_layer_norm is for CPUs; GPUs have MAX's own"
        var num_rows = x.dim_size(0)
        var dim = x.dim_size(1)
        var tasks = num_tasks(num_rows * dim)
        var y_ptr = y.unsafe_ptr()
        var x_ptr = x.unsafe_ptr()
        var weight_ptr = weight.unsafe_ptr()
        var bias_ptr = bias.unsafe_ptr()

        def normalise_share(task: Int) {imm}:
            for row in range(
                task * num_rows // tasks, (task + 1) * num_rows // tasks
            ):
                normalise_row(
                    y_ptr.unsafe_offset(row * dim),
                    x_ptr.unsafe_offset(row * dim),
                    weight_ptr,
                    bias_ptr,
                    dim,
                )

        sync_parallelize(normalise_share, tasks)
