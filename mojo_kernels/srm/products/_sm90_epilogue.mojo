"""What `sm90.mojo` does to the sums of a tile, one warp at a time: `finish_sums`.

A warp has 16 rows of BN columns. A thread of it, number t, holds columns 2 (t % 4) and the next one
of each eight, in rows t / 4 and t / 4 + 8: four sums that follow each other, the layout that wgmma
leaves, and stmatrix and ldmatrix exchange with shared memory. All is float32; what is written is
rounded once.

An output in e4m3 does not go through shared memory: the 16 columns that a thread has of each 64 lie
beside each other in it, an order that only its reader has to know (`sm90.mojo`).
"""

import max.gpu.primitives.warp as warp
from max.gpu import lane_id
from max.gpu.compute.mma import ld_matrix, st_matrix
from max.gpu.sync import syncwarp
from std.math import exp, rsqrt
from std.memory import bitcast
from std.sys._assembly import inlined_assembly

from ..logits._logit_row import in_powers_of_2, inverse
from ..logits._sampling import Sampling
from ..norm import EPSILON

comptime BF16 = DType.bfloat16
"""Of factors, bias, residual and output."""
comptime E4M3 = DType.float8_e4m3fn
"""Of factors with scales, and of an output that is to be such a factor."""
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

comptime Outputs = SIMD[DType.uint32, BN // 4]
"""The same, rounded: two columns in a word, the two rows by turns."""


@fieldwise_init
struct Variants(ImplicitlyCopyable):
    """Kernels beside today's, which has none of them."""

    var tanh: Bool
    """Whether SiLU into bfloat16 is computed by a hyperbolic tangent."""
    var rejection: Bool
    """Whether the sampler draws truncated rows from slices too."""

    @staticmethod
    def named(names: StaticString) -> Self:
        """Choose variants.

        Args:
            names: Their names; other words are ignored, as they are of other kernels.

        Returns:
            The variants.
        """
        return Self(tanh="tanh" in names, rejection="rejection" in names)


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
    """Of both factors: bfloat16, or e4m3, whose sums have scales and a bias in `columns`."""
    var variants: Variants
    """How."""

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
        """
        self.bias, self.silu, self.residual = bias, silu, residual
        self.slices, self.norm, self.moments = slices, norm, moments
        self.factors, self.variants = factors, Variants.named(variants)

    def narrow(self) -> Bool:
        """Tell whether the output is e4m3.

        Returns:
            Whether it is: the one of SiLU, of factors in e4m3.
        """
        return self.factors == E4M3 and self.silu


@fieldwise_init
struct Tensors(ImplicitlyCopyable):
    """Where the parts are; one that is absent may point anywhere."""

    var out_: Values[BF16]
    """The output, [M, N]; of e4m3 too."""
    var bias: Values[BF16]
    """The bias, [N]."""
    var residual: Values[BF16]
    """The residual, [M, N]."""
    var slices: Values[F32]
    """Largest output and sum of what all weigh against it, or the moments; [M, N / BN, 2]."""
    var columns: Values[F32]
    """Sum of the column's weights, or its scale; and its bias, [N, 2]."""
    var moments: Values[F32]
    """Of x, as who wrote it left them: [M, K / BN, 2]."""
    var divisors: Values[F32]
    """What an output in e4m3 is divided by, [N]."""
    var sampling: Values[DType.int32]
    """How each slot samples: records of `Sampling`."""
    var slots: Values[DType.int32]
    """Of the rows that are sampled, [D]."""
    var sampled: Int32
    """D."""

    def __init__(out self, out_: Values[BF16]):
        """Have an output and no part.

        Args:
            out_: The output.
        """
        var any = out_.unsafe_bitcast[Float32]()
        var ints = out_.unsafe_bitcast[Int32]()
        self = Self(out_, out_, out_, any, any, any, any, ints, ints, 0)


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
def silu_by_tanh[width: SIMDLength, //](x: SIMD[F32, width]) -> SIMD[F32, width]:
    """Compute x / (1 + exp(-x)) as h + h tanh(h), h = x / 2, by one approximate instruction a value.

    The tangent is right to 2^-11 of itself, so the error is at most 2^-12 of x.

    Parameters:
        width: How many.

    Args:
        x: The values.

    Returns:
        Their SiLU.
    """
    var half = x * 0.5
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
    """1 / sqrt(variance + EPSILON), or 1 / temperature in powers of 2 or 0."""


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
def write_slices[
    N: Int
](
    outputs: Outputs,
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
        comptime for i in range(half + 2, BN // 4, 2):
            most = larger(most, outputs[i])
        comptime for step in range(2):
            most = larger(most, warp.shuffle_xor(most, UInt32(1 << step)))
        var largest = two_columns(most).reduce_max()
        var scale = norm.scale[half * 2]
        var shift = largest * scale
        var total = SIMD[F32, 2](0)
        comptime for i in range(half, BN // 4, 2):
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
                (r * (N // BN) + column // BN) * 2,
                SIMD[F32, 2](largest, sum),
            )


@always_inline
def write_moments[
    N: Int
](outputs: Outputs, moments: Values[F32], row: Int, column: Int, rows: Int):
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
    comptime for i in range(0, BN // 4, 2):
        var first, second = columns(i)
        even += first
        odd += second
    var mean = over_lanes(even + odd) / BN
    even, odd = SIMD[F32, 2](0), SIMD[F32, 2](0)
    comptime for i in range(0, BN // 4, 2):
        var first, second = columns(i)
        even = (first - mean).fma(first - mean, even)
        odd = (second - mean).fma(second - mean, odd)
    var squares = over_lanes(even + odd)
    comptime for half in range(2):
        var r = row + Int(lane_id()) // 4 + half * 8
        if lane_id() % 4 == 0 and r < rows:
            moments.unsafe_store[alignment=8](
                (r * (N // BN) + column // BN) * 2,
                SIMD[F32, 2](mean[half], squares[half]),
            )


@always_inline
def read_norm[
    K: Int, parts: Parts
](moments: Values[F32], row: Int, rows: Int) -> RowNorm:
    """Join the moments of the tiles of rows, in one order; tiles are of one size.

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
    comptime TILES = K // BN
    var norm = RowNorm(0, 1)
    comptime for half in range(2 if parts.norm else 0):
        var r = min(row + Int(lane_id()) // 4 + half * 8, rows - 1)

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
        var variance = (total[1] + between * BN) * (Float32(1) / Float32(K))
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


@always_inline
def finish_sums[
    N: Int, parts: Parts
](
    sums: Sums,
    norm: RowNorm,
    to: Tensors,
    patch: Patch,
    row: Int,
    column: Int,
    rows: Int,
):
    """Turn a warp's sums into output.

    A chunk at a time goes through the warp's patch, so that memory is read and written 128 bytes of
    a row at once. The residual of the next chunk is under way meanwhile.

    Parameters:
        N: Columns of the output.
        parts: What else goes into it.

    Args:
        sums: The thread's.
        norm: Of the thread's rows.
        to: The tensors.
        patch: The warp's shared memory.
        row: The warp's first row.
        column: The tile's first column.
        rows: Rows of the output.
    """
    var lane = Int(lane_id())

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

    var outputs = Outputs(0)
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
        var words = SIMD[DType.uint32, 8](
            0
        )  # of an e4m3 output: 4 of each of the two rows
        comptime for eight in range(0, CHUNK // 8, 2):
            var y = sums.slice[8, offset=chunk * 32 + eight * 4]()
            var at = patch.unsafe_offset(
                vector_at(lane % 16, eight + lane // 16)
            )
            var divisor = SIMD[F32, 8](1)
            comptime for i in range(2):
                var of = column + chunk * CHUNK + (eight + i) * 8 + lane % 4 * 2
                var z = y.slice[4, offset=i * 4]()
                comptime if parts.bias:
                    var b = to.bias.unsafe_load[width=2, alignment=4](of)
                    z += b.join(b).cast[F32]()
                comptime if parts.norm:
                    var c, b = to.columns.unsafe_load[width=4, alignment=16](
                        of * 2
                    ).deinterleave()
                    z = norm.scale.fma(
                        (-norm.mean).fma(c.join(c), z), b.join(b)
                    )
                comptime if parts.factors == E4M3:
                    var s, b = to.columns.unsafe_load[width=4, alignment=16](
                        of * 2
                    ).deinterleave()
                    z = z.fma(s.join(s), b.join(b))
                comptime if parts.narrow():
                    var by = to.divisors.unsafe_load[width=2, alignment=8](of)
                    divisor = divisor.insert[offset=i * 4](by.join(by))
                y = y.insert[offset=i * 4](z)
            comptime if parts.silu:
                comptime if parts.variants.tanh and not parts.narrow():
                    y = silu_by_tanh(y)
                else:
                    y = silu(y, divisor)
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
                var r = row + half * 8 + lane // 4
                if r < rows:
                    to.out_.unsafe_bitcast[UInt32]().unsafe_store[alignment=16](
                        (r * N + column + chunk * CHUNK) // 4 + lane % 4 * 4,
                        words.slice[4, offset=half * 4](),
                    )
            continue
        syncwarp()
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
