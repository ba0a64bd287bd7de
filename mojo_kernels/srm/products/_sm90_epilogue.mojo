"""What `sm90.mojo` does to the sums of a tile, one warp at a time: `finish_sums`.

A warp has 16 rows of BN columns. A thread of it, number t, holds columns 2 (t % 4) and the next one
of each eight, in rows t / 4 and t / 4 + 8: four sums that follow each other, the layout that wgmma
leaves, and stmatrix and ldmatrix exchange with shared memory. All is float32; what is written is
rounded once.
"""

import max.gpu.primitives.warp as warp
from max.gpu import lane_id
from max.gpu.compute.mma import ld_matrix, st_matrix
from max.gpu.sync import syncwarp
from std.math import exp
from std.memory import bitcast
from std.sys._assembly import inlined_assembly

comptime BF16 = DType.bfloat16
"""Of factors, bias, residual and output."""
comptime F32 = DType.float32
"""Of sums."""

comptime BN = 256
"""Columns of a tile."""
comptime CHUNK = 64
"""Columns that a warp writes at a time."""
comptime VECTOR = 8
"""Values of bfloat16 in the 16 bytes that a thread moves at a time."""
comptime PATCH_BYTES = 16 * CHUNK * 2
"""Shared memory of a warp: 16 rows of a chunk, in bfloat16."""

comptime Values[dtype: DType] = Pointer[
    Scalar[dtype], UntrackedOrigin[mut=True]
]
"""A tensor on the device."""

comptime Patch = Pointer[
    Scalar[BF16], UntrackedOrigin[mut=True], address_space=AddressSpace.SHARED
]
"""A warp's own shared memory."""

comptime Sums = SIMD[F32, BN // 2]
"""A thread's share of a tile."""


@fieldwise_init
struct Parts(ImplicitlyCopyable):
    """What goes into an output besides the sum."""

    var bias: Bool
    """Whether a bias is added."""
    var silu: Bool
    """Whether SiLU follows; then there is no residual."""
    var residual: Bool
    """Whether a residual is added last."""
    var slices: Bool
    """Whether each row's largest output and sum of exponentials are written for each tile."""


@fieldwise_init
struct Tensors(ImplicitlyCopyable):
    """Where the parts are; one that is absent may point anywhere."""

    var out_: Values[BF16]
    """The output, [M, N]."""
    var bias: Values[BF16]
    """The bias, [N]."""
    var residual: Values[BF16]
    """The residual, [M, N]."""
    var slices: Values[F32]
    """Largest output and sum of exp(output - largest), [M, N / BN, 2]."""


@always_inline
def silu[width: SIMDLength, //](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Compute x / (1 + exp(-x)) by two approximate instructions a value, right to 1e-6 or so.

    Parameters:
        width: How many.

    Args:
        x: The values.

    Returns:
        Their SiLU.
    """
    comptime MINUS_LOG2_E = -1.4426950408889634
    var y = SIMD[F32, width]()
    comptime for i in range(Int(width)):
        var grown = inlined_assembly[
            "ex2.approx.ftz.f32 $0, $1;",
            Float32,
            constraints="=f,f",
            has_side_effect=False,
        ](x[i] * MINUS_LOG2_E)
        var share = inlined_assembly[
            "rcp.approx.ftz.f32 $0, $1;",
            Float32,
            constraints="=f,f",
            has_side_effect=False,
        ](grown + 1)
        y[i] = x[i] * share
    return y


@always_inline
def vector_at(row: Int, vector: Int) -> Int:
    """Find 16 bytes in a patch; eight lanes that read or write a column meet no bank twice.

    Args:
        row: Of the warp's 16.
        vector: Which 8 columns of the chunk.

    Returns:
        The index of the first value.
    """
    return row * CHUNK + (vector ^ (row % 8)) * VECTOR


@always_inline
def write_slices[
    N: Int
](sums: Sums, slices: Values[F32], row: Int, column: Int, rows: Int):
    """Write the largest of a row's BN outputs and the sum of their exponentials over it.

    Parameters:
        N: Columns of the output.

    Args:
        sums: The outputs before rounding.
        slices: To where.
        row: The warp's first row.
        column: The tile's first column.
        rows: Rows of the output.
    """
    var outputs = sums.cast[BF16]().cast[F32]()
    comptime for half in range(2):
        var largest = outputs[half * 2]
        comptime for i in range(half * 2, BN // 2, 4):
            largest = max(largest, max(outputs[i], outputs[i + 1]))
        comptime for step in range(2):
            largest = max(largest, warp.shuffle_xor(largest, UInt32(1 << step)))
        var total = Float32(0)
        comptime for i in range(half * 2, BN // 2, 4):
            total += exp(outputs[i] - largest)
            total += exp(outputs[i + 1] - largest)
        comptime for step in range(2):
            total += warp.shuffle_xor(total, UInt32(1 << step))
        var r = row + Int(lane_id()) // 4 + half * 8
        if lane_id() % 4 == 0 and r < rows:
            slices.unsafe_store[alignment=8](
                (r * (N // BN) + column // BN) * 2,
                SIMD[F32, 2](largest, total),
            )


@always_inline
def finish_sums[
    N: Int, parts: Parts
](sums: Sums, to: Tensors, patch: Patch, row: Int, column: Int, rows: Int):
    """Turn a warp's sums into output.

    A chunk at a time goes through the warp's patch, so that memory is read and written 128 bytes of
    a row at once. The residual of the next chunk is under way meanwhile.

    Parameters:
        N: Columns of the output.
        parts: What else goes into it.

    Args:
        sums: The thread's.
        to: The tensors.
        patch: The warp's shared memory.
        row: The warp's first row.
        column: The tile's first column.
        rows: Rows of the output.
    """
    var lane = Int(lane_id())
    comptime if parts.slices:
        write_slices[N](sums, to.slices, row, column, rows)

    # As it moves vectors, a thread has rows i * 4 + lane / 8 and vector lane % 8 of them.
    @always_inline
    def place(chunk: Int, i: Int) {imm} -> Int:
        return (row + i * 4 + lane // 8) * N + (
            column + chunk * CHUNK + lane % 8 * VECTOR
        )

    @always_inline
    def fetch(chunk: Int) {imm} -> SIMD[BF16, 4 * VECTOR]:
        var found = SIMD[BF16, 4 * VECTOR](0)
        comptime for i in range(4):
            if row + i * 4 + lane // 8 < rows:
                found = found.insert[offset=i * VECTOR](
                    to.residual.unsafe_load[width=VECTOR, alignment=16](
                        place(chunk, i)
                    )
                )
        return found

    var coming = SIMD[BF16, 4 * VECTOR](0)
    comptime if parts.residual:
        coming = fetch(0)
    comptime for chunk in range(BN // CHUNK):
        comptime if parts.residual:
            comptime for i in range(4):
                patch.unsafe_store[alignment=16](
                    vector_at(i * 4 + lane // 8, lane % 8),
                    coming.slice[VECTOR, offset=i * VECTOR](),
                )
            comptime if chunk + 1 < BN // CHUNK:
                coming = fetch(chunk + 1)
            syncwarp()
        comptime for eight in range(0, CHUNK // 8, 2):
            var y = sums.slice[8, offset=chunk * 32 + eight * 4]()
            var at = patch.unsafe_offset(
                vector_at(lane % 16, eight + lane // 16)
            )
            comptime if parts.bias:
                comptime for i in range(2):
                    var b = to.bias.unsafe_load[width=2, alignment=4](
                        column + chunk * CHUNK + (eight + i) * 8 + lane % 4 * 2
                    ).cast[F32]()
                    y = y.insert[offset=i * 4](
                        y.slice[4, offset=i * 4]() + b.join(b)
                    )
            comptime if parts.silu:
                y = silu(y)
            comptime if parts.residual:
                y += ld_matrix[simd_width=8](at).cast[F32]()
            st_matrix[simd_width=4](at, bitcast[F32, 4](y.cast[BF16]()))
        syncwarp()
        comptime for i in range(4):
            var y = patch.unsafe_load[width=VECTOR, alignment=16](
                vector_at(i * 4 + lane // 8, lane % 8)
            )
            if row + i * 4 + lane // 8 < rows:
                to.out_.unsafe_store[alignment=16](place(chunk, i), y)
        syncwarp()
