"""What each kernel takes of a GPU's processor, and so how many of its blocks run there at once."""

from __future__ import annotations

import pytest

from tests.kernels.gpu.test_products import KINDS, SMALL, VARIANTS
from tests.kit.ptx.cubin import MUFU, Resources, kernels_of, opcodes_of
from tests.kit.ptx.mojo_program import printed

REGISTERS, SHARED = 65_536, 232_448
"""Of a processor of an H100 or H200."""
PRODUCT = (384, 1, 0)
LIMITS = {
    **dict.fromkeys(KINDS, PRODUCT),
    **dict.fromkeys((f"{SMALL}{kind}" for kind in KINDS), PRODUCT),
    **dict.fromkeys(("sample", "sample_slices", "reject", "reject_slices"), (256, 2, 40_000)),
    "score": (256, 2, 2_000),
    "constrain": (256, 7, 2**15),
    "mix": (256, 5, 0),
    "mix_all": (256, 3, 0),
    "taps": (256, 5, 0),
    **dict.fromkeys(("embed", "embed_stream", "expand", "gather", "scatter"), (256, 8, 0)),
    "norm_e4m3": (256, 4, 0),
}
"""Of each op: threads of a block, blocks that a processor must hold, shared bytes of a block beside
those that its launch asks for."""


@pytest.mark.parametrize(
    ("source", "defines"),
    [
        *((source, []) for source in ("batch", "row", "product")),
        *(("product", [f"variants={names}"]) for names in VARIANTS),
        pytest.param("product", ["wide"], marks=pytest.mark.slow),
    ],
)
def test_registers_suffice_and_blocks_fit(source: str, defines: list[str]) -> None:
    made = printed(f"{source}_kernels.mojo", "object", *defines)
    for name, code in made.items():
        ((_, taken),) = kernels_of(code).items()
        check(name, taken)


def test_tanh_halves_special_functions() -> None:
    """Of SiLU of a tile: 128 values a thread, and one each of its two rows' norms."""
    codes = [printed("product_kernels.mojo", "object", *more) for more in ([], ["variants=tanh"])]
    today, tanh = (opcodes_of(code["normed_up 512 512"]) for code in codes)
    assert (today[MUFU], tanh[MUFU]) == (258, 130)
    assert tanh.total() <= today.total() - 250


def check(name: str, taken: Resources) -> None:
    threads, blocks, shared = LIMITS[name.split(maxsplit=1)[0]]
    assert taken.stack == 0, f"{name} spills"
    assert taken.registers * threads * blocks <= REGISTERS, f"{name}: {taken.registers} registers"
    assert taken.shared <= shared and blocks * shared <= SHARED, f"{name}: {taken.shared} bytes"
