"""The kernel of `sm90.mojo`: `product_kernel`.

A block of three warpgroups stays on its processor and takes tiles of BM x BN; the blocks of a
cluster take tiles below each other. Warpgroup 0 loads, 1 and 2 multiply 64 rows each; of a tile of
64 rows 1 alone. A ring of STAGES lies between them: a stage holds ROW_BYTES of the BM rows of x and
of the BN rows of w, and each block loads a part of those of w for all. `full` of a stage counts the
bytes that have come, `empty` the consumers of all blocks that are done with it.

No consumer waits for another one: each warp finishes its own sums (`_sm90_epilogue.mojo`), while the
other consumer multiplies, as far as the ring lets them drift apart.

With `pdl` the stages of the first turn get their rows of w before the wait for the kernel before,
unless rows are mixed.
"""

from layout import Coord, Idx, TileTensor, row_major
from layout.tma_async import SharedMemBarrier, TMATensorTile
from max.gpu import (
    MAX_THREADS_PER_BLOCK_METADATA,
    block_idx,
    grid_dim,
    thread_idx,
)
from max.gpu.compute.mma import (
    WGMMADescriptor,
    wgmma_async,
    wgmma_commit_group_sync,
    wgmma_fence_aligned,
    wgmma_wait_group_sync,
)
from max.gpu.host.nvidia.tma import TensorMapSwizzle
from max.gpu.intrinsics import warpgroup_reg_alloc, warpgroup_reg_dealloc
from max.gpu.memory import external_memory, fence_mbarrier_init
from max.gpu.primitives.cluster import cluster_sync
from std.math import ceildiv
from std.sys import size_of
from std.utils.static_tuple import StaticTuple

from ._sm90_epilogue import (
    BF16,
    BN,
    Chunk,
    E4M3,
    F32,
    I8,
    OutTiles,
    PATCH_BYTES,
    MixedRow,
    Parts,
    Sums,
    Tensors,
    Unit,
    Values,
    finish_sums,
    hide_padding,
    read_norm,
    read_temperatures,
)
from .._pdl import start_after_last

comptime MOST_ROWS = 128
"""Of a tile."""
comptime LEAST_ROWS = 64
"""Of a tile, those of one consumer. What is done to a row is the same."""
comptime CLUSTER_ROWS[parts: Parts] = 512 if parts.variants.clusters else 256
"""Of a cluster's tiles, one below the other."""
comptime BLOCKS[BM: Int, parts: Parts] = CLUSTER_ROWS[parts] // BM
"""Of a cluster: two, or four with small tiles, so that w is loaded as often for the same rows."""
comptime ROW_BYTES = 128
"""Of a row of a stage: what the swizzle spans."""
comptime DEPTH_BYTES = 32
"""Of a row that one product takes."""
comptime STAGE_BYTES[N: Int] = (MOST_ROWS + BN[N]) * ROW_BYTES
"""Of a stage."""
comptime STAGES[K: Int, parts: Parts] = 4 if K % (
    4 * BK[parts.factors]
) == 0 else 3 if K % (3 * BK[parts.factors]) == 0 else 2
"""Stages of the ring, which goes round once or more a tile."""
comptime PATCHES[N: Int, K: Int, parts: Parts] = STAGES[K, parts] * STAGE_BYTES[
    N
]
"""Where the patches of the eight consuming warps begin."""
comptime BARRIERS[N: Int, K: Int, parts: Parts] = PATCHES[
    N, K, parts
] + 8 * PATCH_BYTES * parts.patches()
"""Where the barriers begin, `full` before `empty`."""
comptime SHARED_BYTES[N: Int, K: Int, parts: Parts] = BARRIERS[
    N, K, parts
] + 2 * STAGES[K, parts] * 8
"""Shared memory of a block."""
comptime THREADS = 384
"""Threads of a block."""
comptime MOVED[factors: DType] = E4M3 if factors == I8 else factors
"""What TMA takes factors for. MAX 26.7 describes no int8, which are bytes too."""
comptime BK[factors: DType] = ROW_BYTES // size_of[factors]()
"""Depth of a stage."""
comptime X_TILE[factors: DType, BM: Int] = Coord(Idx[BM], Idx[BK[factors]])
"""What a block loads of x for a stage."""
comptime W_TILE[N: Int, parts: Parts, BM: Int] = Coord(
    Idx[BN[N] // BLOCKS[BM, parts]], Idx[BK[parts.factors]]
)
"""What it loads of w."""


@__llvm_metadata(
    MAX_THREADS_PER_BLOCK_METADATA=StaticTuple[Int32, 1](Int32(THREADS)),
    `nvvm.cluster_dim`=StaticTuple[Int32, 3](Int32(BLOCKS[BM, parts]), 1, 1),
)
@__llvm_arg_metadata(x_tiles, `nvvm.grid_constant`)
@__llvm_arg_metadata(w_tiles, `nvvm.grid_constant`)
@__llvm_arg_metadata(out_tiles, `nvvm.grid_constant`)
def product_kernel[
    N: Int, K: Int, parts: Parts, BM: Int
](
    x_tiles: TMATensorTile[MOVED[parts.factors], X_TILE[parts.factors, BM]],
    w_tiles: TMATensorTile[MOVED[parts.factors], W_TILE[N, parts, BM]],
    out_tiles: OutTiles,
    out_: Values[BF16],
    bias: Values[BF16],
    residual: Values[BF16],
    slices: Values[F32],
    columns: Values[F32],
    moments: Values[F32],
    divisors: Values[F32],
    sampling: Values[DType.int32],
    slots: Values[DType.int32],
    sampled: Int32,
    unit: Unit,
    rows: Int32,
):
    """Multiply, on a grid of any number of clusters.

    Parameters:
        N: Columns of the output.
        K: Length of the sums.
        parts: What else goes into the output.
        BM: Rows of a tile, MOST_ROWS or LEAST_ROWS.

    Args:
        x_tiles: Describes x, [M, K].
        w_tiles: Describes w, [N, K].
        out_tiles: Describes the output, where TMA stores it, else anything.
        out_: The output, [M, N].
        bias: The bias, [N]; as all that follow it may point anywhere where `parts` has it not.
        residual: The residual, [M, N].
        slices: Largest outputs and what all weigh, or moments of the output, [M, N / BN, 2].
        columns: Sums of the weights' columns, or scales; and biases, [N, 2].
        moments: Of the rows of x, [M, K / BN, 2]; or their scales, [M].
        divisors: Of an output of 8 bits, [N].
        sampling: How each slot samples.
        slots: Of the rows that are sampled.
        sampled: How many those are.
        unit: What mixes the rows that decode.
        rows: M.
    """
    comptime factors = parts.factors
    comptime depth = BK[factors]
    comptime stages = STAGES[K, parts]
    comptime assert K % (depth * stages) == 0 and N % BN[N] == 0
    comptime assert parts.padding < BN[N]
    comptime consumers = BM // LEAST_ROWS
    comptime blocks = BLOCKS[BM, parts]
    comptime w_rows = BN[N] // blocks
    comptime turns = K // depth // stages
    comptime tiles_n = N // BN[N]
    comptime STAGE_LOADS = Int32((BM + BN[N]) * ROW_BYTES)
    var shared = external_memory[
        UInt8, address_space=AddressSpace.SHARED, alignment=1024
    ]()
    var full = shared.unsafe_offset(BARRIERS[N, K, parts]).unsafe_bitcast[
        SharedMemBarrier
    ]()
    var empty = full.unsafe_offset(stages)
    var rank = Int(block_idx.x) % blocks
    if thread_idx.x == 0:
        comptime for s in range(stages):
            full[unsafe_offset=s].init(1)
            empty[unsafe_offset=s].init(Int32(consumers * blocks))
    fence_mbarrier_init()
    cluster_sync()

    var count = ceildiv(Int(rows), CLUSTER_ROWS[parts]) * tiles_n
    var stride = Int(grid_dim.x) // blocks
    var group = Int(thread_idx.x) // 128

    @always_inline
    def load_weights[s: Int](tile: Int, turn: Int) {imm}:
        var w_to = shared.unsafe_offset(
            s * STAGE_BYTES[N] + (BM + rank * w_rows) * ROW_BYTES
        )
        w_tiles.async_multicast_load(
            TileTensor(
                w_to.unsafe_bitcast[Scalar[MOVED[factors]]](),
                row_major[w_rows, depth](),
            ),
            full[unsafe_offset=s],
            (
                (turn * stages + s) * depth,
                tile % tiles_n * BN[N] + rank * w_rows,
            ),
            UInt16((1 << blocks) - 1),
        )

    comptime if parts.loads_early():
        if thread_idx.x == 0:
            comptime for s in range(stages):
                full[unsafe_offset=s].expect_bytes(STAGE_LOADS)
                load_weights[s](Int(block_idx.x) // blocks, 0)
    start_after_last[parts.variants.pdl]()
    if group == 0:
        warpgroup_reg_dealloc[40]()
        if thread_idx.x == 0:
            var phase = UInt32(1)  # an empty ring
            var has_weights = parts.loads_early()  # of this turn
            for tile in range(Int(block_idx.x) // blocks, count, stride):
                var m = (tile // tiles_n * blocks + rank) * BM
                for turn in range(turns):
                    comptime for s in range(stages):
                        if not has_weights:
                            empty[unsafe_offset=s].wait(phase)
                            full[unsafe_offset=s].expect_bytes(STAGE_LOADS)
                        var k = (turn * stages + s) * depth
                        var x_to = shared.unsafe_offset(s * STAGE_BYTES[N])
                        # A multicast to this block alone: MAX 26.7 clears a bit of the barrier's
                        # address in a plain load, which may be the block's rank in its cluster.
                        x_tiles.async_multicast_load(
                            TileTensor(
                                x_to.unsafe_bitcast[Scalar[MOVED[factors]]](),
                                row_major[BM, depth](),
                            ),
                            full[unsafe_offset=s],
                            (k, m),
                            UInt16(1 << rank),
                        )
                        if not has_weights:
                            load_weights[s](tile, turn)
                    has_weights = False
                    phase ^= 1
    elif group <= consumers:
        warpgroup_reg_alloc[232]()
        var consumer = group - 1
        var in_group = Int(thread_idx.x) % 128
        var warp_row = consumer * LEAST_ROWS + in_group // 32 * 16
        var patches = shared.unsafe_offset(
            PATCHES[N, K, parts]
            + warp_row // 16 * PATCH_BYTES * parts.patches()
        ).unsafe_bitcast[Scalar[BF16]]()
        var to = Tensors(
            out_,
            bias,
            residual,
            slices,
            columns,
            moments,
            divisors,
            sampling,
            slots,
            sampled,
            unit,
        )
        var phase = UInt32(0)
        for tile in range(Int(block_idx.x) // blocks, count, stride):
            var row = (tile // tiles_n * blocks + rank) * BM + warp_row
            var norm = read_norm[K, parts](moments, row, Int(rows))
            comptime if parts.slices:
                norm = read_temperatures[parts.variants.rejection](to, row)
            var column = tile % tiles_n * BN[N]
            var mixed = MixedRow[N](unit, row, column)
            var first = Chunk[N, parts]()
            comptime if parts.ahead():
                first.read_columns(to, column)
                first.read_residual(to, row, column, Int(rows))
            var sums = Sums[N, factors](0)
            for turn in range(turns):
                comptime for s in range(stages):
                    full[unsafe_offset=s].wait(phase)
                    var x_from = shared.unsafe_offset(s * STAGE_BYTES[N])
                    var w_from = x_from.unsafe_offset(BM * ROW_BYTES)
                    var x_at = WGMMADescriptor[factors].create[
                        64, 1, TensorMapSwizzle.SWIZZLE_128B
                    ](
                        x_from.unsafe_offset(
                            consumer * LEAST_ROWS * ROW_BYTES
                        ).unsafe_bitcast[Scalar[factors]]()
                    )
                    var w_at = WGMMADescriptor[factors].create[
                        64, 1, TensorMapSwizzle.SWIZZLE_128B
                    ](w_from.unsafe_bitcast[Scalar[factors]]())
                    wgmma_fence_aligned()
                    comptime for k in range(0, ROW_BYTES, DEPTH_BYTES):
                        sums = wgmma_async[
                            64,
                            BN[N],
                            DEPTH_BYTES // size_of[factors](),
                            a_type=factors,
                            b_type=factors,
                        ](x_at + k, w_at + k, sums)
                    wgmma_commit_group_sync()
                    # The product before this one is done, and with it its stage is free.
                    wgmma_wait_group_sync[1]()
                    if (s > 0 or turn > 0) and in_group < blocks:
                        empty[
                            unsafe_offset=(s + stages - 1) % stages
                        ].arrive_cluster(UInt32(in_group))
                phase ^= 1
            wgmma_wait_group_sync[0]()
            if in_group < blocks:
                empty[unsafe_offset=stages - 1].arrive_cluster(UInt32(in_group))
            comptime if parts.padding > 0:
                sums = hide_padding[N, parts.padding](sums, column)
            finish_sums[N, parts](
                sums,
                first,
                norm,
                mixed,
                to,
                out_tiles,
                patches,
                row,
                column,
                Int(rows),
            )
        comptime if parts.patches() > 1:
            out_tiles.wait_group[0]()  # shared memory lasts as long as a block
    cluster_sync()  # a block that ended could not be arrived at
