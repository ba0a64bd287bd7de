"""The product that mixes rows which decode, run without a GPU: the bits of product and mixer."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from srm.engine.steps.batch import F32
from tests.kernels import oracle
from tests.kernels.gpu.test_products import SMALL, Run, check, compile_kernels, run
from tests.kernels.harness import widened
from tests.kernels.test_mixer import N_CTX, UNITS, Rows, Unit, make_rows, make_state, make_unit
from tests.kit.ptx.ptx import Kernel, compiled

HEADS, UNIT, BLOCK = {384: 6}, 1, 256
PLAIN, MIXED = "normed_proj_in", "mixed_proj_in"
"""The product without and with the mixer."""
OUT, STATE = 0, 10
"""Places of the output and of the pool among the arrays of a product's arguments."""
Array = npt.NDArray[Any]


class Step(NamedTuple):
    """Rows that decode, the unit that mixes them, and the states before."""

    rows: Rows
    unit: Unit
    state: F32

    def sizes(self) -> tuple[int, ...]:
        """The last fields of `_Unit`."""
        width = self.state.shape[1] // UNITS
        count, heads = len(self.rows.positions), heads_of(width)
        return count, heads, width // heads, N_CTX, self.state.shape[1], UNIT * width


def heads_of(width: int) -> int:
    return HEADS.get(width, 4)


def make_step(decode: int, width: int) -> Step:
    """Every third row begins its sequence, some where states of others were that are no numbers."""
    rng = np.random.default_rng(decode)
    positions = rng.integers(1, N_CTX, decode)
    positions[::3] = 0
    rows = make_rows(rng, [1] * decode, positions.tolist(), width)
    state = make_state(rng, rows)
    is_own = rows.read_slots == rows.write_slots
    state[rows.read_slots[is_own & (positions == 0)]] = np.nan
    return Step(rows, make_unit(rng, heads_of(width)), state)


def multiply_and_mix(
    text: str, small: str, count: int, depth: int, step: Step, variants: str = ""
) -> tuple[Run, F32]:
    """Run the product of `count` rows that mixes the first ones; return the states after."""
    state, any_bits, (_, *places) = step.state.copy(), np.zeros(1, np.uint16), step.rows
    unit: Any = (any_bits, state, any_bits, *places, *step.unit, any_bits, *step.sizes())
    width = state.shape[1] // UNITS
    return run(text, f"{small}{PLAIN}", count, depth, width, (), variants, unit), state


def mix_after(mixer: Kernel, x: Array, step: Step) -> tuple[Array, F32]:
    """Run the mixer's own kernel on what a product gave; return its outputs and states."""
    state, (_, *places), y = step.state.copy(), step.rows, np.zeros_like(x)
    heads = heads_of(x.shape[1])
    lanes = x.shape[1] // heads // 8
    by = BLOCK // (lanes * heads)
    grid, block = (-(-len(x) // by), 1, 1), (lanes, heads, by)
    mixer.launch(grid, block, y, state, x, *places, *step.unit, x, *step.sizes())
    return y, state


@pytest.mark.parametrize(
    ("defines", "small", "count", "decode", "width"),
    [
        ([], "", 1, 1, 512),
        ([], "", 129, 129, 512),
        ([], "", 257, 100, 512),
        ([], SMALL, 129, 80, 512),
        (["narrow"], "", 129, 100, 384),
        *(
            pytest.param(["wide"], small, 257, 250, width, marks=pytest.mark.slow)
            for small in ("", SMALL)
            for width in (512, 1024)
        ),
    ],
)
def test_mixing_in_the_product_gives_the_same_bits(
    defines: list[str], small: str, count: int, decode: int, width: int
) -> None:
    """As a product and the mixer behind it do; rows that do not decode are the product's."""
    depth, step = width if defines else 256, make_step(decode, width)
    products = compile_kernels(*defines)
    plain = run(products[f"{PLAIN} {width} {depth}"], PLAIN, count, depth, width)
    check(PLAIN, plain)
    mixer = compiled("batch_kernels.mojo")["mix bfloat16 8"]
    y, after = mix_after(mixer, plain.out[:decode].copy(), step)
    text = products[f"{small}{MIXED} {width} {depth}"]
    mixed, state = multiply_and_mix(text, small, count, depth, step)
    np.testing.assert_array_equal(mixed.out[:decode], y)
    np.testing.assert_array_equal(mixed.out[decode:], plain.out[decode:])
    np.testing.assert_array_equal(state.view(np.uint32), after.view(np.uint32))

    _, *places = step.rows
    *scalars, _ = (part.astype(np.float64) for part in step.unit)
    exact, before = widened(plain.out[:decode]).astype(np.float64), step.state.astype(np.float64)
    arguments: list[Any] = [before, UNIT, exact, *places, *scalars]
    y_expected, expected = oracle.mix(*arguments)
    np.testing.assert_allclose(widened(mixed.out[:decode]), y_expected, rtol=2**-8, atol=1e-4)
    np.testing.assert_allclose(state, expected, rtol=1e-5, atol=1e-4)


def test_a_dependent_mixing_product_gives_the_same_bits() -> None:
    count, width, depth = 129, 512, 256
    step, results = make_step(count, width), []
    for variants in ("", "pdl"):
        kernels = compile_kernels(*([f"variants={variants}"] if variants else []))
        text = kernels[f"{SMALL}{MIXED} {width} {depth}"]
        ran, state = multiply_and_mix(text, SMALL, count, depth, step, variants)
        results.append((ran.out, state.view(np.uint32)))
    for today, dependent in zip(*results, strict=True):
        np.testing.assert_array_equal(today, dependent)


def test_mixing_in_the_product_moves_states_and_outputs_once() -> None:
    """8 bytes of state and 2 of output a channel: between product and mixer nothing is written."""
    count, width, depth = 256, 512, 256  # no row of the cluster is beyond them
    text = compile_kernels()[f"{MIXED} {width} {depth}"]
    step = make_step(count, width)
    own = step._replace(rows=step.rows._replace(read_slots=step.rows.write_slots))
    ran, _ = multiply_and_mix(text, "", count, depth, own)
    assert ran.moved[STATE] == 8 * count * width
    assert ran.moved[OUT] == 2 * count * width
