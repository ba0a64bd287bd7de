"""GFLOP/s of `srm_linear` against what the cores' multipliers can do.

    mojo build -I mojo_kernels mojo_kernels/bench/bench_linear.mojo -o bench_linear
    ./bench_linear [cores] [float32|bfloat16|widened]

`widened` is bfloat16 as on a processor without a product of it; it is measured against float32. The
peak is a loop of multiply-adds in registers, measured just before each product, because
the clock changes. Weights come from memory, as in a model: each call uses another copy. Each figure
is the median over ROUNDS of the best call of a round.
"""

from max.algorithm import sync_parallelize
from srm.products._epilogue import Epilogue
from srm.products._tile import (
    HAS_DOT,
    Untracked,
    Vector,
    WIDTH,
    Words,
    add_product,
    values_per_word,
)
from srm.products.linear import multiply
from std.memory import bitcast
from std.sys import argv
from std.time import perf_counter_ns

comptime SUMS = 24
"""Independent chains of multiply-adds: enough to hide their latency."""

comptime STEPS = 2_000_000
"""Steps of each chain."""

comptime ROUNDS = 3
"""How often each product is measured."""

comptime ROUND_NS = 200_000_000
"""Length of a round."""

comptime COLD_BYTES = 240_000_000
"""Weights to cycle through: more than a cache holds."""


def multiply_registers[dtype: DType](factor: Float32) -> Float32:
    """Multiply and add for STEPS * SUMS vectors.

    Parameters:
        dtype: Of the values multiplied.

    Args:
        factor: Unknown to the compiler.

    Returns:
        Something that depends on all of it.
    """
    var acc = Array[Vector, SUMS](fill=Vector(factor))
    var a = bitcast[DType.uint32](Vector(factor))
    for _ in range(STEPS):
        comptime for i in range(SUMS):
            acc[i] = add_product[dtype, True](a, a, acc[i])
    var total = Vector(0)
    comptime for i in range(SUMS):
        total += acc[i]
    return total.reduce_add()


def measure_peak[dtype: DType](cores: Int, factor: Float32) raises -> Float64:
    """Measure what the cores' multipliers can do.

    Parameters:
        dtype: Of the values multiplied.

    Args:
        cores: Cores to use.
        factor: Less than 1.

    Returns:
        GFLOP/s.
    """
    var totals = List[Float32](length=cores, fill=0)
    var totals_at = totals.unsafe_ptr()

    def work(core: Int) {imm}:
        totals_at[unsafe_offset=core] = multiply_registers[dtype](factor)

    comptime PAIR = values_per_word[dtype]()
    var flops = Float64(cores * STEPS * SUMS * WIDTH * 2 * PAIR)
    var best = Float64(0)
    for _ in range(5):
        var start = perf_counter_ns()
        sync_parallelize(work, cores)
        best = max(best, flops / Float64(perf_counter_ns() - start))
    for total in totals:
        if total != totals[0]:
            raise Error("the cores disagree")
    return best


def measure_linear[
    dtype: DType, dot: Bool
](M: Int, K: Int, N: Int, cores: Int) -> Float64:
    """Measure one product with bias; K even, N whole panels.

    Parameters:
        dtype: Of the values multiplied.
        dot: Whether to use the processor's own product of bfloat16 pairs.

    Args:
        M: Rows.
        K: Length of the sums.
        N: Columns.
        cores: Cores to use.

    Returns:
        GFLOP/s of the best call.
    """
    var copies = COLD_BYTES // (4 // values_per_word[dtype]() * K * N) + 1
    var x = List[Scalar[dtype]](length=M * K, fill=0.5)
    var weights = List[Scalar[dtype]](length=copies * K * N, fill=0.25)
    var bias = List[Scalar[dtype]](length=N, fill=1)
    var y = List[Scalar[dtype]](length=M * N, fill=0)
    var flops = Float64(2 * M * K * N)
    var best = Float64(0)
    var calls = 0
    var begin = perf_counter_ns()
    while perf_counter_ns() - begin < ROUND_NS or calls < 3:
        var weight = weights.unsafe_ptr().unsafe_offset(calls % copies * K * N)
        var bias_at = bias.unsafe_ptr().unsafe_origin_cast[Untracked]()
        var start = perf_counter_ns()
        multiply[dtype, dtype, dot](
            x.unsafe_ptr().unsafe_origin_cast[Untracked](),
            weight.unsafe_origin_cast[Untracked](),
            y.unsafe_ptr().unsafe_origin_cast[Untracked](),
            Epilogue[dtype, dtype](bias_at, bias_at, True, False, False),
            M,
            K,
            N,
            cores,
        )
        best = max(best, flops / Float64(perf_counter_ns() - start))
        calls += 1
    return best


def print_table[dtype: DType, dot: Bool](cores: Int) raises:
    """Measure and print.

    Parameters:
        dtype: Of the values multiplied.
        dot: Whether to use the processor's own product of bfloat16 pairs.

    Args:
        cores: Cores to use.
    """
    comptime peak_dtype = dtype if dot else DType.float32
    print("K x N          M   GFLOP/s   ‰ of peak   us")
    for shape in [
        (256, 1024),
        (512, 2048),
        (1024, 4096),
        (4096, 1024),
        (1024, 8192),
    ]:
        var K = shape[0]
        var N = shape[1]
        for M in [1, 4, 16, 64, 256, 1024, 2048]:
            var speeds = List[Float64]()
            var peaks = List[Float64]()
            for _ in range(ROUNDS):
                peaks.append(measure_peak[peak_dtype](cores, 0.5))
                speeds.append(measure_linear[dtype, dot](M, K, N, cores))
            sort(speeds)
            sort(peaks)
            var speed = speeds[ROUNDS // 2]
            print(
                K,
                "x",
                N,
                M,
                Int(speed),
                Int(1000 * speed / peaks[ROUNDS // 2]),
                Int(Float64(2 * M * K * N) / speed / 1000),
                sep="\t",
            )


def main() raises:
    """Print a table."""
    var cores = Int(argv()[1]) if len(argv()) > 1 else 1
    var kind = String(argv()[2]) if len(argv()) > 2 else String("float32")
    if kind == "float32":
        print_table[DType.float32, False](cores)
    elif kind == "widened":
        print_table[DType.bfloat16, False](cores)
    elif kind == "bfloat16":
        comptime if HAS_DOT:
            print_table[DType.bfloat16, True](cores)
        else:
            raise Error("this processor has no product of bfloat16")
    else:
        raise Error("float32, bfloat16 or widened")
