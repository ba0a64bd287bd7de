"""Layer normalisation into e4m3 on an sm_90 GPU (`srm_norm_e4m3`), computed in float32.

    y = (x - mean(x)) / sqrt(variance(x) + EPSILON) * scale      row by row, rounded to e4m3

Gain and shift are for the next product's weights and bias. What they are left out of is bounded:
its squares add up to d at most, so no value exceeds sqrt(d). With scale * sqrt(d) <= 448, which
e4m3 can hold, nothing is ever clipped, and no row has to be measured for a scale of its own.

A warp has a row, a lane 8 neighbouring values of each 256. A row's bits do not depend on others.

    y    [T, d]   e4m3       out; d % 256 == 0
    x    [T, d]   bfloat16   in
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
from .products._sm90_epilogue import BF16, E4M3, F32, to_e4m3

comptime SHARE = 8
"""Neighbouring values of a lane."""
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
    d: Int, scale: Int, pdl: Bool = False
](y: Values[E4M3], x: Values[BF16], rows: Int64):
    """Normalise a row, what a warp of a block of WARPS does.

    Parameters:
        d: Columns.
        scale: What is multiplied with.
        pdl: Whether the kernel starts while the one before it ends.

    Args:
        y: The normalised rows.
        x: The rows.
        rows: Rows. An Int may not cross to the device: its width is the host's.
    """
    comptime assert d % (SHARE * WARP_SIZE) == 0
    comptime shares = d // (SHARE * WARP_SIZE)
    start_after_last[pdl]()
    var row = block_idx.x * WARPS + Int(warp_id())
    if row >= Int(rows):
        return
    var at = row * d + Int(lane_id()) * SHARE
    var held = StaticTuple[SIMD[F32, SHARE], shares]()
    var sum = Float32(0)
    comptime for i in range(shares):
        held[i] = x.unsafe_load[width=SHARE, alignment=16](
            at + i * SHARE * WARP_SIZE
        ).cast[F32]()
        sum += held[i].reduce_add()
    var mean = add_lanes(sum) / Float32(d)
    var square = Float32(0)
    comptime for i in range(shares):
        held[i] -= mean
        square += (held[i] * held[i]).reduce_add()
    var by = rsqrt(add_lanes(square) / Float32(d) + EPSILON) * Float32(scale)
    comptime for i in range(shares):
        var z = held[i] * by
        y.unsafe_bitcast[UInt32]().unsafe_store[alignment=SHARE](
            (at + i * SHARE * WARP_SIZE) // 4,
            SIMD[DType.uint32, 2](
                to_e4m3(z[0], z[1], z[2], z[3]), to_e4m3(z[4], z[5], z[6], z[7])
            ),
        )


@extensibility.register("srm_norm_e4m3")
struct NormE4M3:
    """The op."""

    @staticmethod
    def execute[
        target: StaticString, d: Int, scale: Int, pdl: Bool
    ](
        y: OutputTensor[dtype=E4M3, rank=2, ...],
        x: InputTensor[dtype=BF16, rank=2, ...],
        ctx: DeviceContext,
    ) raises:
        """Run the op; shapes are in the module's docstring.

        Parameters:
            target: "gpu".
            d: Columns.
            scale: What normalised values are multiplied with.
            pdl: Whether the kernel starts while the one before it ends.

        Args:
            y: The normalised rows.
            x: The rows.
            ctx: The device.

        Raises:
            If the device refuses.
        """
        comptime assert target == "gpu", "srm_norm_e4m3 is for sm_90 alone"
        var rows = x.dim_size(0)
        if rows == 0:
            return
        ctx.enqueue_function[normalise_rows[d, scale, pdl]](
            untracked(y.unsafe_ptr()),
            untracked(x.unsafe_ptr()),
            Int64(rows),
            grid_dim=ceildiv(rows, WARPS),
            block_dim=WARPS * WARP_SIZE,
            attributes=launch_attributes[pdl](),
        )
