"""The GPU's own products, run without one, against float64; and what an assembler makes of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from srm.engine.config import ModelConfig
from srm.engine.device.linear import round_bfloat16
from srm.engine.device.products import moment_columns
from srm.engine.steps.batch import I32
from srm.engine.weights.float8 import (
    INNER,
    LARGEST,
    LARGEST_INT8,
    float8_channel_mixer,
    from_e4m3,
    int8_channel_mixer,
    round_e4m3,
    round_int8,
)
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import fold
from tests.kernels import oracle
from tests.kernels.harness import EPILOGUES, Array, widened
from tests.kernels.product_checks import int8_inner
from tests.kernels.test_sampler import Settings, records
from tests.kit.engines.numpy_runner import in_float64, silu
from tests.kit.kept import keep_compiled
from tests.kit.ptx.mojo_program import printed
from tests.kit.ptx.ptx import Kernel
from tests.kit.ptx.ptx_async import TensorMap
from tests.kit.ptx.ptx_cluster import Cluster
from tests.kit.ptx.ptx_steps import Argument
from tests.kit.ptx.ptx_text import PTXError

SAMPLED = [Settings(), Settings(0.02), Settings(2.5, top_k=3), Settings(2.5), Settings(0)]
SAMPLING = records(SAMPLED, np.arange(len(SAMPLED)))
SLOTS = np.repeat(np.array([3, 0, 2, 1, 4, 2], np.int32), [40, 40, 56, 62, 1, 1])
"""How the first rows are sampled; those beyond are not."""
THREADS, WARP_ROWS = 384, 16  # of _sm90_kernel.mojo
COLUMNS = 512
NO_UNIT = (0,) * 19
CODES = 40
"""What factors in int8 are rounded from, in deviations."""
OF_CODES = 8
"""What inner activations are multiplied with, about: some exceed what int8 has."""
ROUNDED: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "e4m3": (round_e4m3, from_e4m3),
    "int8": (lambda values: round_int8(CODES * values), np.asarray),
}
"""What makes factors of 8 bits of numbers, and what they mean."""
SMALL = "small_"
"""What names begin with of kernels whose tiles have half as many rows."""
ROW_COUNTS = [1, 2, 127, 128, 129, 257]
SELDOM = {2, 127, 128}
"""Those of them that `make test-all` runs alone."""
KINDS = {
    **EPILOGUES,
    "slices": (False, False, False),
    "normed_up": (True, True, False),
    "normed_proj_in": (True, False, False),
    "measured_down": (True, False, True),
    "up_e4m3": (True, True, False),
    "down_e4m3": (True, False, True),
    "up_int8": (True, True, False),
    "down_int8": (True, False, True),
}
"""(has bias, has SiLU, has residual): epilogues of harness.py; the head with the softmax of each
slice; products of normalised rows, and one that writes the moments of its rows; of factors in e4m3
and in int8 two each, the first into such a factor, the second with moments."""
VARIANTS = {
    "tanh": ["normed_up"],
    "ahead": ["normed_proj_in", "measured_down", "down_e4m3"],
    "stores": ["slices", "measured_down", "down_e4m3"],
    "clusters": ["measured_down"],
    "rejection": ["slices"],
    "pdl": ["normed_up", "measured_down", "slices", "up_e4m3"],
}
"""Variants of kernels, and kinds that each changes. All but "tanh" and
"rejection" give today's bits."""
ALL = "tanh,ahead,stores,clusters"
VARIANT_CASES = [
    *((ALL, kind) for kind in ("normed_up", "measured_down")),
    *(
        pytest.param(names, kind, marks=[pytest.mark.slow] * (names in ALL))
        for names in VARIANTS
        for kind in VARIANTS[names]
    ),
    pytest.param(f"{ALL},pdl", "measured_down", marks=pytest.mark.slow),
]
"""Alone, those of ALL are for `make test-all`: each set is compiled by itself."""
MEANS = 0, 3, -30, 300
"""Of every fourth row that is normalised, in deviations; in bfloat16 300 is next to 302."""
NARROW = {
    **{
        name: 0
        for d in (128, 256, 384)
        for name in (
            *(f"normed_up {4 * d} {d}", f"measured_down {d} {4 * d}"),
            *(f"normed_proj_in {d} {d}", f"measured_down {d} {d}"),
        )
    },
    "slices 2048 256": 0,
    "slices 1024 128": 10,
    "slices 1024 384": 24,
    "slices 1280 128": 255,
}
"""Products of small models, those bundled among them, and columns that the weight has not."""
PLAIN = {"up", "proj_in", "head", "normed_proj_in"}
"""Parts of other kinds: held at fewer row counts."""


@pytest.fixture(scope="module")
def kernels() -> dict[str, str]:
    """The PTX of each epilogue, N and K."""
    return compile_kernels()


@cache
def compile_kernels(*defines: str) -> dict[str, str]:
    result = printed("product_kernels.mojo", *defines)
    return {name: text.decode() for name, text in result.items()}


class Run(NamedTuple):
    """What a kernel wrote, and in float64 what it was to write but for rounding."""

    out: Array
    slices: Array
    expected: Array
    slots: I32
    """Those of the rows that are sampled."""
    lost: Array
    """How far an approximate function, and the mean of a norm, may move each of `out`."""
    moved: list[int]
    """Bytes of each array of the arguments, as `Cluster.moved` has them."""


def run(
    text: str,
    name: str,
    rows: int,
    depth: int,
    columns: int = COLUMNS,
    begins: tuple[float, ...] = (),
    variants: str = "",
    unit: tuple[Array | int, ...] = NO_UNIT,
    padding: int = 0,
) -> Run:
    """Run a kernel; a row of x, and of the residual, is the same whatever `rows` is. `begins` is
    what the first rows of x begin with, if anything is wanted; `unit` is a `Unit` of
    _sm90_epilogue.mojo; `padding` of the columns are not in the weight."""
    kind, is_small = name.removeprefix(SMALL), name.startswith(SMALL)
    shapes = (rows, depth), (columns - padding, depth), (columns,), (rows, columns)
    drawn = [
        np.random.default_rng([i, depth]).standard_normal(shape, np.float32)
        for i, shape in enumerate(shapes)
    ]
    drawn[0][: len(begins), 0] = begins
    drawn[1] /= np.sqrt(depth)
    is_normed = kind.startswith("normed")
    if is_normed:
        drawn[0] += np.resize(MEANS, rows).astype(np.float32)[:, None]
    is_int8, is_8bit = kind.endswith("int8"), is_of_8_bits(kind)
    rounded, meaning = ROUNDED.get(kind[-4:], (round_bfloat16, widened))
    if is_int8:
        drawn[1] *= np.sqrt(depth)
    given: list[Array] = [rounded(token) for token in drawn[:2]]
    x, weight = (meaning(array).astype(np.float64) for array in given)
    weight = np.pad(weight, ((0, padding), (0, 0)))
    given += [round_bfloat16(token) for token in drawn[2:]]
    bias, residual = (widened(array).astype(np.float64) for array in given[2:])
    out: Array = np.full((rows, columns), 0x7FC0, np.uint16)
    if is_8bit and KINDS[kind][1]:
        out = np.full((rows, columns), 0x7F, given[0].dtype)
    scales, divisors = np.exp(
        np.random.default_rng([9, depth]).standard_normal((2, columns), np.float32)
    )
    width = moment_columns(columns)
    slices = np.full((rows, columns // width, 2), np.nan, np.float32)
    moments = oracle.moments(x, moment_columns(depth)).astype(np.float32)
    if is_int8:
        scales /= CODES * CODES * np.sqrt(depth)
        divisors *= OF_CODES
        moments = np.exp(np.random.default_rng([8, depth]).standard_normal(rows, np.float32) / 2)
        moments[1::7] = 0  # of rows of zeros
        given[0][1::7] = 0
        x[1::7] = 0
    of_columns = np.stack([scales if is_8bit else weight.sum(1), bias], 1).astype(np.float32)
    tile, cluster_rows = 64 if is_small else 128, 512 if "clusters" in variants else 256
    tiles = tile, width * tile // cluster_rows
    factors = TensorMap(given[0], tiles[0]), TensorMap(given[1], tiles[1], is_weight=True)
    arguments: list[Argument | TensorMap] = [*factors, TensorMap(out, WARP_ROWS), out]
    arguments += [*given[2:], slices]
    arguments += [of_columns / 2 if kind == "up_int8" else of_columns, moments, divisors]
    arguments += [SAMPLING, SLOTS[:rows], min(rows, len(SLOTS)), unit, rows]
    shared = shared_bytes(width, depth * given[0].itemsize, 1 + ("stores" in variants))
    cluster = Cluster(text, THREADS, shared, tuple(arguments), rows, "pdl" in variants)
    cluster.run()

    has_bias, silu, has_residual = KINDS[kind]
    if is_normed:
        x = oracle.layer_norm(x)
    if kind == "up_int8":
        x = x * moments[:, None]
    y = x @ weight.T * (scales if is_8bit else 1) + (bias if has_bias else 0)
    y[:, columns - padding :] = -np.inf
    lost = np.zeros((rows, 1))
    if is_normed:  # of what sums lack
        lost = np.abs(np.resize(MEANS, rows))[:, None] * 1e-6
    if silu and "tanh" in variants and not is_8bit:
        lost = lost + np.abs(y / 2 * np.tanh(y / 2)) * 2**-11
    if kind == "up_int8":
        y, lost = int8_inner(y, divisors)
        return Run(out, slices, y, SLOTS[:rows], lost, cluster.moved())
    y = y / (1 + np.exp(-y)) if silu else y
    y = y + residual if has_residual else y
    if kind == "up_e4m3":
        y = (
            (y / divisors)
            .clip(-LARGEST, LARGEST)
            .reshape(rows, -1, len(INNER))[..., INNER]
            .reshape(y.shape)
        )
    return Run(out, slices, y, SLOTS[:rows], lost, cluster.moved())


def shared_bytes(width: int, row_bytes: int, patches: int) -> int:
    """What a block has, as _sm90_kernel.mojo says: stages, patches of eight warps, barriers."""
    parts = row_bytes // 128
    stages = next(count for count in (4, 3, 2) if parts % count == 0)
    return stages * (128 + width) * 128 + 8 * 2048 * patches + 2 * 8 * stages


def is_of_8_bits(kind: str) -> bool:
    """Whether factors are e4m3 or int8: the ring of stages is twice as deep."""
    return kind.endswith(("e4m3", "int8"))


def check(kind: str, ran: Run, variants: str = "") -> None:
    """Hold all that a kernel wrote to float64.

    Of a normalised row the mean is taken off after the sums: what these lack grows with it.
    """
    out, slices, y, slots, lost, _ = ran
    if kind == "up_e4m3":
        np.testing.assert_allclose(from_e4m3(out), y, rtol=2**-4 + 1e-5, atol=2**-10 + 1e-5)
        assert (out != round_e4m3(y)).sum() <= 2 + out.size // 1000  # sums next to a tie
        return
    if kind == "up_int8":
        assert (np.abs(out - y) <= lost).all()
        assert (out != np.rint(y)).mean() < 0.04  # next to a tie
        assert out.min() == -LARGEST_INT8 or len(out) == 1
        return
    if kind == "slices":
        check_slices(slices, widened(out), slots, variants)
    there = np.isfinite(y[0])
    assert np.isneginf(widened(out)[:, ~there]).all()
    out, y = out[:, there], y[:, there]
    assert (np.abs(widened(out) - y) <= 2**-8 * np.abs(y) + 3e-6 + lost).all()
    rounded_once = round_bfloat16(y.astype(np.float32))  # but for sums next to a tie
    few = lost.max(1) < 1e-5
    assert (out[few] != rounded_once[few]).sum() <= 2 + out[few].size // 1000
    if kind in {"measured_down", "down_e4m3", "down_int8"}:
        wide = widened(out).astype(np.float64)
        moments = oracle.moments(wide, moment_columns(wide.shape[1]))
        np.testing.assert_allclose(slices, moments, rtol=2e-6, atol=1e-7)


def check_slices(array: Array, outputs: Array, slots: I32, variants: str) -> None:
    """Of rows that are drawn from all tokens. A warp that has none of them leaves nothing."""
    asked = np.zeros((-(-len(array) // WARP_ROWS) * WARP_ROWS, len(Settings._fields)))
    asked[: len(slots)] = np.array(SAMPLED)[slots]
    is_plain = (asked[:, 0] > 0) & ((asked[:, 1] == 0) | ("rejection" in variants))
    plain = np.flatnonzero(is_plain)
    expected = oracle.slices(outputs[plain].astype(np.float64), asked[plain, 0])
    np.testing.assert_array_equal(array[plain, :, 0], expected[..., 0])
    np.testing.assert_allclose(array[plain, :, 1], expected[..., 1], rtol=2e-6)
    idle = ~np.repeat(is_plain.reshape(-1, WARP_ROWS).any(1), WARP_ROWS)
    assert np.isnan(array[idle[: len(array)]]).all()  # as they were


@pytest.fixture(scope="module")
def ran(kernels: dict[str, str]) -> Callable[[str, int], Run]:
    """What a kind gives for so many rows, run once. The ring of stages, twice as deep in e4m3, goes
    round once a tile, or twice with the most rows."""

    @cache
    def run_once(kind: str, rows: int) -> Run:
        depth = (512 if rows == max(ROW_COUNTS) else 256) * (1 + is_of_8_bits(kind))
        return run(kernels[f"{kind} {COLUMNS} {depth}"], kind, rows, depth)

    return run_once


def run_variants(variants: str, name: str, rows: int) -> Run:
    """Run a kernel of these variants, as deep as `ran` runs today's."""
    depth = (512 if rows == max(ROW_COUNTS) else 256) * (1 + is_of_8_bits(name))
    text = compile_kernels(f"variants={variants}")[f"{name} {COLUMNS} {depth}"]
    return run(text, name, rows, depth, variants=variants)


def cases(kinds: Iterable[str], row_counts: Callable[[str], list[int]]) -> list[object]:
    """Each kind at its row counts."""
    return [
        pytest.param(kind, rows, marks=[pytest.mark.slow] * (rows in SELDOM))
        for kind in kinds
        for rows in row_counts(kind)
    ]


@pytest.mark.parametrize(
    ("kind", "rows"), cases(KINDS, lambda kind: ROW_COUNTS[:: 2 if kind in PLAIN else 1])
)
def test_products_are_right(ran: Callable[[str, int], Run], kind: str, rows: int) -> None:
    check(kind, ran(kind, rows))


@pytest.mark.filterwarnings("ignore:invalid value")
def test_slices_of_what_is_no_distribution_are_told(kernels: dict[str, str]) -> None:
    """A row with NaN, and one with infinities: no sum is a number, and the next row's are."""
    slices = run(kernels[f"slices {COLUMNS} 256"], "slices", 3, 256, begins=(np.nan, np.inf)).slices
    np.testing.assert_array_equal(np.isnan(slices[..., 1]), [[True] * 2, [True] * 2, [False] * 2])


@pytest.mark.parametrize(
    ("kind", "rows"),
    cases((kind for kind in KINDS if kind not in PLAIN), lambda _: [1, 2, 127, 128]),
)
def test_a_row_does_not_depend_on_others(
    ran: Callable[[str, int], Run], kind: str, rows: int
) -> None:
    few, most = ran(kind, rows), ran(kind, 129)
    np.testing.assert_array_equal(few.out, most.out[:rows])
    np.testing.assert_array_equal(few.slices, most.slices[:rows])


def run_narrow(name: str, rows: int, small: str = "", variants: str = "") -> Run:
    """Run one of NARROW."""
    defines = ["narrow", *([f"variants={variants}"] if variants else [])]
    kind, *sizes = f"{small}{name}".split()
    columns, depth = map(int, sizes)
    text, padding = compile_kernels(*defines)[f"{small}{name}"], NARROW[name]
    return run(text, kind, rows, depth, columns, variants=variants, padding=padding)


@pytest.mark.parametrize("name", NARROW)
def test_products_of_small_models_are_right(name: str) -> None:
    kind, most = name.split(maxsplit=1)[0], run_narrow(name, 129)
    check(kind, most)
    fewer = run_narrow(name, 1)
    check(kind, fewer)
    np.testing.assert_array_equal(fewer.out, most.out[:1])
    np.testing.assert_array_equal(fewer.slices, most.slices[:1])
    if f"{SMALL}{name}" in compile_kernels("narrow"):
        small = run_narrow(name, 129, SMALL)
        np.testing.assert_array_equal(small.out, most.out)
        np.testing.assert_array_equal(small.slices, most.slices)


@pytest.mark.slow
@pytest.mark.parametrize("name", NARROW)
def test_variants_of_small_models_are_right(name: str) -> None:
    kind = name.split(maxsplit=1)[0]
    for small in "", SMALL:
        if f"{small}{name}" in compile_kernels("narrow"):
            check(kind, run_narrow(name, 129, small, ALL), ALL)


@pytest.mark.parametrize(
    ("name", "part", "instead"),
    [
        ("slices 1024 128", "0fFF800000", "0f00000000"),
        ("slices 1024 128", r"(setp\.ne\.b64\s+\S+ \S+) 768;", r"\1 512;"),
        ("measured_down 384 384", r"(add\S+\s+(%rd\d+),[^;]*;\s*shl\S+\s+\S+ \2), 7;", r"\1, 8;"),
    ],
    ids=["not -inf", "in another tile", "beyond the tile"],
)
def test_mistakes_in_small_models_are_found(name: str, part: str, instead: str) -> None:
    """Of columns that the weight has not, and of a tile of 128 columns."""
    kind, columns, depth = name.split()
    text, changes = re.subn(part, instead, compile_kernels("narrow")[name])
    assert changes
    with pytest.raises((AssertionError, PTXError)):
        check(kind, run(text, kind, 129, int(depth), int(columns), padding=NARROW[name]))


@pytest.mark.parametrize("kind", KINDS)
def test_small_tiles_give_the_same_bits(
    kernels: dict[str, str], ran: Callable[[str, int], Run], kind: str
) -> None:
    depth, rows, name = 256 * (1 + is_of_8_bits(kind)), 129, f"{SMALL}{kind}"
    small, whole = run(kernels[f"{name} {COLUMNS} {depth}"], name, rows, depth), ran(kind, rows)
    np.testing.assert_array_equal(small.out, whole.out)
    np.testing.assert_array_equal(small.slices, whole.slices)


@pytest.mark.parametrize("rows", [129, 257])
@pytest.mark.parametrize(("variants", "kind"), VARIANT_CASES)
def test_variants_are_right(
    ran: Callable[[str, int], Run], variants: str, kind: str, rows: int
) -> None:
    result = run_variants(variants, kind, rows)
    check(kind, result, variants)
    if "tanh" not in variants and variants != "rejection":
        np.testing.assert_array_equal(result.out, ran(kind, rows).out)
        np.testing.assert_array_equal(result.slices, ran(kind, rows).slices)


@pytest.mark.parametrize(("variants", "kind"), VARIANT_CASES)
def test_small_tiles_of_variants_give_the_same_bits(variants: str, kind: str) -> None:
    small, large = (run_variants(variants, f"{size}{kind}", 129) for size in (SMALL, ""))
    np.testing.assert_array_equal(small.out, large.out)
    np.testing.assert_array_equal(small.slices, large.slices)


@pytest.mark.parametrize(
    ("part", "instead", "error"),
    [
        ("wgmma.wait_group.sync.aligned 1;", "wgmma.wait_group.sync.aligned 3;", "still reads"),
        ("bar.warp.sync", "// bar.warp.sync", "a race"),
        (r"mov.b32 \t(%r\d+), 49152;", r"mov.b32 \t\1, 32768;", "deadlock|still to come"),
        (r"(multicast::cluster.*), %rs\d+;", r"\1, 1;", "deadlock|still|outside|promised"),
        (r"(mbarrier\.try_wait\S+ P1, \S+) \S+;", r"\1 2;", "still"),
        (r"setp\.ge\.s64", "setp.gt.s64", "outside"),
    ],
)  # fmt: skip
def test_mistakes_are_told(kernels: dict[str, str], part: str, instead: str, error: str) -> None:
    """Of a kernel changed so that a GPU would race, wait for ever or write elsewhere."""
    text, changes = re.subn(part, instead, kernels[f"down {COLUMNS} 512"])
    assert changes
    with pytest.raises(PTXError, match=error):
        check("down", run(text, "down", 128, 512))


@pytest.mark.parametrize(
    ("part", "instead", "error"),
    [
        (r"wait_group\.read\s+1;", "wait_group.read 2;", "a store still reads"),
        (r"wait_group\.read\s+0;", "wait_group.read 1;", "whose store still reads"),
        (r"fence\.proxy\.async\S*;", "", "no fence"),
        (r"(fence\.proxy\.async\S*;\s*)bar\.warp\.sync", r"\1// bar.warp.sync", "a race"),
        (r"(wait_group\.read[^$]*\$\w+:\s[^$]*?)bar\.warp\.sync", r"\1// bar.warp.sync", "a race"),
    ],
)
def test_mistakes_in_stores_are_found(part: str, instead: str, error: str) -> None:
    """A patch used again too early, or not shown to TMA."""
    text = compile_kernels("variants=stores")[f"measured_down {COLUMNS} 512"]
    text, changes = re.subn(part, instead, text)
    assert changes
    with pytest.raises(PTXError, match=error):
        run(text, "measured_down", 257, 512, variants="stores")


@pytest.mark.parametrize(
    ("part", "instead", "error"),
    [
        (r"griddepcontrol\.\w+;", "", "loaded|read or written|ends before the wait"),
        (r"griddepcontrol\.wait;", "", "the next kernel is started before the wait"),
        (r"(g\S+wait;)([^@]*)(g\S+launch_dependents;)", r"\3\2\1", "the next kernel is started"),
        (r"_param_1;", "_param_0;", "a step's tensor is loaded before the wait"),
    ],
)
def test_mistakes_in_dependent_launches_are_found(part: str, instead: str, error: str) -> None:
    """No wait, the next kernel started before it, and rows of x loaded where those of w may be."""
    text = compile_kernels("variants=pdl")[f"measured_down {COLUMNS} 512"]
    text, changes = re.subn(part, instead, text)
    assert changes
    with pytest.raises(PTXError, match=error):
        run(text, "measured_down", 129, 512, variants="pdl")


@pytest.mark.slow
def test_every_product_of_the_benchmarks_is_right() -> None:
    """In a tile with rows beyond it, and one more."""
    for name, text in compile_kernels("wide").items():
        kind, columns, depth = name.split()
        rows = 257 if int(columns) < 8192 else 100
        if kind.removeprefix(SMALL) in KINDS:
            check(kind.removeprefix(SMALL), run(text, kind, rows, int(depth), int(columns)))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "least", "most"), [("e4m3", 0.05, 0.06), ("int8", 0.02, 0.03)])
def test_mixers_of_8_bits_are_this_far_from_float64(kind: str, least: float, most: float) -> None:
    """A norm and two products, of a layer of d 512: rms, in units of the exact output's."""
    shape, rows = ModelConfig(d_model=512, num_layers=1, num_heads=2, n_ctx=1, vocab_size=8), 64
    (layer,) = fold(shape, random_tensors(shape), "").layers
    tensors = int8_channel_mixer(layer) if kind == "int8" else float8_channel_mixer(layer)
    x = round_bfloat16(np.random.default_rng(7).standard_normal((rows, 512), np.float32))
    dtype, scales = tensors["up_weight"].dtype, np.zeros(rows, np.float32)
    normed, inner, out = (
        np.zeros((rows, width), kind) for width, kind in ((512, dtype), (2048, dtype), (512, "u2"))
    )
    norm = Kernel(printed("batch_kernels.mojo")[f"norm_{kind} 512"].decode())
    norm.launch(rows // 8, 256, normed, scales, x, rows)
    residual, slices = np.zeros_like(x), np.zeros((rows, 2, 2), np.float32)
    for name, given, result in (("up", normed, inner), ("down", inner, out)):
        weight = tensors[f"{name}_weight"]
        factors = TensorMap(given, 128), TensorMap(weight, 128), TensorMap(result, WARP_ROWS)
        columns = tensors[f"{name}_columns"], scales, tensors["up_divisors"]
        arguments = *factors, result, x, residual, slices, *columns, SAMPLING, SLOTS[:rows], rows
        text = compile_kernels("wide")[f"{name}_{kind} {len(weight)} {weight.shape[1]}"]
        shared = shared_bytes(256, given.nbytes // rows, 1)
        Cluster(text, THREADS, shared, (*arguments, NO_UNIT, rows), seed=0).run()
    one = in_float64(layer)
    exact = oracle.layer_norm(widened(x).astype(np.float64))
    exact = exact * one.channel_norm_weight + one.channel_norm_bias
    exact = silu(exact @ one.up_weight + one.up_bias) @ one.down_weight + one.down_bias
    error = np.sqrt(((widened(out) - exact) ** 2).mean() / (exact**2).mean())
    print(f"{kind}: {error:.4f}")
    assert least < error < most


@pytest.mark.skipif(shutil.which("ptxas") is None, reason="needs CUDA's assembler, ptxas")
@pytest.mark.parametrize(
    "defines", [[], ["narrow"], pytest.param(["wide"], marks=pytest.mark.slow)]
)
def test_nothing_spills(defines: list[str], tmp_path: Path) -> None:
    """168 registers a thread, 384 of which fill a processor; `setmaxnreg` shares them out anew."""
    version = subprocess.run(["ptxas", "--version"], check=True, capture_output=True, text=True)
    for name, text in compile_kernels(*defines).items():
        facts = version.stdout, text
        stderr = keep_compiled("ptxas", [], facts, partial(assemble, text, tmp_path)).decode()
        assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in stderr, name
        assert "Used 168 registers" in stderr and "C7510" not in stderr, (name, stderr)


def assemble(text: str, folder: Path) -> bytes:
    """What the assembler tells."""
    path = folder / "kernel.ptx"
    path.write_text(text)
    command = ["ptxas", "-arch=sm_90a", "-v", str(path), "-o", str(folder / "kernel.cubin")]
    return subprocess.run(command, check=True, capture_output=True).stderr
