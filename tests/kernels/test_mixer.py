"""`srm_mix` against the oracle, and its bits against themselves."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.batch import F32, I32
from tests.kernels import oracle
from tests.kernels.harness import Ops

N_CTX = 2048
LAYERS = 3


@dataclass(frozen=True)
class Rows:
    """A batch, in the order of the op's inputs."""

    x: F32
    read_slots: I32
    write_slots: I32
    positions: I32
    row_offsets: I32


@dataclass(frozen=True)
class Layer:
    """A layer's parameters, in the order of the op's inputs."""

    alpha_in: F32
    alpha_out: F32
    beta: F32
    decay: F32


def make_rows(
    rng: np.random.Generator, lengths: Sequence[int], positions: Sequence[int], width: int
) -> Rows:
    """Rows over 2 R + 1 slots: half read the slot they write, half read one that they share."""
    num_rows = len(lengths)
    write_slots = rng.permutation(2 * num_rows + 1)[:num_rows].astype(np.int32)
    never_written = np.setdiff1d(np.arange(2 * num_rows + 1), write_slots)
    read_slots = np.where(rng.random(num_rows) < 0.5, write_slots, never_written[0])
    return Rows(
        rng.standard_normal((sum(lengths), width)).astype(np.float32),
        read_slots.astype(np.int32),
        write_slots,
        np.array(positions, np.int32),
        np.cumsum([0, *lengths]).astype(np.int32),
    )


def make_layer(rng: np.random.Generator, heads: int) -> Layer:
    shape = (heads, N_CTX)
    alpha_in, alpha_out, beta = (rng.standard_normal(shape).astype(np.float32) for _ in range(3))
    alpha_in[: heads // 2] = 1  # column heads, as a model has them
    return Layer(alpha_in, alpha_out, beta, rng.uniform(0.9, 1, heads).astype(np.float32))


def make_state(rng: np.random.Generator, rows: Rows) -> F32:
    shape = (2 * len(rows.positions) + 1, LAYERS * rows.x.shape[1])
    return rng.standard_normal(shape).astype(np.float32)


def as_arrays(record: Rows | Layer) -> list[npt.NDArray[Any]]:
    return list(vars(record).values())


def run(ops: Ops, state: F32, rows: Rows, layer: Layer, index: int = 1) -> F32:
    (y,) = ops.run("mix", state, np.array(index, np.int32), *as_arrays(rows), *as_arrays(layer))
    return y


def check(ops: Ops, state: F32, rows: Rows, layer: Layer, index: int = 1) -> None:
    """Outputs and states agree with the oracle; whatever is not written keeps its bits."""
    arguments = [a.astype(np.float64) if a.dtype == np.float32 else a for a in as_arrays(rows)]
    y_expected, expected = oracle.mix(
        state.astype(np.float64),
        index,
        *arguments,
        *(a.astype(np.float64) for a in as_arrays(layer)),
    )
    before = state.copy()
    y = run(ops, state, rows, layer, index)
    np.testing.assert_allclose(y, y_expected, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(state, expected, rtol=1e-5, atol=1e-4)
    width = rows.x.shape[1]
    written = np.zeros(state.shape, bool)
    written[rows.write_slots, index * width : (index + 1) * width] = True
    np.testing.assert_array_equal(state[~written], before[~written])


HEADS = [(4, 64), (4, 16), (2, 1), (3, 5), (4, 17), (2, 33), (1, 64), (6, 63), (4, 96), (2, 512)]


@pytest.mark.parametrize(("heads", "head_width"), HEADS)
def test_ragged_rows(ops: Ops, heads: int, head_width: int) -> None:
    rng = np.random.default_rng(head_width)
    lengths = [1, 1, 1, 0, 5, 1, 63, 0, 2]
    positions = [0, 1, N_CTX - 1, 9, 0, 700, N_CTX - 63, 0, 1]
    rows = make_rows(rng, lengths, positions, heads * head_width)
    check(ops, make_state(rng, rows), rows, make_layer(rng, heads))


@pytest.mark.parametrize("lengths", [[], [0], [1], [1] * 300, [1] * 100 + [900], [900, 0, 1, 0]])
def test_any_mixture_of_lengths(ops: Ops, lengths: list[int]) -> None:
    rng = np.random.default_rng(len(lengths))
    positions = [int(rng.integers(N_CTX - length)) for length in lengths]
    rows = make_rows(rng, lengths, positions, 256)
    check(ops, make_state(rng, rows), rows, make_layer(rng, 4))


@pytest.mark.parametrize("index", range(LAYERS))
def test_each_layer_has_its_own_columns(ops: Ops, index: int) -> None:
    rng = np.random.default_rng(index)
    rows = make_rows(rng, [1, 4, 1], [3, 0, 5], 128)
    check(ops, make_state(rng, rows), rows, make_layer(rng, 4), index)


def test_position_0_ignores_what_the_slot_holds(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    rows = make_rows(rng, [1, 3, 0], [0, 0, 0], 64)
    layer, state = make_layer(rng, 4), make_state(rng, rows)
    zeros, garbage = np.zeros_like(state), np.full_like(state, np.nan)
    np.testing.assert_array_equal(run(ops, garbage, rows, layer), run(ops, zeros, rows, layer))
    written = rows.write_slots, slice(64, 128)
    np.testing.assert_array_equal(garbage[written], zeros[written])


def test_forks_leave_their_source(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    num_rows, source = 50, 7
    write_slots = np.delete(np.arange(num_rows + 1), source).astype(np.int32)
    rows = replace(
        make_rows(rng, [1] * num_rows, [9] * num_rows, 64),
        read_slots=np.full(num_rows, source, np.int32),
        write_slots=write_slots,
    )
    check(ops, make_state(rng, rows), rows, make_layer(rng, 2))


def test_residual_is_added(ops: Ops) -> None:
    rng = np.random.default_rng(0)
    rows = make_rows(rng, [1, 20, 1], [0, 0, 5], 96)
    layer, state = make_layer(rng, 4), make_state(rng, rows)
    residual = rng.standard_normal(rows.x.shape).astype(np.float32)
    y = run(ops, state.copy(), rows, layer)
    (with_residual,) = ops.run(
        "mix_add", state, np.array(1, np.int32), *as_arrays(rows), *as_arrays(layer), residual
    )
    np.testing.assert_array_equal(with_residual, y + residual)


@pytest.mark.parametrize("cuts", [[1], [299], [100, 101, 102, 250], list(range(1, 300))])
def test_any_chunking_gives_the_same_bits(ops: Ops, cuts: list[int]) -> None:
    rng = np.random.default_rng(0)
    layer = make_layer(rng, 4)
    whole = make_rows(rng, [300], [0], 4 * 40)
    at_once, in_chunks = (np.ones((3, LAYERS * 160), np.float32) for _ in range(2))
    y = run(ops, at_once, whole, layer)
    for begin, end in zip([0, *cuts], [*cuts, 300], strict=True):
        # Beside other rows, so that the work is split differently.
        others = int(rng.integers(200))
        chunk = make_rows(rng, [end - begin, *[1] * others], [begin, *[5] * others], 160)
        chunk.x[: end - begin] = whole.x[begin:end]
        chunk.read_slots[0] = chunk.write_slots[0] = whole.write_slots[0]
        chunk.read_slots[1:] = chunk.write_slots[1:] = 3 + np.arange(others)
        pool = np.ones((3 + others, in_chunks.shape[1]), np.float32)
        pool[:3] = in_chunks
        np.testing.assert_array_equal(
            run(ops, pool, chunk, layer)[: end - begin], y[begin:end], strict=True
        )
        in_chunks = pool[:3]
    np.testing.assert_array_equal(in_chunks, at_once)


def test_offsets_into_a_large_pool_are_64_bit(ops: Ops, request: pytest.FixtureRequest) -> None:
    """A pool of more than 2^32 values, of which only the pages touched take memory."""
    if request.node.callspec.params["ops"] == "gpu":
        pytest.skip("copying the pool to a device would touch all of it")
    rng = np.random.default_rng(0)
    width, slots = 64, 2**32 // (LAYERS * 64) + 2
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = mmap.mmap(-1, slots * LAYERS * width * 4, flags=flags)
    pool = np.frombuffer(memory, np.float32).reshape(slots, LAYERS * width)
    used = np.array([0, 5, slots // 2, slots - 2, slots - 1])
    rows = make_rows(rng, [1, 2], [4, 8], width)
    layer, small = make_layer(rng, 4), make_state(rng, rows)
    pool[used] = small
    y = run(ops, small, rows, layer)
    far = replace(
        rows,
        read_slots=used[rows.read_slots].astype(np.int32),
        write_slots=used[rows.write_slots].astype(np.int32),
    )
    np.testing.assert_array_equal(run(ops, pool, far, layer), y)
    np.testing.assert_array_equal(pool[used], small)
