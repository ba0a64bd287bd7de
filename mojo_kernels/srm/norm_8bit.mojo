"""Layer normalisation into 8 bits on an sm_90 GPU (`srm_norm_8bit`), computed in float32.

    y = (x - mean(x)) / sqrt(variance(x) + EPSILON) * scale      row by row, rounded to e4m3

Gain and shift are for the next product's weights and bias. What they are left out of is bounded:
its squares add up to d at most, so no value exceeds sqrt(d). With scale * sqrt(d) <= 448, which
e4m3 can hold, nothing is ever clipped, and no row has to be measured for a scale of its own.

In int8 y is of the Hadamard transform (`turn`) of each 16 normalised values, and a row has a scale,
by which its largest value is 127: y * scales = turn((x - mean(x)) / sqrt(variance(x) + EPSILON)).
The scale of a row of zeros is 0, that of one with NaN or infinities is NaN.

A warp has a row, a lane 8 neighbouring values of each 256, in int8 16 of 512. A row's bits do not
depend on others.

    y        [T, d]   e4m3, int8   out; d % 256 == 0, in int8 d % 512 == 0
    scales   [T]      float32      out, of int8; else [0]
    x        [T, d]   bfloat16     in
"""

import extensibility
import max.gpu.primitives.warp as warp
from extensibility import InputTensor, OutputTensor
from max.gpu import WARP_SIZE, block_idx, lane_id, warp_id
from max.gpu.host import DeviceContext
from std.math import ceildiv, rsqrt
from std.utils.static_tuple import StaticTuple

from ._pdl import launch_attributes, start_after_last
from ._values import Values, untracked
from .norm import EPSILON
from .products._sm90_epilogue import (
    BF16,
    E4M3,
    F32,
    I8,
    to_e4m3,
    to_int8,
    turn,
)

comptime SHARE[dtype: DType] = 16 if dtype == I8 else 8
"""Neighbouring values of a lane.

Parameters:
    dtype: Of y.
"""
comptime LEAST = 1e-30
"""What the largest value of a row counts as at least, where it is divided by."""
comptime WARPS = 8
"""Rows of a block."""


@always_inline
def add_lanes(value: Float32) -> Float32:
    """Add up the values of a warp's lanes, in one order.

    Args:
        value: The lane's.

    Returns:
        The sum, the same in every lane.
    """
    var sum = value
    comptime for step in range(5):
        sum += warp.shuffle_xor(sum, UInt32(1 << step))
    return sum


def normalise_rows[
    dtype: DType, //, d: Int, scale: Int, pdl: Bool = False
](y: Values[dtype], scales: Values[F32], x: Values[BF16], rows: Int64):
    """Normalise a row, what a warp of a block of WARPS does.

    Parameters:
        dtype: Of y: e4m3, or int8.
        d: Columns.
        scale: What is multiplied with, in e4m3.
        pdl: Whether the kernel starts while the one before it ends.

    Args:
        y: The normalised rows.
        scales: Their scales, in int8.
        x: The rows.
        rows: Rows. An Int may not cross to the device: its width is the host's.
    """
    comptime share = SHARE[dtype]
    comptime assert d % (share * WARP_SIZE) == 0
    comptime shares = d // (share * WARP_SIZE)
    start_after_last[pdl]()
    var row = block_idx.x * WARPS + Int(warp_id())
    if row >= Int(rows):
        return
    var at = row * d + Int(lane_id()) * share
    var held = StaticTuple[SIMD[F32, share], shares]()
    var sum = Float32(0)
    comptime for i in range(shares):
        held[i] = x.unsafe_load[width=share, alignment=16](
            at + i * share * WARP_SIZE
        ).cast[F32]()
        sum += held[i].reduce_add()
    var mean = add_lanes(sum) / Float32(d)
    var square = Float32(0)
    comptime for i in range(shares):
        held[i] -= mean
        square += (held[i] * held[i]).reduce_add()
    var by = rsqrt(add_lanes(square) / Float32(d) + EPSILON)
    comptime if dtype == E4M3:
        by *= Float32(scale)
    else:
        var largest = Float32(0)
        comptime for i in range(shares):
            held[i] = rebind[SIMD[F32, share]](
                turn(rebind[SIMD[F32, 16]](held[i]))
            )
            largest = max(largest, abs(held[i]).reduce_max())
        largest = warp.max(largest)
        if lane_id() == 0:
            scales[unsafe_offset=row] = largest * by * (Float32(1) / 127)
        by = 127 / max(largest, LEAST)
    comptime for i in range(shares):
        var words: SIMD[DType.uint32, share // 4]
        comptime if dtype == E4M3:
            var z = held[i] * by
            words = SIMD[DType.uint32, share // 4](
                to_e4m3(z[0], z[1], z[2], z[3]), to_e4m3(z[4], z[5], z[6], z[7])
            )
        else:
            words = rebind[SIMD[DType.uint32, share // 4]](
                to_int8(rebind[SIMD[F32, 16]](held[i]), by)
            )
        y.unsafe_bitcast[UInt32]().unsafe_store[alignment=share](
            (at + i * share * WARP_SIZE) // 4, words
        )


@extensibility.register("srm_norm_8bit")
struct Norm8Bit:
    """The op."""

    @staticmethod
    def execute[
        dtype: DType, //, target: StaticString, d: Int, scale: Int, pdl: Bool
    ](
        y: OutputTensor[dtype=dtype, rank=2, ...],
        scales: OutputTensor[dtype=F32, rank=1, ...],
        x: InputTensor[dtype=BF16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Run the op; shapes are in the module's docstring.

        Parameters:
            dtype: Of y.
            target: "gpu".
            d: Columns.
            scale: What normalised values are multiplied with, in e4m3.
            pdl: Whether the kernel starts while the one before it ends.

        Args:
            y: The normalised rows.
            scales: Their scales, in int8.
            x: The rows.
            ctx: The device.

        Raises:
            If the device refuses.
        """
        comptime assert target == "gpu", "srm_norm_8bit is for sm_90 alone"
        var rows = x.dim_size(0)
        if rows == 0:
            return
        ctx.enqueue_function[normalise_rows[dtype=dtype, d, scale, pdl]](
            untracked(y.unsafe_ptr()),
            untracked(scales.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            Int64(rows),
            grid_dim=ceildiv(rows, WARPS),
            block_dim=WARPS * WARP_SIZE,
            attributes=launch_attributes[pdl](),
        )
