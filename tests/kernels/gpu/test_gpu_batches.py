"""The GPU's own code for rows, mixer, taps, embedding and copies of slots, run without a GPU:
results against the oracle, instructions and bytes against budgets."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from srm.engine.device.linear import round_bfloat16
from srm.engine.device.products import moment_columns
from srm.engine.steps.batch import F32
from srm.engine.weights.float8 import (
    LARGEST_INT8,
    from_e4m3,
    norm_scale,
    round_e4m3,
    turned,
)
from tests.kernels import oracle
from tests.kernels.harness import widened
from tests.kernels.test_embedding import SIZES, rows_of
from tests.kernels.test_mixer import (
    N_CTX,
    Rows,
    make_rows,
    make_state,
    make_taps,
    make_unit,
    residual_of,
)
from tests.kit.ptx.mojo_program import printed
from tests.kit.ptx.ptx import Counts, Kernel, compiled
from tests.kit.ptx.ptx_text import PTXError

BLOCK = 256
Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """Kernels by op, dtype of activations and values to a thread."""
    return compiled("batch_kernels.mojo")


def stored(values: F32, dtype: str) -> Array:
    return round_bfloat16(values) if dtype == "bfloat16" else values.copy()


def read(values: Array) -> F32:
    return widened(values) if values.dtype == np.uint16 else values


def mix(kernels: dict[str, Kernel], op: str, dtype: str, rows: Rows, heads: int, by: int) -> Counts:
    """Run a unit, `by` channels to a thread, as `Unit.launch` does, and compare all it wrote."""
    rng = np.random.default_rng(len(rows.positions))
    width, count = rows.x.shape[1], len(rows.positions)
    state, unit, index = make_state(rng, rows), make_unit(rng, heads), 1
    x, residual = stored(rows.x, dtype), stored(residual_of(rows), dtype)
    y, before = np.full_like(x, 7), state.copy()
    head_dim = width // heads
    lanes = head_dim // by
    along = min(lanes, BLOCK), min(heads, BLOCK // min(lanes, BLOCK))
    block = (*along, min(BLOCK // (along[0] * along[1]), 64))
    grid = tuple(-(-a // b) for a, b in zip((count, heads, lanes), block[::-1], strict=True))
    ran = kernels[f"{op} {dtype} {by}"].launch(
        *(grid, block, y, state, x, *rows[1:], *unit, residual),
        *(count, heads, head_dim, N_CTX, state.shape[1], index * width),
    )
    *scalars, gamma = (a.astype(np.float64) for a in unit)
    everything = op == "mix_all"
    exact = before.astype(np.float64), index, read(x).astype(np.float64)
    arguments: list[Any] = [*exact, *rows[1:], *scalars, gamma if everything else None, everything]
    y_expected, expected = oracle.mix(*arguments)
    if everything:
        y_expected += read(residual)
    rounding = 2**-8 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(read(y), y_expected, rtol=rounding, atol=1e-4)
    np.testing.assert_allclose(state, expected, rtol=1e-5, atol=1e-4)
    columns = slice(index * width, (index + 1) * width)
    before[rows.write_slots, columns] = state[rows.write_slots, columns]
    np.testing.assert_array_equal(state, before)
    return ran


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", ["mix", "mix_all"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "by"),
    [(4, 256, 8), (3, 8, 8), (300, 8, 8), (2, 2056, 8), (5, 24, 8), (4, 17, 1), (1, 300, 1)],
)
def test_ragged_rows(
    kernels: dict[str, Kernel], op: str, dtype: str, heads: int, head_dim: int, by: int
) -> None:
    positions = [0, 1, N_CTX - 1, 9, 700]
    rng = np.random.default_rng(head_dim)
    rows = make_rows(rng, [1, 4, 1, 0, 2], positions, heads * head_dim)
    mix(kernels, op, dtype, rows, heads, by)


def decode_counts(kernels: dict[str, Kernel], op: str, dtype: str, width: int) -> Counts:
    """What one unit takes for four rows that decode."""
    rows = make_rows(np.random.default_rng(0), [1] * 4, [1, 9, 700, N_CTX - 1], width)
    return mix(kernels, op, dtype, rows, 4, by=8)


@pytest.mark.parametrize(
    ("op", "dtype", "most"),
    [("mix", "bfloat16", 25), ("mix", "float32", 25), ("mix_all", "bfloat16", 35)],
)
def test_decoding_takes_few_instructions_and_moves_what_it_must(
    kernels: dict[str, Kernel], op: str, dtype: str, most: int
) -> None:
    count, width = 4, 1024
    ran = decode_counts(kernels, op, dtype, width)
    y, state, x, *scalars, residual = ran.moved
    assert ran.instructions <= most * count * width
    assert state == 2 * 4 * count * width  # every byte is of use
    assert y == x == count * width * (2 if dtype == "bfloat16" else 4)
    assert residual == (x if op == "mix_all" else 0)
    assert sum(scalars) < 0.15 * sum(ran.moved)


@pytest.mark.parametrize(
    ("op", "dtype", "width", "by"),
    [
        *(("embed_stream", "bfloat16", width, 8) for width in (256, 768, 1024, 2304)),
        *(("embed_stream", "bfloat16", width, 4) for width in (128, 384, 1152)),
        *(
            ("embed", "bfloat16", 1024, 8),
            ("embed", "bfloat16", 8, 8),
            ("embed", "bfloat16", 2056, 8),
        ),
        *(("embed", "bfloat16", 7, 1), ("embed", "float32", 512, 4), ("embed", "float32", 257, 1)),
    ],
)
def test_embedding(kernels: dict[str, Kernel], op: str, dtype: str, width: int, by: int) -> None:
    rng = np.random.default_rng(width)
    count, slots, vocab = 9, 30, 50
    table = stored(rng.standard_normal((vocab, width)).astype(np.float32), dtype)
    last_token = rng.integers(vocab, size=slots, dtype=np.int32)
    token_ids = np.array([-1, -1, 3, -1, 0, vocab - 1, 7, 7, 1], np.int32)
    read_slots = rng.permutation(slots)[:5].astype(np.int32)
    x = np.zeros((count, width), table.dtype)
    grid, block = row_grid(count, width // by)
    columns = moment_columns(width)
    moments = np.full((count, max(width // columns, 1), 2), np.nan, np.float32)
    given = x, moments, last_token, token_ids, read_slots, table, count, width
    ran = kernels[f"{op} {dtype} {by}"].launch(grid, block, *given)
    np.testing.assert_array_equal(x, oracle.embed(last_token, token_ids, read_slots, table))
    if op == "embed_stream":
        expected = oracle.moments(read(x).astype(np.float64), columns)
        np.testing.assert_allclose(moments, expected, rtol=2e-6, atol=1e-7)
    if width == 1024:
        assert ran.instructions <= (6.5 if op == "embed" else 15) * count * width
        assert ran.moved[0] == ran.moved[5] == x.nbytes


@pytest.mark.parametrize("width", [512, 1024])
def test_norm_in_float8(kernels: dict[str, Kernel], width: int) -> None:
    """Of rows far from 0, of one that is all the same, and one whose largest value is the bound."""
    rng, scale = np.random.default_rng(width), norm_scale(width)
    x = (5 * rng.standard_normal((19, width)) + rng.normal(0, 30, (19, 1))).astype(np.float32)
    x[3], x[4], x[5] = 7, 0, -3e4
    x[4, 9] = 1e4
    given = round_bfloat16(x)
    y, scales = np.full(x.shape, 0x7F, np.uint8), np.zeros(1, np.float32)
    ran = kernels[f"norm_e4m3 {width}"].launch(-(-len(x) // 8), BLOCK, y, scales, given, len(x))
    wide = widened(given).astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    exact = scale * centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(from_e4m3(y), exact, rtol=2**-4 + 1e-4, atol=2**-10 + 1e-4)
    assert (y != round_e4m3(exact.astype(np.float32))).sum() < 1e-3 * y.size
    assert y[4, 9] == round_e4m3(np.array(scale * (width - 1) ** 0.5))
    assert not from_e4m3(y[[3, 5]]).any()
    assert ran.instructions <= 11 * y.size
    assert ran.moved == [y.nbytes, 0, given.nbytes]


@pytest.mark.parametrize("width", [512, 1024])
def test_norm_in_int8(kernels: dict[str, Kernel], width: int) -> None:
    """Rows are far from 0, constant, tiny, or have an outlying channel. The scale of a row with NaN
    or infinity is NaN."""
    rng = np.random.default_rng(width)
    x = (5 * rng.standard_normal((19, width)) + rng.normal(0, 30, (19, 1))).astype(np.float32)
    x[3], x[5], x[6], x[7] = 7, 0, x[6] * 1e-25, x[7] * 1e10
    x[4, 9] = 1e4
    x[8, 1], x[9, 2], x[10, 3] = np.nan, np.inf, -np.inf
    given, invalid = round_bfloat16(x), [8, 9, 10]
    y: Array = np.full(x.shape, -128, np.int8)
    scales: Array = np.full(len(x), 9, np.float32)
    ran = kernels[f"norm_int8 {width}"].launch(-(-len(x) // 8), BLOCK, y, scales, given, len(x))
    assert np.isnan(scales[invalid]).all() and np.isfinite(np.delete(scales, invalid)).all()
    rows, codes, scales = (np.delete(array, invalid, 0) for array in (given, y, scales))
    exact = turned(oracle.layer_norm(widened(rows).astype(np.float64)))
    largest = np.abs(exact).max(1) / LARGEST_INT8
    np.testing.assert_allclose(scales, largest, rtol=2e-5, atol=1e-12)
    assert (np.abs(codes * scales[:, None] - exact) <= 0.5002 * largest[:, None]).all()
    some = largest > 0
    assert (np.abs(codes[some]).max(1) == LARGEST_INT8).all()
    assert not scales[~some].any() and not codes[~some].any() and (~some).sum() == 2
    assert ran.instructions <= 20 * y.size
    # Sectors of 32 bytes: a scale's, and those of x twice, from the cache then.
    assert ran.moved == [y.nbytes, 32 * len(y), 4 * y.size]


def tap(
    kernels: dict[str, Kernel], dtype: str, lengths: list[int], width: int, size: int, by: int
) -> Counts:
    """Sum over `size` channels of each row's tokens, and compare."""
    rng = np.random.default_rng(width)
    positions = rng.integers(400, size=len(lengths)).tolist()
    wide, *given, residual = make_taps(rng, lengths, positions, width, size)
    q, residual = (stored(values.astype(np.float32), dtype) for values in (wide, residual))
    y = np.full_like(q, 7)
    grid, block = row_grid(len(q), width // by)
    sizes = len(q), len(lengths), width, size, given[2].shape[1]
    ran = kernels[f"taps {dtype} {by}"].launch(grid, block, y, q, *given, residual, *sizes)
    exact: list[Any] = [read(q), *given, read(residual)]
    expected = oracle.taps(*(a.astype(np.float64) if a.dtype == np.float32 else a for a in exact))
    rounding = 2**-8 if dtype == "bfloat16" else 1e-5
    np.testing.assert_allclose(read(y), expected, rtol=rounding, atol=1e-4)
    return ran


@pytest.mark.parametrize("size", [2, 4, 8, 9, 10, 17, 30])
@pytest.mark.parametrize(
    ("dtype", "width", "by"),
    [("bfloat16", 24, 8), ("bfloat16", 2056, 8), ("bfloat16", 9, 1), ("float32", 20, 4)],
)
def test_taps(kernels: dict[str, Kernel], dtype: str, width: int, by: int, size: int) -> None:
    tap(kernels, dtype, [1, 1, 0, 3, 0, 1], width, size, by)


def test_taps_take_few_instructions_and_move_what_they_must(kernels: dict[str, Kernel]) -> None:
    count, width = 4, 1024
    ran = tap(kernels, "bfloat16", [1] * count, width, size=4, by=8)
    y, q, *scalars, residual = ran.moved
    assert ran.instructions <= 40 * count * width  # an H200 moves 6 bytes in that time
    assert y == residual == 2 * count * width
    assert q <= 2.1 * y  # the second time from the cache, for the thread to the right
    assert sum(scalars) < 0.15 * sum(ran.moved)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows(kernels: dict[str, Kernel], sizes: tuple[int, int, int]) -> None:
    given = rows_of(np.random.default_rng(sum(sizes)), *sizes)
    expected, after = oracle.expand(*given)
    results = [np.full_like(item, -7) for item in expected]
    counts = len(expected.token_ids), len(expected.read_slots), sizes[0], len(given[3])
    blocks = -(-(counts[0] + 1) // BLOCK)
    kernels["expand"].launch(blocks, BLOCK, *results, *given, *counts)
    for item, wanted in zip([*results, given[0]], [*expected, after], strict=True):
        np.testing.assert_array_equal(item, wanted)


def test_a_row_that_goes_on_takes_few_instructions(kernels: dict[str, Kernel]) -> None:
    count, none = 1024, np.zeros(1, np.int32)
    slots, ends = np.arange(count, dtype=np.int32), np.array([[0, 0, 0, count]], np.int32)
    nothing_new, sampling = np.full((1, 12), -1, np.int32), np.zeros((count, 9), np.int32)
    results = [np.zeros(count + (place == 4), np.int32) for place in range(5)]
    given = sampling, slots, slots, nothing_new, ends, none
    ran = kernels["expand"].launch(
        count // BLOCK + 1, BLOCK, *results, *given, count, count, count, 1
    )
    assert ran.instructions <= 100 * count
    assert ran.moved[6] == ran.moved[7] == 4 * count and ran.moved[5] == 0


def row_grid(rows: int, pieces: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """As `RowGrid` has it."""
    block = min(pieces, BLOCK), BLOCK // min(pieces, BLOCK)
    return (-(-rows // block[1]), -(-pieces // block[0])), block


@pytest.mark.parametrize(("width", "by"), [(2048, 4), (8, 4), (1028, 4), (9, 1), (259, 1)])
def test_copies_of_slots(kernels: dict[str, Kernel], width: int, by: int) -> None:
    rng = np.random.default_rng(width)
    state = rng.standard_normal((20, width)).astype(np.float32)
    last_token = rng.integers(-(2**31), 2**31, 20, dtype=np.int32)  # bits of any number, NaN too
    slots = rng.permutation(20)[:7].astype(np.int32)
    packed = np.full(len(slots) * (width + 1) + 3, 9, np.float32)
    grid, block = row_grid(len(slots), width // by)
    given = packed, slots, len(slots), width

    ran = kernels[f"gather {by}"].launch(grid, block, state, last_token, *given)
    values, tokens = packed[: slots.size * width], packed[slots.size * width : -3]
    np.testing.assert_array_equal(values.reshape(-1, width), state[slots])
    np.testing.assert_array_equal(tokens.view(np.int32), last_token[slots])
    assert (packed[-3:] == 9).all()
    if width == 2048:
        assert ran.moved[0] == state[slots].nbytes

    empty, no_token = np.zeros_like(state), np.zeros_like(last_token)
    kernels[f"scatter {by}"].launch(grid, block, empty, no_token, *given)
    np.testing.assert_array_equal(empty[slots], state[slots])
    np.testing.assert_array_equal(no_token[slots], last_token[slots])
    others = np.setdiff1d(np.arange(20), slots)
    assert not empty[others].any() and not no_token[others].any()


EARLY: dict[str, Callable[[dict[str, Kernel]], object]] = {
    "embed bfloat16 8": lambda kernels: test_embedding(kernels, "embed", "bfloat16", 1024, 8),
    "embed_stream bfloat16 8": lambda kernels: test_embedding(
        kernels, "embed_stream", "bfloat16", 1024, 8
    ),
    "mix bfloat16 8": lambda kernels: decode_counts(kernels, "mix", "bfloat16", 1024),
    "norm_e4m3 512": lambda kernels: test_norm_in_float8(kernels, 512),
}
"""Kernels that variant pdl starts while the one before them ends, and what checks them."""


@pytest.mark.parametrize("name", EARLY)
def test_early_kernels_are_todays_behind_a_wait(kernels: dict[str, Kernel], name: str) -> None:
    early = compiled("batch_kernels.mojo", "pdl")
    EARLY[name](early)
    today, code = (Counter(line[1] for line in of[name].program.code) for of in (kernels, early))
    assert code - today == Counter(["griddepcontrol.wait", "griddepcontrol.launch_dependents"])
    assert not today - code


@pytest.mark.parametrize("name", EARLY)
def test_a_wait_behind_a_load_is_found(name: str) -> None:
    text = printed("batch_kernels.mojo", "pdl")[name].decode()
    wait = r"(griddepcontrol\.wait;.*?dependents;)(.*?ld\.global[^;]*;)"
    late, changes = re.subn(wait, r"\2\1", text, count=1, flags=re.S)
    assert changes
    with pytest.raises(PTXError, match=r"(read or written|a thread ends) before the wait"):
        EARLY[name]({name: Kernel(late, is_dependent=True)})
