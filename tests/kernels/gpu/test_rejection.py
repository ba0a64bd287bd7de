"""Rows that the GPU's sampler draws by rejection, run without a GPU, against the oracle."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels import oracle
from tests.kernels.gpu.test_gpu_rows import (
    LONG,
    ROWS,
    WARPS,
    counted,
    kernel_for,
    rounded,
    slices_of,
)
from tests.kernels.harness import Ops
from tests.kernels.test_sampler import GREEDY, Settings, check, random_settings, run
from tests.kit.ptx.ptx import Kernel, compiled

TOP_P = Settings(top_p=float(np.float32(0.9)))
TRUNCATED = [
    TOP_P,
    Settings(float(np.float32(0.7)), top_p=0.5),
    Settings(top_k=40),
    Settings(2, min_p=0.0625),
    Settings(top_p=0.75, min_p=0.125),
    Settings(0.5, top_k=300, min_p=0.0625),
    Settings(top_p=2**-7),  # most rounds are in vain
    Settings(top_k=1),
    Settings(top_p=0),
    Settings(min_p=1),
    Settings(1.5),
]
"""Settings of rows that are drawn from slices, exact in float32."""
EVERY = ROWS | {
    "zeros": lambda rng, vocab: np.where(rng.random(vocab) < 0.5, -0.0, rng.integers(-1, 2, vocab)),
}
LEFT = [GREEDY, Settings(top_k=50, top_p=0.75), Settings(2, 9, 0.5, 0.0625)]
"""Settings of rows that are greedy, or drawn by the search."""


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    """Kernels by name and logits to a thread."""
    return compiled("row_kernels.mojo")


def uniforms_of(count: int) -> list[oracle.F64]:
    return [oracle.uniforms(100 + row, row) for row in range(count)]


@pytest.mark.parametrize("vocab", [256, 2304, 8192, 17_152])
def test_rejected_rows_have_the_oracles_tokens(kernels: dict[str, Kernel], vocab: int) -> None:
    """Rows of every kind; the largest vocabulary has more slices than a warp has lanes."""
    rng = np.random.default_rng(vocab)
    bits, logits = rounded(np.array([make(rng, vocab) for make in EVERY.values()] * 2, np.float32))
    rows = [TRUNCATED[i % len(TRUNCATED)] for i in range(len(logits))]
    slices = slices_of(logits, rows)
    kernel = kernel_for(kernels, "reject_slices", vocab)
    tokens, logprobs, _ = counted(kernel, bits, rows, slices, WARPS)
    check(logits, rows, uniforms_of(len(rows)), tokens, logprobs, decided=0.7)
    again, _, _ = counted(kernel, bits, rows, slices, 3)  # among others
    np.testing.assert_array_equal(again, tokens)


@pytest.mark.parametrize("vocab", [300, 2049, 8193])
def test_blocks_reject_as_the_oracle_does(kernels: dict[str, Kernel], vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    bits, logits = rounded(np.array([make(rng, vocab) for make in EVERY.values()] * 2, np.float32))
    every = [*TRUNCATED, *LEFT, *(random_settings(rng, vocab) for _ in range(10))]
    rows = [every[i % len(every)] for i in range(len(logits))]
    tokens, logprobs, _ = counted(kernel_for(kernels, "reject", vocab), bits, rows)
    check(logits, rows, uniforms_of(len(rows)), tokens, logprobs, decided=0.7)


def test_rows_left_are_sampled_as_without_slices(kernels: dict[str, Kernel]) -> None:
    """Edited rows, greedy ones, and those of top_k and top_p, between others."""
    rng = np.random.default_rng(3)
    rows = [item for row in [*LEFT, *TRUNCATED[:5]] for item in (TOP_P, row)]
    bits, logits = rounded(rng.normal(0, 2, (len(rows), 2048)))
    slices = slices_of(logits, rows)
    bits[7::2, :1024] = 0xFF80  # edited: the slices are of what was there
    slices[7::2, 0, 0] = np.nan
    blocks = counted(kernel_for(kernels, "reject", 2048), bits, rows)
    for of_a_block in (1, 3, WARPS):
        kernel = kernel_for(kernels, "reject_slices", 2048)
        tokens, logprobs, _ = counted(kernel, bits, rows, slices, of_a_block)
        for result, expected in zip((tokens, logprobs), blocks[:2], strict=True):
            np.testing.assert_array_equal(result[1::2], expected[1::2])
        uniforms = uniforms_of(len(rows))[::2]
        check(logits[::2], rows[::2], uniforms, tokens[::2], logprobs[::2], decided=0.7)


def test_a_gpu_rejects_what_a_cpu_rejects(kernels: dict[str, Kernel], cpu_ops: Ops) -> None:
    rng = np.random.default_rng(4)
    bits, logits = rounded(rng.normal(0, 2, (64, 1024)))
    rows = [(*TRUNCATED, *LEFT)[i % 14] for i in range(len(logits))]
    kernel, slices = kernel_for(kernels, "reject_slices", 1024), slices_of(logits, rows)
    tokens, _, _ = counted(kernel, bits, rows, slices, WARPS)
    places = np.arange(len(rows))
    expected, _ = run(cpu_ops, logits, rows, 100 + places, places, "reject")
    np.testing.assert_array_equal(tokens, expected)


KINDS = "normal, flat, nearly flat, uniform, peaked, a few, ties, ranks, offset, edited"


@pytest.mark.parametrize(
    ("settings", "most", "kinds"),
    [
        (Settings(), 620, "normal, peaked"),
        (TOP_P, 2_000, KINDS),
        (TOP_P, 700, "flat, peaked"),
        (Settings(0.7, top_p=0.95), 1_500, KINDS),
        (Settings(min_p=0.05), 1_600, KINDS),
        (Settings(top_p=0.9, min_p=0.05), 5_000, KINDS),
        (Settings(top_k=50), 5_000, "normal, flat, peaked, a few, ranks, offset, edited"),
    ],
)
def test_a_rejected_row_takes_few_instructions(
    kernels: dict[str, Kernel], settings: Settings, most: int, kinds: str
) -> None:
    """On average of 32 rows: of a search for what is kept a fifth."""
    rng = np.random.default_rng(0)
    for kind in kinds.split(", "):
        bits, logits = rounded(np.array([ROWS[kind](rng, LONG) for _ in range(4 * WARPS)]))
        rows = [settings] * len(bits)
        kernel, slices = kernel_for(kernels, "reject_slices", LONG), slices_of(logits, rows)
        *_, ran = counted(kernel, bits, rows, slices, WARPS)
        assert ran.warp_instructions <= most * len(bits), kind
