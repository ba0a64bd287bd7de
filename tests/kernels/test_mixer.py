"""`srm_mix` and `srm_taps` against the oracle, and their bits against themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from srm.engine.steps.batch import F32, I32
from tests.kernels import oracle
from tests.kernels.harness import Ops, untouched

N_CTX = 2048
UNITS = 3


class Rows(NamedTuple):
    """A batch, in the order of the op's inputs."""

    x: F32
    read_slots: I32
    write_slots: I32
    positions: I32
    row_offsets: I32


class Unit(NamedTuple):
    """A unit's parameters, in the order of the op's inputs; not every op takes gamma."""

    alpha_in: F32
    alpha_out: F32
    beta: F32
    decay: F32
    gamma: F32


def ints(*values: int) -> I32:
    return np.array(values, np.int32)


def make_rows(
    rng: np.random.Generator, lengths: Sequence[int], positions: Sequence[int], width: int
) -> Rows:
    """Rows over 2 R + 1 slots: half read the slot they write, half read one that they share."""
    slots = rng.permutation(2 * len(lengths) + 1).astype(np.int32)
    write_slots, shared = slots[: len(lengths)], slots[-1]
    read_slots = np.where(rng.random(len(lengths)) < 0.5, write_slots, shared)
    x = rng.standard_normal((sum(lengths), width)).astype(np.float32)
    return Rows(
        x, read_slots, write_slots, ints(*positions), np.cumsum(ints(0, *lengths), dtype="i4")
    )


def make_unit(rng: np.random.Generator, heads: int) -> Unit:
    alpha_in, alpha_out, beta, gamma = rng.standard_normal((4, heads, N_CTX)).astype(np.float32)
    alpha_in[: heads // 2] = 1  # column heads, as a model has them
    return Unit(alpha_in, alpha_out, beta, in_two(rng.uniform(0.9, 1, heads)), gamma)


def in_two(decay: npt.NDArray[np.float64]) -> F32:
    """f32[2, H]: rounded, and what the rounding left."""
    rounded = decay.astype(np.float32)
    return np.stack([rounded, (decay - rounded).astype(np.float32)])


def make_state(rng: np.random.Generator, rows: Rows) -> F32:
    shape = (2 * len(rows.positions) + 1, UNITS * rows.x.shape[1])
    return rng.standard_normal(shape).astype(np.float32)


def residual_of(rows: Rows) -> F32:
    """Some residual stream for these rows: the token's own, in whatever batch it is."""
    return np.roll(rows.x, 1, axis=1)


def run(
    ops: Ops, state: F32, rows: Rows, unit: Unit, index: int = 1, form: str = "mix"
) -> npt.NDArray[Any]:
    """`form` is the name of one of the ops."""
    rest = {"mix_gamma": [unit.gamma], "mix_all": [unit.gamma, residual_of(rows)]}.get(form, [])
    return ops.run(form, state, np.array(index, np.int32), *rows, *unit[:-1], *rest)[0]


def check(ops: Ops, state: F32, rows: Rows, unit: Unit, index: int = 1, form: str = "mix") -> None:
    """Outputs and states agree with the oracle; whatever is not written keeps its bits."""
    *scalars, gamma = (a.astype(np.float64) for a in unit)
    x, *where = rows
    before, columns = state.copy(), slice(index * x.shape[1], (index + 1) * x.shape[1])
    has_gamma, silu = form in {"mix_gamma", "mix_all"}, form in {"mix_silu", "mix_all"}
    exact = before.astype(np.float64), index, x.astype(np.float64)
    arguments: list[Any] = [*exact, *where, *scalars, gamma if has_gamma else None, silu]
    y_expected, expected = oracle.mix(*arguments)
    if form == "mix_all":
        y_expected += residual_of(rows)
    y = run(ops, state, rows, unit, index, form)
    np.testing.assert_allclose(y, y_expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(state, expected, rtol=1e-5, atol=1e-4)
    before[rows.write_slots, columns] = state[rows.write_slots, columns]
    np.testing.assert_array_equal(state, before)


FORMS = ["mix", "mix_gamma", "mix_silu", "mix_all"]
HEADS = [(4, 64), (4, 16), (2, 1), (3, 5), (4, 17), (2, 33), (1, 64), (6, 63), (4, 96), (2, 512)]


@pytest.mark.parametrize(("heads", "head_width"), HEADS)
def test_ragged_rows(ops: Ops, heads: int, head_width: int) -> None:
    rng = np.random.default_rng(head_width)
    lengths = [1, 1, 1, 0, 5, 1, 63, 0, 2]
    positions = [0, 1, N_CTX - 1, 9, 0, 700, N_CTX - 63, 0, 1]
    rows = make_rows(rng, lengths, positions, heads * head_width)
    for number, form in enumerate(FORMS):
        check(ops, make_state(rng, rows), rows, make_unit(rng, heads), number % UNITS, form)


@pytest.mark.parametrize("lengths", [[], [0], [1], [1] * 300, [1] * 100 + [900], [900, 0, 1, 0]])
def test_any_mixture_of_lengths(ops: Ops, lengths: list[int]) -> None:
    rng = np.random.default_rng(len(lengths))
    positions = [int(rng.integers(N_CTX - length)) for length in lengths]
    rows = make_rows(rng, lengths, positions, 256)
    for form in FORMS:
        check(ops, make_state(rng, rows), rows, make_unit(rng, 4), form=form)


def test_position_0_ignores_what_the_slot_holds(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    rows = make_rows(rng, [1, 3, 0], [0, 0, 0], 64)
    unit, state = make_unit(rng, 4), make_state(rng, rows)
    zeros, garbage = np.zeros_like(state), np.full_like(state, np.nan)
    np.testing.assert_array_equal(run(ops, garbage, rows, unit), run(ops, zeros, rows, unit))
    written = rows.write_slots, slice(64, 128)
    np.testing.assert_array_equal(garbage[written], zeros[written])


def test_a_slow_decay_is_exact_over_a_whole_context(ops: Ops) -> None:
    """Rounded to float32 alone, these would be wrong by 3e-5."""
    decay = np.array([0.9995, 0.9999, 0.9997, 1.0]) ** 0.25
    ones, zeros = np.ones((4, N_CTX), np.float32), np.zeros((4, N_CTX), np.float32)
    rows = Rows(np.ones((N_CTX, 64), np.float32), ints(0), ints(0), ints(0), ints(0, N_CTX))
    state = np.zeros((1, UNITS * 64), np.float32)
    unit = Unit(ones, ones, zeros, in_two(decay), zeros)
    T = run(ops, state, rows, unit).reshape(N_CTX, 4, 16)[:, :, 0].T
    expected = np.cumsum(decay[:, None] ** np.arange(N_CTX), axis=1)
    assert np.abs(T / expected - 1).max() < 5e-6


@pytest.mark.parametrize("form", ["mix", "mix_all"])
@pytest.mark.parametrize("cuts", [[1], [299], [100, 101, 102, 250], list(range(1, 300))])
def test_any_chunking_gives_the_same_bits(ops: Ops, cuts: list[int], form: str) -> None:
    rng = np.random.default_rng(0)
    unit = make_unit(rng, 4)
    whole = make_rows(rng, [300], [0], 4 * 40)
    at_once, in_chunks = (np.ones((3, UNITS * 160), np.float32) for _ in range(2))
    y = run(ops, at_once, whole, unit, form=form)
    for begin, end in zip([0, *cuts], [*cuts, 300], strict=True):
        # Beside other rows, so that the work is split differently.
        others, length = int(rng.integers(200)), end - begin
        chunk = make_rows(rng, [length, *[1] * others], [begin, *[5] * others], 160)
        chunk.x[:length] = whole.x[begin:end]
        slots = np.append(whole.write_slots, 3 + ints(*range(others)))
        chunk = chunk._replace(read_slots=slots, write_slots=slots)
        pool = np.append(in_chunks, np.ones((others, UNITS * 160), np.float32), axis=0)
        result = run(ops, pool, chunk, unit, form=form)[:length]
        np.testing.assert_array_equal(result, y[begin:end], strict=True)
        in_chunks = pool[:3]
    np.testing.assert_array_equal(in_chunks, at_once)


def test_offsets_into_a_large_pool_are_64_bit(cpu_ops: Ops) -> None:
    """A pool of more than 2^32 values, of which only the pages touched take memory."""
    rng = np.random.default_rng(0)
    width, slots = 64, 2**32 // (UNITS * 64) + 2
    pool = untouched((slots, UNITS * width), np.float32)
    used = ints(0, 5, slots // 2, slots - 2, slots - 1)
    rows = make_rows(rng, [1, 2], [4, 8], width)
    unit, small = make_unit(rng, 4), make_state(rng, rows)
    pool[used] = small
    y = run(cpu_ops, small, rows, unit)
    far = rows._replace(read_slots=used[rows.read_slots], write_slots=used[rows.write_slots])
    np.testing.assert_array_equal(run(cpu_ops, pool, far, unit), y)
    np.testing.assert_array_equal(pool[used], small)


TAPS_N_CTX = 512

TapsInputs = list[npt.NDArray[np.generic]]


def make_taps(
    rng: np.random.Generator,
    lengths: Sequence[int],
    positions: Sequence[int],
    width: int,
    kernel_size: int,
) -> TapsInputs:
    """A batch and a layer's taps, in the order of the op's inputs."""

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return rng.standard_normal(shape).astype(np.float32)

    return [
        normal(sum(lengths), width),
        np.array(positions, np.int32),
        np.cumsum([0, *lengths]).astype(np.int32),
        normal(kernel_size, TAPS_N_CTX),
        normal(TAPS_N_CTX),
        normal(sum(lengths), width),
    ]


def check_taps(ops: Ops, inputs: TapsInputs) -> None:
    exact: list[Any] = [a.astype(np.float64) if a.dtype == np.float32 else a for a in inputs]
    (y,) = ops.run("taps", *inputs)
    np.testing.assert_allclose(y, oracle.taps(*exact), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kernel_size", [1, 2, 4, 7, 64])
@pytest.mark.parametrize("width", [1, 5, 16, 33, 96])
def test_taps_of_widths_on_both_sides_of_the_kernel(ops: Ops, width: int, kernel_size: int) -> None:
    rng = np.random.default_rng(width)
    lengths, positions = [1, 0, 5, 0, 1, 30, 0], [0, 4, TAPS_N_CTX - 5, 0, 17, 0, 1]
    check_taps(ops, make_taps(rng, lengths, positions, width, kernel_size))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1] * 100])
def test_taps_of_any_mixture_of_lengths(ops: Ops, lengths: list[int]) -> None:
    rng = np.random.default_rng(len(lengths))
    positions = rng.integers(TAPS_N_CTX, size=len(lengths)).tolist()
    check_taps(ops, make_taps(rng, lengths, positions, 8, 3))


def test_nothing_left_of_channel_0_is_read(ops: Ops) -> None:
    """The last channels of a token lie in memory before the first ones of the next."""
    q, *rest = make_taps(np.random.default_rng(0), [2], [0], 40, 4)
    (y,) = ops.run("taps", q, *rest)
    poisoned = q.copy()
    poisoned[0] = np.nan
    (with_nan,) = ops.run("taps", poisoned, *rest)
    np.testing.assert_array_equal(with_nan[1], y[1])
    assert np.isnan(with_nan[0]).all()


def test_taps_of_a_token_have_the_same_bits_in_any_company(ops: Ops) -> None:
    lengths, positions = [300, 200, 1, 77], [0, 100, 511, 9]
    inputs = make_taps(np.random.default_rng(0), lengths, positions, 160, 4)
    (whole,) = ops.run("taps", *inputs)
    q, _, offsets, weight, beta, residual = inputs
    for position, begin, end in zip(positions, offsets[:-1], offsets[1:], strict=True):
        for step in (1, 64, 300):
            for first in range(begin, end, step):
                few = slice(first, min(first + step, end))
                where = [position + first - begin], [0, few.stop - few.start]
                rows = (np.array(values, np.int32) for values in where)
                (alone,) = ops.run("taps", q[few], *rows, weight, beta, residual[few])
                np.testing.assert_array_equal(alone, whole[few])
