"""What each kernel takes of a GPU's processor, and so how many of its blocks run there at once."""

from __future__ import annotations

import pytest

from tests.kernels.gpu.test_products import ALL, KINDS, SMALL
from tests.kit.ptx.cubin import (
    ACQBULK,
    HGMMA,
    LDG,
    MUFU,
    PREEXIT,
    STG,
    UTMALDG,
    Resources,
    kernels_of,
    opcodes_of,
)
from tests.kit.ptx.mojo_program import printed

REGISTERS, SHARED = 65_536, 232_448
"""Of a processor of an H100 or H200."""
PRODUCT = (384, 1, 0)
LIMITS = {
    **dict.fromkeys(KINDS, PRODUCT),
    **dict.fromkeys((f"{SMALL}{kind}" for kind in KINDS), PRODUCT),
    **dict.fromkeys((f"{size}mixed_proj_in" for size in ("", SMALL)), PRODUCT),
    **dict.fromkeys(("sample", "sample_slices", "reject", "reject_slices"), (256, 2, 40_000)),
    "score": (256, 2, 2_000),
    "constrain": (256, 7, 2**15),
    "mix": (256, 5, 0),
    "mix_all": (256, 3, 0),
    "taps": (256, 5, 0),
    **dict.fromkeys(("embed", "embed_stream", "expand", "gather", "scatter"), (256, 8, 0)),
    **dict.fromkeys(("norm_e4m3", "norm_int8"), (256, 4, 0)),
}
"""Of each op: threads of a block, blocks that a processor must hold, shared bytes of a block beside
those that its launch asks for."""


@pytest.mark.parametrize(
    ("source", "defines"),
    [
        *((source, []) for source in ("batch", "row", "product")),
        ("product", [f"variants={ALL}"]),
        *(pytest.param(source, ["pdl"], marks=pytest.mark.slow) for source in ("batch", "row")),
        pytest.param("product", ["variants=pdl"], marks=pytest.mark.slow),
        ("product", ["narrow"]),
        pytest.param("product", ["narrow", f"variants={ALL}"], marks=pytest.mark.slow),
        pytest.param("product", ["wide"], marks=pytest.mark.slow),
    ],
)
def test_registers_suffice_and_blocks_fit(source: str, defines: list[str]) -> None:
    made = printed(f"{source}_kernels.mojo", "object", *defines)
    for name, code in made.items():
        ((_, taken),) = kernels_of(code).items()
        check(name, taken)


def test_tanh_halves_special_functions() -> None:
    """A thread has 128 values of SiLU a tile, and one norm of each of its two rows."""
    today, tanh = (codes_of(names)["normed_up"] for names in ("", ALL))
    assert (today.count(MUFU), tanh.count(MUFU)) == (258, 130)
    assert len(tanh) <= len(today) - 250


def test_int8_costs_instructions_and_saves_special_functions() -> None:
    """Transforms and scales of 128 values a thread of "up"; "down" only has integers to widen."""
    codes = codes_of("")
    ups, downs = (
        [codes[f"{kind}_{dtype}"] for dtype in ("e4m3", "int8")] for kind in ("up", "down")
    )
    assert [up.count(MUFU) for up in ups] == [256, 128]
    assert len(ups[1]) - len(ups[0]) <= 7 * 128
    assert len(downs[1]) - len(downs[0]) <= 128 + 16


@pytest.mark.parametrize(
    ("kind", "loads"),
    [
        ("normed_up", (32, 24)),
        ("normed_proj_in", (32, 24)),
        ("measured_down", (48, 36)),
    ],
)
def test_the_first_chunk_is_read_ahead(kind: str, loads: tuple[int, int]) -> None:
    """Loads behind the last product: of four chunks, or of all but the first."""
    codes = [codes_of(names)[kind] for names in ("", ALL)]
    behind = [code[::-1][: code[::-1].index(HGMMA)].count(LDG) for code in codes]
    assert tuple(behind) == loads


def codes_of(variants: str) -> dict[str, list[int]]:
    """The opcodes of the products of these variants, 512 deep, by their kinds."""
    defines = [f"variants={variants}"] if variants else []
    made = printed("product_kernels.mojo", "object", *defines)
    return {
        name.partition(" ")[0]: opcodes_of(code)
        for name, code in made.items()
        if name.endswith(" 512 512")
    }


def test_mixing_in_a_product_takes_few_instructions() -> None:
    """A thread mixes 128 channels of a tile, each in at most twelve instructions."""
    codes = codes_of("")
    plain, mixed = (codes[f"{kind}_proj_in"] for kind in ("normed", "mixed"))
    assert len(mixed) - len(plain) <= 12 * 128
    assert mixed.count(STG) == 4 * plain.count(STG), "states 16 bytes at a time, outputs 8"


def test_products_that_start_early_wait_before_they_read() -> None:
    """Weights of the first turn are asked for before the wait, by TMA, unless rows are mixed."""
    today, early = (codes_of(names) for names in ("", "pdl"))
    for kind, code in early.items():
        assert (code.count(ACQBULK), code.count(PREEXIT)) == (1, 1)
        wait = code.index(ACQBULK)
        assert code[:wait].count(UTMALDG) == 4 * ("mixed" not in kind)
        assert not {LDG, STG} & {*code[:wait]} and PREEXIT in code[wait:]
        assert code.count(HGMMA) == today[kind].count(HGMMA)
        for other in (MUFU, LDG, STG):
            assert code.count(other) == today[kind].count(other)


def check(name: str, taken: Resources) -> None:
    threads, blocks, shared = LIMITS[name.split(maxsplit=1)[0]]
    assert taken.stack == 0, f"{name} spills"
    assert taken.registers * threads * blocks <= REGISTERS, f"{name}: {taken.registers} registers"
    assert taken.shared <= shared and blocks * shared <= SHARED, f"{name}: {taken.shared} bytes"
