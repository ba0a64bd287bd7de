"""What `sm90.mojo` does to the sums of a tile, one warp at a time: `finish_sums`.

A warp has 16 rows of BN columns. A thread of it, number t, holds columns 2 (t % 4) and the next one
of each eight, in rows t / 4 and t / 4 + 8: four sums that follow each other, the layout that wgmma
leaves, and stmatrix and ldmatrix exchange with shared memory. All is float32; what is written is
rounded once.

An output of 8 bits does not go through shared memory: the 16 columns that a thread has of each 64
lie beside each other in it, an order that only its reader has to know (`sm90.mojo`).
"""

import max.gpu.primitives.warp as warp
from layout import Coord, Idx, TileTensor, row_major
from layout.tma_async import TMATensorTile
from max.gpu import lane_id
from max.gpu.compute.mma import ld_matrix, st_matrix
from max.gpu.memory import fence_async_view_proxy
from max.gpu.sync import syncwarp
from std.math import exp, rsqrt
from std.memory import bitcast
from std.sys._assembly import inlined_assembly
from std.utils.numerics import neg_inf

from ..logits._logit_row import in_powers_of_2, inverse
from ..logits._sampling import Sampling
from ..mixer import _load, _store, _Unit
from ..norm import EPSILON

comptime BF16 = DType.bfloat16
"""Of factors, bias, residual and output."""
comptime E4M3 = DType.float8_e4m3fn
"""Of factors with scales, and of an output that is to be such a factor."""
comptime I8 = DType.int8
"""The same; rows of x have scales too, where they are not such an output."""
comptime F32 = DType.float32
"""Of sums, but of int8."""

comptime BN[N: Int] = 256 if N % 256 == 0 else 128
"""Columns of a tile of an output of N columns, and of what slices and moments are of."""
comptime CHUNK = 64
"""Columns that a warp writes at a time."""
comptime VECTOR = 8
"""Values of bfloat16 in the 16 bytes that a thread moves at a time."""
comptime PATCH_BYTES = 16 * CHUNK * 2
"""Shared memory of a warp: 16 rows of a chunk, in bfloat16."""

comptime OUT_TILE = Coord(Idx[16], Idx[CHUNK])
"""What TMA stores of the output at a time: a patch, which lies as a swizzle of 128 bytes has it."""
comptime OutTiles = TMATensorTile[BF16, OUT_TILE]
"""Describes the output, [M, N]."""

comptime Values[dtype: DType] = Pointer[
    Scalar[dtype], UntrackedOrigin[mut=True]
]
"""A tensor on the device."""

comptime Patch = Pointer[
    Scalar[BF16], UntrackedOrigin[mut=True], address_space=AddressSpace.SHARED
]
"""A warp's own shared memory."""

comptime Sums[N: Int, factors: DType] = SIMD[
    DType.uint32 if factors == I8 else F32, BN[N] // 2
]
"""A thread's share of a tile; of int8 the bits of 32-bit integers, which are exact."""

comptime Unit = _Unit[BF16, F32, False, False, False]
"""A recurrent unit whose tokens are an output."""

comptime Outputs[N: Int] = SIMD[DType.uint32, BN[N] // 4]
"""The same, rounded: two columns in a word, the two rows by turns."""


@fieldwise_init
struct Variants(ImplicitlyCopyable):
    """Kernels beside today's, which has none of them."""

    var tanh: Bool
    """Whether SiLU into bfloat16 is computed by a hyperbolic tangent."""
    var ahead: Bool
    """Whether what a chunk reads of memory is read a chunk ahead, the first before the sums."""
    var stores: Bool
    """Whether a warp's chunks of bfloat16 are stored by TMA, from two patches by turns."""
    var clusters: Bool
    """Whether a cluster has twice as many blocks, so that w is loaded half as often."""
    var rejection: Bool
    """Whether the sampler draws truncated rows from slices too."""
    var pdl: Bool
    """Whether a kernel starts while the one before it ends (`_pdl.mojo`)."""

    @staticmethod
    def named(names: StaticString) -> Self:
        """Choose variants.

        Args:
            names: Their names; other words are ignored, as they are of other kernels.

        Returns:
            The variants.
        """
        return Self(
            tanh="tanh" in names,
            ahead="ahead" in names,
            stores="stores" in names,
            clusters="clusters" in names,
            rejection="rejection" in names,
            pdl="pdl" in names,
        )


struct Parts(ImplicitlyCopyable):
    """What goes into an output besides the sum, and how."""

    var bias: Bool
    """Whether a bias is added."""
    var silu: Bool
    """Whether SiLU follows; then there is no residual."""
    var residual: Bool
    """Whether a residual is added last."""
    var slices: Bool
    """Whether each row's softmax is written for each tile; then nothing else goes into it."""
    var norm: Bool
    """Whether the rows of x count as normalised; then there is no bias but that of `columns`."""
    var moments: Bool
    """Whether each row's mean and sum of squares about it are written for each tile."""
    var factors: DType
    """Of both factors: bfloat16, or e4m3 or int8, whose sums have scales and a bias in `columns`."""
    var variants: Variants
    """How."""
    var heads: Int
    """Of the unit that rows which decode are mixed by; 0 if there is none."""
    var padding: Int
    """Columns behind those of w, which are -inf."""

    def __init__(
        out self,
        *,
        bias: Bool = False,
        silu: Bool = False,
        residual: Bool = False,
        slices: Bool = False,
        norm: Bool = False,
        moments: Bool = False,
        factors: DType = BF16,
        variants: StaticString = "",
        heads: Int = 0,
        padding: Int = 0,
    ):
        """Have the parts that are named.

        Args:
            bias: As the field.
            silu: As the field.
            residual: As the field.
            slices: As the field.
            norm: As the field.
            moments: As the field.
            factors: As the field.
            variants: Names of variants.
            heads: As the field.
            padding: As the field.
        """
        self.bias, self.silu, self.residual = bias, silu, residual
        self.slices, self.norm, self.moments = slices, norm, moments
        self.factors, self.variants = factors, Variants.named(variants)
        self.heads, self.padding = heads, padding

    def narrow(self) -> Bool:
        """Tell whether the output is what the factors are, of 8 bits.

        Returns:
            Whether it is: the one of SiLU, of factors of 8 bits.
        """
        return self.factors != BF16 and self.silu

    def has_row_scales(self) -> Bool:
        """Tell whether rows of x have scales.

        Returns:
            Whether they have: rows of a norm in int8.
        """
        return self.factors == I8 and self.silu

    def ahead(self) -> Bool:
        """Tell whether chunks are read ahead.

        Returns:
            Whether they are: but for an output of 8 bits, whose divisors have no registers left.
        """
        return self.variants.ahead and not self.narrow()

    def loads_early(self) -> Bool:
        """Tell whether the first weights are loaded before the kernel before has ended.

        Returns:
            Whether they are: but where rows are mixed, which leaves no registers.
        """
        return self.variants.pdl and self.heads == 0

    def patches(self) -> Int:
        """Count a warp's patches.

        Returns:
            Two where TMA stores them, else one.
        """
        return 2 if self.variants.stores and not self.narrow() else 1


@fieldwise_init
struct Tensors(ImplicitlyCopyable):
    """Where the parts are; one that is absent may point anywhere."""

    var out_: Values[BF16]
    """The output, [M, N]; of 8 bits too."""
    var bias: Values[BF16]
    """The bias, [N]."""
    var residual: Values[BF16]
    """The residual, [M, N]."""
    var slices: Values[F32]
    """Largest output and sum of what all weigh against it, or the moments; [M, N / BN, 2]."""
    var columns: Values[F32]
    """Sum of the column's weights, or its scale; and its bias, [N, 2]."""
    var moments: Values[F32]
    """Of x, as who wrote it left them: [M, K / BN, 2]; of int8 scales, [M]."""
    var divisors: Values[F32]
    """What an output in e4m3 is divided by, and one in int8 multiplied with, [N]."""
    var sampling: Values[DType.int32]
    """How each slot samples: records of `Sampling`."""
    var slots: Values[DType.int32]
    """Of the rows that are sampled, [D]."""
    var sampled: Int32
    """D."""
    var unit: Unit
    """What mixes the first rows, as many as it has, which have a token each."""

    def __init__(out self, out_: Values[BF16]):
        """Have an output and no part.

        Args:
            out_: The output.
        """
        var f = out_.unsafe_bitcast[Float32]()
        var i = out_.unsafe_bitcast[Int32]()
        var unit = Unit(
            out_, f, out_, i, i, i, i, f, f, f, f, f, out_, 0, 0, 0, 0, 0, 0
        )
        self = Self(out_, out_, out_, f, f, f, f, i, i, 0, unit)


@always_inline
def power_of_2(x: Float32) -> Float32:
    """Compute 2^x by one approximate instruction, right to 2^-22.

    Args:
        x: The exponent.

    Returns:
        The power, 0 below 2^-126.
    """
    return inlined_assembly[
        "ex2.approx.ftz.f32 $0, $1;",
        Float32,
        constraints="=f,f",
        has_side_effect=False,
    ](x)


@always_inline
def two_columns(word: UInt32) -> SIMD[F32, 2]:
    """Widen two outputs.

    Args:
        word: Both in bfloat16.

    Returns:
        Their values.
    """
    return bitcast[F32, 2](
        SIMD[DType.uint32, 2](word << 16, word & 0xFFFF_0000)
    )


@always_inline
def silu[
    width: SIMDLength, //
](x: SIMD[F32, width], divisor: SIMD[F32, width] = 1) -> SIMD[F32, width]:
    """Compute x / (1 + exp(-x)) by two approximate instructions a value, right to 1e-6 or so.

    Parameters:
        width: How many.

    Args:
        x: The values.
        divisor: What their SiLU is divided by.

    Returns:
        The quotients.
    """
    comptime MINUS_LOG2_E = -1.4426950408889634
    var y = SIMD[F32, width]()
    comptime for i in range(Int(width)):
        var grown = power_of_2(x[i] * MINUS_LOG2_E)
        var share = inlined_assembly[
            "rcp.approx.ftz.f32 $0, $1;",
            Float32,
            constraints="=f,f",
            has_side_effect=False,
        ](grown.fma(divisor[i], divisor[i]))
        y[i] = x[i] * share
    return y


@always_inline
def silu_by_tanh[
    width: SIMDLength, //
](half: SIMD[F32, width]) -> SIMD[F32, width]:
    """Compute x / (1 + exp(-x)) as h + h tanh(h), h = x / 2, by one approximate instruction a value.

    The tangent is right to 2^-11 of itself, so the error is at most 2^-12 of x.

    Parameters:
        width: How many.

    Args:
        half: Half of each value.

    Returns:
        Their SiLU.
    """
    var y = SIMD[F32, width]()
    comptime for i in range(Int(width)):
        var tangent = inlined_assembly[
            "tanh.approx.f32 $0, $1;",
            Float32,
            constraints="=f,f",
            has_side_effect=False,
        ](half[i])
        y[i] = half[i].fma(tangent, half[i])
    return y


@always_inline
def to_e4m3(a: Float32, b: Float32, c: Float32, d: Float32) -> UInt32:
    """Round to the nearest e4m3, ties to even, at most 448.

    Args:
        a: The value of the lowest byte.
        b: That of the next one.
        c: That of the third.
        d: That of the highest.

    Returns:
        The four bytes.
    """

    @always_inline
    def pair(low: Float32, high: Float32) -> UInt32:
        return UInt32(
            inlined_assembly[
                "cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;",
                UInt16,
                constraints="=h,f,f",
                has_side_effect=False,
            ](high, low)
        )

    return pair(a, b) | pair(c, d) << 16


@always_inline
def to_int8(values: SIMD[F32, 16], by: SIMD[F32, 16]) -> SIMD[DType.uint32, 4]:
    """Round products to the nearest int8, ties to even, from -127 to 127.

    Args:
        values: The factors.
        by: The other factors.

    Returns:
        The 16 bytes. Of NaN one is any number.
    """
    comptime MAGIC = 12_582_912.0  # 1.5 * 2^23: the lowest bits of a sum are the integer
    var y = values.fma(by, SIMD[F32, 16](MAGIC))
    y = min(max(y, MAGIC - 127), MAGIC + 127)
    return bitcast[DType.uint32, 4](
        bitcast[DType.uint32, 16](y).cast[DType.uint8]()
    )


@always_inline
def turn(values: SIMD[F32, 16]) -> SIMD[F32, 16]:
    """Compute a Hadamard transform, which spreads what is large over all values.

    Args:
        values: The values.

    Returns:
        Their sums, each with signs of its own: 4 times as long as a vector as the values are.
    """
    var x = values
    comptime for bit in range(4):
        var y = x
        comptime for i in range(16):
            comptime other = i ^ (1 << bit)
            y[i] = x[other] - x[i] if other < i else x[i] + x[other]
        x = y
    return x


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


@fieldwise_init
struct RowNorm(ImplicitlyCopyable):
    """Of the two rows that a thread has, twice each as the two columns that it has of eight.
    """

    var mean: SIMD[F32, 4]
    """Means."""
    var scale: SIMD[F32, 4]
    """1 / sqrt(variance + EPSILON), or 1 / temperature in powers of 2 or 0; or scales."""


struct MixedRow[N: Int](ImplicitlyCopyable):
    """Of the row lane % 16 of a warp: other lanes ask for it where they mix that row.

    Parameters:
        N: Columns of the output.
    """

    var position: Int32
    """Where its token stands, -1 where it is not mixed here."""
    var read_from: Int32
    """Where the tile's states come from, in tiles, unless the position is 0."""
    var write_to: Int32
    """Where they go."""

    @always_inline
    def __init__(out self, unit: Unit, row: Int, column: Int):
        """Read it, where it is one of the rows that a unit has.

        Args:
            unit: The unit.
            row: The warp's first row.
            column: The tile's first column.
        """
        self.position, self.read_from, self.write_to = -1, 0, 0
        var r = row + Int(lane_id()) % 16
        if r < Int(unit.num_rows):
            var tiles = Int32(Int(unit.pool_width) // BN[Self.N])
            var tile = Int32((Int(unit.pool_column) + column) // BN[Self.N])
            self.position = unit.positions[unsafe_offset=r]
            self.read_from = unit.read_slots[unsafe_offset=r] * tiles + tile
            self.write_to = unit.write_slots[unsafe_offset=r] * tiles + tile


@always_inline
def larger(a: UInt32, b: UInt32) -> UInt32:
    """Compare two numbers in bfloat16 with two, in one instruction.

    Args:
        a: Two.
        b: Two.

    Returns:
        The larger one of the first of each, and of the second.
    """
    return inlined_assembly[
        "max.bf16x2 $0, $1, $2;",
        UInt32,
        constraints="=r,r,r",
        has_side_effect=False,
    ](a, b)


@always_inline
def hide_padding[
    of_sums: DType, //, N: Int, padding: Int
](sums: SIMD[of_sums, BN[N] // 2], column: Int) -> SIMD[of_sums, BN[N] // 2]:
    """Put -inf into the columns that w has not.

    Parameters:
        of_sums: Of `Sums`, no integers.
        N: Columns of the output.
        padding: How many of them w has not, fewer than a tile has.

    Args:
        sums: The thread's.
        column: The tile's first column.

    Returns:
        The sums, of the last tile changed.
    """
    var hidden = sums
    if column == N - BN[N]:
        comptime for i in range(BN[N] // 2):
            var of = i // 4 * 8 + Int(lane_id()) % 4 * 2 + i % 2
            if of >= BN[N] - padding:
                hidden[i] = neg_inf[of_sums]()
    return hidden


@always_inline
def write_slices[
    N: Int
](
    outputs: Outputs[N],
    norm: RowNorm,
    slices: Values[F32],
    row: Int,
    column: Int,
    rows: Int,
):
    """Write the largest of a row's BN outputs, and the sum of powers of 2 of what others lack to it.

    Parameters:
        N: Columns of the output.

    Args:
        outputs: The outputs as they are after rounding.
        norm: Scales the thread's rows.
        slices: To where.
        row: The warp's first row.
        column: The tile's first column.
        rows: Rows of the output.
    """
    comptime for half in range(2):
        var most = outputs[half]
        comptime for i in range(half + 2, BN[N] // 4, 2):
            most = larger(most, outputs[i])
        comptime for step in range(2):
            most = larger(most, warp.shuffle_xor(most, UInt32(1 << step)))
        var largest = two_columns(most).reduce_max()
        var scale = norm.scale[half * 2]
        var shift = largest * scale
        var total = SIMD[F32, 2](0)
        comptime for i in range(half, BN[N] // 4, 2):
            var y = two_columns(outputs[i])
            comptime for k in range(2):
                total[k] += power_of_2(y[k].fma(scale, -shift))
        var sum = total.reduce_add()
        comptime for step in range(2):
            sum += warp.shuffle_xor(sum, UInt32(1 << step))
        # The shift was rounded, and with it all exponents.
        sum *= power_of_2(-largest.fma(scale, -shift))
        var r = row + Int(lane_id()) // 4 + half * 8
        if lane_id() % 4 == 0 and r < rows:
            slices.unsafe_store[alignment=8](
                (r * (N // BN[N]) + column // BN[N]) * 2,
                SIMD[F32, 2](largest, sum),
            )


@always_inline
def write_moments[
    N: Int
](outputs: Outputs[N], moments: Values[F32], row: Int, column: Int, rows: Int):
    """Write the mean of a row's BN outputs and the sum of the squares of what differs from it.

    Parameters:
        N: Columns of the output.

    Args:
        outputs: The outputs as they are after rounding.
        moments: To where.
        row: The warp's first row.
        column: The tile's first column.
        rows: Rows of the output.
    """

    # Two columns of both rows that a thread has.
    @always_inline
    def columns(i: Int) {imm} -> Tuple[SIMD[F32, 2], SIMD[F32, 2]]:
        var words = SIMD[DType.uint32, 2](outputs[i], outputs[i + 1])
        return bitcast[F32, 2](words << 16), bitcast[F32, 2](
            words & 0xFFFF_0000
        )

    @always_inline
    def over_lanes(var total: SIMD[F32, 2]) -> SIMD[F32, 2]:
        comptime for half in range(2):
            comptime for step in range(2):
                total[half] += warp.shuffle_xor(total[half], UInt32(1 << step))
        return total

    var even, odd = SIMD[F32, 2](0), SIMD[F32, 2](0)
    comptime for i in range(0, BN[N] // 4, 2):
        var first, second = columns(i)
        even += first
        odd += second
    var mean = over_lanes(even + odd) / Float32(BN[N])
    even, odd = SIMD[F32, 2](0), SIMD[F32, 2](0)
    comptime for i in range(0, BN[N] // 4, 2):
        var first, second = columns(i)
        even = (first - mean).fma(first - mean, even)
        odd = (second - mean).fma(second - mean, odd)
    var squares = over_lanes(even + odd)
    comptime for half in range(2):
        var r = row + Int(lane_id()) // 4 + half * 8
        if lane_id() % 4 == 0 and r < rows:
            moments.unsafe_store[alignment=8](
                (r * (N // BN[N]) + column // BN[N]) * 2,
                SIMD[F32, 2](mean[half], squares[half]),
            )


@always_inline
def read_norm[
    K: Int, parts: Parts
](moments: Values[F32], row: Int, rows: Int) -> RowNorm:
    """Join the moments of the tiles of rows, in one order; or read scales. Tiles are of one size.

    Parameters:
        K: Columns of a row.
        parts: Whether there is a norm; else it changes nothing.

    Args:
        moments: Of all rows.
        row: The warp's first row.
        rows: Rows of the output.

    Returns:
        What normalises the thread's rows.
    """
    comptime TILES = K // BN[K]
    var norm = RowNorm(0, 1)
    comptime for half in range(
        2 if parts.norm or parts.has_row_scales() else 0
    ):
        var r = min(row + Int(lane_id()) // 4 + half * 8, rows - 1)
        comptime if parts.has_row_scales():
            norm.scale[half * 2] = moments[unsafe_offset=r]
            norm.scale[half * 2 + 1] = norm.scale[half * 2]
            continue

        @always_inline
        def of(tile: Int) {imm} -> SIMD[F32, 2]:
            return moments.unsafe_load[width=2, alignment=8](
                (r * TILES + tile) * 2
            )

        var total = SIMD[F32, 2](0)
        comptime for tile in range(TILES):
            total += of(tile)
        var mean = total[0] * (Float32(1) / Float32(TILES))
        var between = Float32(0)
        comptime for tile in range(TILES):
            var apart = of(tile)[0] - mean
            between = apart.fma(apart, between)
        var variance = (total[1] + between * Float32(BN[K])) * (
            Float32(1) / Float32(K)
        )
        comptime for i in range(half * 2, half * 2 + 2):
            norm.mean[i] = mean
            norm.scale[i] = rsqrt(variance + EPSILON)
    return norm


@always_inline
def read_temperatures[rejects: Bool](to: Tensors, row: Int) -> RowNorm:
    """Read at which temperature rows are sampled.

    Parameters:
        rejects: Whether the sampler draws by rejection.

    Args:
        to: The tensors.
        row: The warp's first row.

    Returns:
        What scales the thread's rows, 0 for those whose slices nobody reads.
    """
    var norm = RowNorm(0, 0)
    comptime for half in range(2):
        var r = row + Int(lane_id()) // 4 + half * 8
        if r < Int(to.sampled):
            var asked = Sampling.of(to.sampling, to.slots[unsafe_offset=r])
            if asked.is_drawn_from_all[rejects]():
                norm.scale[half * 2] = in_powers_of_2(
                    inverse(asked.temperature)
                )
    return norm


struct Chunk[N: Int, parts: Parts](ImplicitlyCopyable):
    """What a thread reads of memory for a chunk; what has no part in it stays undefined.

    Parameters:
        N: Columns of the output.
        parts: What goes into it.
    """

    var bias: SIMD[BF16, 16]
    """Of two columns of each eight."""
    var columns: SIMD[F32, 32]
    """Of the same columns: sums or scales, and biases."""
    var divisors: SIMD[F32, 16]
    """Of the same columns."""
    var residual: SIMD[BF16, 4 * VECTOR]
    """Vector lane % 8 of rows i * 4 + lane / 8; 0 of rows beyond the output."""

    def __init__(out self):
        """Have nothing."""
        self.bias, self.columns, self.divisors, self.residual = 0, 0, 1, 0

    @always_inline
    def read_columns(mut self, to: Tensors, column: Int):
        """Read all but the residual.

        Args:
            to: The tensors.
            column: The first column of the chunk.
        """
        comptime for eight in range(CHUNK // 8):
            var of = column + eight * 8 + Int(lane_id()) % 4 * 2
            comptime if Self.parts.bias:
                self.bias = self.bias.insert[offset=eight * 2](
                    to.bias.unsafe_load[width=2, alignment=4](of)
                )
            comptime if Self.parts.norm or Self.parts.factors != BF16:
                self.columns = self.columns.insert[offset=eight * 4](
                    to.columns.unsafe_load[width=4, alignment=16](of * 2)
                )
            comptime if Self.parts.narrow():
                self.divisors = self.divisors.insert[offset=eight * 2](
                    to.divisors.unsafe_load[width=2, alignment=8](of)
                )

    @always_inline
    def read_residual(mut self, to: Tensors, row: Int, column: Int, rows: Int):
        """Read the residual, if there is one.

        Args:
            to: The tensors.
            row: The warp's first row.
            column: The first column of the chunk.
            rows: Rows of the output.
        """
        self.residual = 0
        comptime for i in range(4 if Self.parts.residual else 0):
            var r = row + i * 4 + Int(lane_id()) // 8
            if r < rows:
                self.residual = self.residual.insert[offset=i * VECTOR](
                    to.residual.unsafe_load[width=VECTOR, alignment=16](
                        r * Self.N + column + Int(lane_id()) % 8 * VECTOR
                    )
                )


@always_inline
def finish_sums[
    of_sums: DType, //, N: Int, parts: Parts
](
    sums: SIMD[of_sums, BN[N] // 2],
    first: Chunk[N, parts],
    norm: RowNorm,
    mixed: MixedRow[N],
    to: Tensors,
    out_tiles: OutTiles,
    patches: Patch,
    row: Int,
    column: Int,
    rows: Int,
):
    """Turn a warp's sums into output.

    A chunk at a time goes through the warp's patch, so that memory is read and written 128 bytes of
    a row at once. The residual of the next chunk is under way meanwhile, as its states are where
    rows are mixed: of these a thread has 4 neighbouring channels in either half of a chunk.

    Parameters:
        of_sums: Of `Sums`.
        N: Columns of the output.
        parts: What else goes into it.

    Args:
        sums: The thread's.
        first: What is read for the first chunk, if it is read ahead.
        norm: Of the thread's rows.
        mixed: A row to be mixed, if any is.
        to: The tensors.
        out_tiles: Describes the output, where TMA stores it.
        patches: The warp's shared memory.
        row: The warp's first row.
        column: The tile's first column.
        rows: Rows of the output.
    """
    var lane = Int(lane_id())
    comptime by_tma = parts.patches() > 1

    # As it moves vectors, a thread has rows i * 4 + lane / 8 and vector lane % 8 of them.
    @always_inline
    def place(chunk: Int, i: Int) {imm} -> Int:
        return (row + i * 4 + lane // 8) * N + (
            column + chunk * CHUNK + lane % 8 * VECTOR
        )

    # Rows lane / 8 * 4 + i of the warp are mixed by a thread, 4 channels of either HALF of a chunk.
    comptime HALF = CHUNK // 2

    @always_inline
    def of_row(values: Int32, i: Int) {imm} -> Int32:
        return warp.shuffle_idx(values, UInt32(lane // 8 * 4 + i))

    @always_inline
    def states_at(tiles: Int32, i: Int, chunk: Int) {imm} -> Int:
        return Int(of_row(tiles, i)) * BN[N] + chunk * CHUNK + lane % 8 * 4

    @always_inline
    def fetch_states(chunk: Int) {imm} -> SIMD[F32, 32]:
        var found = SIMD[F32, 32](0)
        comptime for i in range(4):
            var at = states_at(mixed.read_from, i, chunk)
            var s = _load[4, 2](to.unit.state, at, HALF)
            found = found.insert[offset=i * 8](s)
        return found

    var states = SIMD[F32, 32](0)
    comptime if parts.heads > 0:
        states = fetch_states(0)
    var outputs = Outputs[N](0)
    var coming = first
    comptime ahead = parts.ahead()
    comptime if not ahead:
        coming.read_residual(to, row, column, rows)
    comptime for chunk in range(BN[N] // CHUNK):
        comptime next = chunk + 1
        var patch = patches
        comptime if by_tma:
            patch = patches.unsafe_offset(chunk % 2 * 16 * CHUNK)
            # The store before the last one has read this patch.
            if lane == 0:
                out_tiles.wait_group[1]()
            syncwarp()
        comptime if parts.residual:
            comptime for i in range(4):
                patch.unsafe_store[alignment=16](
                    vector_at(i * 4 + lane // 8, lane % 8),
                    coming.residual.slice[VECTOR, offset=i * VECTOR](),
                )
            comptime if next < BN[N] // CHUNK:
                coming.read_residual(to, row, column + next * CHUNK, rows)
            syncwarp()
        comptime if not ahead:
            coming.read_columns(to, column + chunk * CHUNK)
        var here = coming
        comptime if ahead and next < BN[N] // CHUNK:
            coming.read_columns(to, column + next * CHUNK)
        var words = SIMD[DType.uint32, 8](
            0
        )  # of an output of 8 bits: 4 of each of the two rows
        var inner = SIMD[F32, 32](0)  # what becomes an int8 output
        comptime for eight in range(0, CHUNK // 8, 2):
            comptime at_sum = chunk * 32 + eight * 4
            var part = sums.slice[8, offset=at_sum]()
            var y = part.cast[F32]()
            comptime if parts.factors == I8:
                y = bitcast[DType.int32, 8](part).cast[F32]()
            var at = patch.unsafe_offset(
                vector_at(lane % 16, eight + lane // 16)
            )
            var divisor = SIMD[F32, 8](1)
            comptime for i in range(2):
                comptime of = eight + i
                var z = y.slice[4, offset=i * 4]()
                var c, b = here.columns.slice[4, offset=of * 4]().deinterleave()
                comptime if parts.bias:
                    var added = here.bias.slice[2, offset=of * 2]()
                    z += added.join(added).cast[F32]()
                comptime if parts.norm:
                    z = norm.scale.fma(
                        (-norm.mean).fma(c.join(c), z), b.join(b)
                    )
                comptime if parts.has_row_scales():
                    z *= norm.scale
                comptime if parts.factors != BF16:
                    z = z.fma(c.join(c), b.join(b))
                comptime if parts.narrow():
                    var by = here.divisors.slice[2, offset=of * 2]()
                    divisor = divisor.insert[offset=i * 4](by.join(by))
                y = y.insert[offset=i * 4](z)
            comptime if parts.silu:
                comptime if parts.factors == I8:  # half is in the columns
                    y = silu_by_tanh(y)
                elif parts.variants.tanh and not parts.narrow():
                    y = silu_by_tanh(y * 0.5)
                else:
                    y = silu(y, divisor)
            comptime if parts.narrow() and parts.factors == I8:
                inner = inner.insert[offset=eight * 4](y)
                continue
            comptime if parts.narrow():
                words[eight // 2] = to_e4m3(y[0], y[1], y[4], y[5])
                words[4 + eight // 2] = to_e4m3(y[2], y[3], y[6], y[7])
                continue
            comptime if parts.residual:
                y += ld_matrix[simd_width=8](at).cast[F32]()
            var rounded = bitcast[DType.uint32, 4](y.cast[BF16]())
            st_matrix[simd_width=4](at, bitcast[F32, 4](rounded))
            outputs = outputs.insert[offset=chunk * 16 + eight * 2](rounded)
        comptime if parts.narrow():
            comptime for half in range(2):
                comptime if parts.factors == I8:
                    var of_row = SIMD[F32, 16](0)
                    comptime for i in range(16):
                        of_row[i] = inner[i // 2 * 4 + half * 2 + i % 2]
                    words = words.insert[offset=half * 4](
                        to_int8(turn(of_row), here.divisors)
                    )
                var r = row + half * 8 + lane // 4
                if r < rows:
                    to.out_.unsafe_bitcast[UInt32]().unsafe_store[alignment=16](
                        (r * N + column + chunk * CHUNK) // 4 + lane % 4 * 4,
                        words.slice[4, offset=half * 4](),
                    )
            continue
        comptime if by_tma:
            fence_async_view_proxy()
            syncwarp()
            if lane == 0:
                out_tiles.async_store(
                    TileTensor(patch, row_major[16, CHUNK]()),
                    (column + chunk * CHUNK, row),
                )
                out_tiles.commit_group()
            continue
        syncwarp()
        comptime if parts.heads > 0:
            var now = states
            comptime if chunk + 1 < BN[N] // CHUNK:
                states = fetch_states(chunk + 1)
            var c = column + chunk * CHUNK
            var head = Int(UInt32(c) // UInt32(N // parts.heads))
            var decay = to.unit.decay[unsafe_offset=head]
            var rest = to.unit.decay[unsafe_offset=head + parts.heads]
            comptime for i in range(4):
                var r = lane // 8 * 4 + i
                var at = vector_at(r, lane % 8 // 2) + lane % 2 * 4
                var x = patch.unsafe_load[width=4, alignment=8](at)
                var y = x.join(
                    patch.unsafe_load[width=4, alignment=8](at ^ HALF)
                ).cast[F32]()
                var position = of_row(mixed.position, i)
                var s = now.slice[8, offset=i * 8]()
                s = s if position > 0 else 0
                var of = head * Int(to.unit.n_ctx) + Int(max(position, 0))
                var mixed_y = to.unit.feed(of, decay, rest, y, s)
                var write_to = states_at(mixed.write_to, i, chunk)
                if position >= 0:
                    y = mixed_y
                    _store[4, 2](to.unit.state, write_to, HALF, s)
                if row + r < rows:
                    var place = (row + r) * N + c + lane % 8 * 4
                    _store[4, 2](to.out_, place, HALF, y)
            syncwarp()
            continue
        comptime for i in range(4):
            var y = patch.unsafe_load[width=VECTOR, alignment=16](
                vector_at(i * 4 + lane // 8, lane % 8)
            )
            if row + i * 4 + lane // 8 < rows:
                to.out_.unsafe_store[alignment=16](place(chunk, i), y)
        syncwarp()
    comptime if parts.moments:
        write_moments[N](outputs, to.slices, row, column, rows)
    comptime if parts.slices:
        if warp.max(max(norm.scale[0], norm.scale[2])) > 0:
            write_slices[N](outputs, norm, to.slices, row, column, rows)
