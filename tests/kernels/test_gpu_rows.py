"""The GPU's own code for sampling and scoring, run without a GPU, against the oracle."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.device.linear import KERNELS, round_bfloat16
from engine.steps.batch import F32, I32
from tests.kernels import oracle
from tests.kernels.harness import widened
from tests.kernels.ptx import Kernel
from tests.kernels.test_sampler import GREEDY, Settings, columns, random_settings
from tests.kernels.test_sampler import check as check_tokens

THREADS = 256
SHORT, LONG = 8 * THREADS, 32 * THREADS
"""The longest rows that the first and the second kernel hold; the third takes any."""
TOP = 5


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    """Kernels by op, dtype of the logits and logits to a thread."""
    program = tmp_path_factory.mktemp("rows") / "row_kernels"
    source = Path(__file__).with_name("row_kernels.mojo")
    mojo = Path(sys.executable).with_name("mojo")
    build = map(str, [mojo, "build", "-I", KERNELS.parent, source, "-o", program])
    subprocess.run(list(build), check=True, capture_output=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    texts = re.split(r"^=== (.*)\n", printed, flags=re.M)[1:]
    return {name: Kernel(text) for name, text in zip(texts[::2], texts[1::2], strict=True)}


def kernel_for(kernels: dict[str, Kernel], op: str, vocab: int, dtype: str = "bfloat16") -> Kernel:
    share = 0 if vocab > LONG else 32 if vocab > SHORT else 8
    return kernels[f"{op} {dtype} {share}"]


def rounded(logits: npt.NDArray[np.floating[Any]]) -> tuple[npt.NDArray[np.uint16], F32]:
    """As bfloat16, and what these are."""
    bits = round_bfloat16(logits.astype(np.float32))
    return bits, widened(bits)


def draw(kernel: Kernel, logits: npt.NDArray[np.generic], rows: list[Settings]) -> tuple[I32, F32]:
    """Sample; row i has seed 100 + i."""
    count, vocab = logits.shape
    tokens, logprobs = np.full(count, -9, np.int32), np.full(count, 9, np.float32)
    kernel.launch(
        *(count, THREADS, np.ascontiguousarray(logits), vocab),
        *columns(rows),
        np.arange(100, 100 + count, dtype=np.uint64),
        *(tokens, logprobs),
    )
    return tokens, logprobs


def check(logits: F32, rows: list[Settings], tokens: I32, logprobs: F32) -> None:
    uniforms = [oracle.uniform(100 + i, i) for i in range(len(rows))]
    check_tokens(logits, rows, uniforms, tokens, logprobs, decided=0.8)


@pytest.mark.parametrize(
    ("vocab", "count"),
    [(1, 3), (255, 6), (256, 6), (257, 6), (2048, 6), (2049, 6), (8191, 8), (8192, 8), (8193, 4)],
)
def test_tokens_and_logprobs(kernels: dict[str, Kernel], vocab: int, count: int) -> None:
    rng = np.random.default_rng(vocab)
    bits, logits = rounded(rng.normal(0, 3, (count, vocab)))
    rows = [Settings(top_p=0.9), *(random_settings(rng, vocab) for _ in range(count - 1))]
    check(logits, rows, *draw(kernel_for(kernels, "sample", vocab), bits, rows))


def test_float32_logits(kernels: dict[str, Kernel]) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1, (6, 5000)).astype(np.float32)
    rows = [Settings(top_p=0.9), *(random_settings(rng, 5000) for _ in range(5))]
    check(logits, rows, *draw(kernels["sample float32 32"], logits, rows))


@pytest.mark.parametrize("vocab", [300, 8192])
def test_ties_stay_together(kernels: dict[str, Kernel], vocab: int) -> None:
    """Eight different logits: every search ends between numbers that many tokens share."""
    rng = np.random.default_rng(vocab)
    levels = rng.integers(-4, 4, (8, vocab)) / 4
    levels[:2] = -0.0  # all the same
    bits, logits = rounded(levels)
    rows = [Settings(), Settings(top_k=3, top_p=0.5), Settings(top_p=0.3), Settings(top_k=vocab)]
    rows += [Settings(min_p=0.5), Settings(2, vocab // 2, 0.7, 0.1), GREEDY, Settings(top_k=1)]
    check(logits, rows, *draw(kernel_for(kernels, "sample", vocab), bits, rows))


@pytest.mark.parametrize("vocab", [5, 2500, 8200])
def test_rows_that_are_no_distribution(kernels: dict[str, Kernel], vocab: int) -> None:
    rng = np.random.default_rng(0)
    wild = rng.standard_normal((6, vocab))
    wild[0, 0] = np.nan
    wild[1, -1] = np.inf
    wild[2, :] = -np.inf
    wild[3, :] = np.nan
    wild[4, : vocab - 1] = -np.inf  # one token left
    bits, logits = rounded(wild)
    bits[0, 0] |= 0x8000  # a NaN may have a sign
    rows = [Settings(top_k=4, top_p=0.5, min_p=0.1)] * 6
    tokens, logprobs = draw(kernel_for(kernels, "sample", vocab), bits, rows)
    np.testing.assert_array_equal(tokens[:4], -1)
    np.testing.assert_array_equal(logprobs[:4], 0)
    assert (tokens[4], logprobs[4]) == (vocab - 1, 0)
    check(logits[5:], rows[5:], *draw(kernel_for(kernels, "sample", vocab), bits[5:], rows[5:]))


@pytest.mark.parametrize("vocab", [3, 2048, 8192, 8193])
def test_scores(kernels: dict[str, Kernel], vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    bits, logits = rounded(rng.integers(-40, 40, (3, vocab)) / 8)
    targets, num_top = rng.integers(0, vocab, 3).astype(np.int32), np.array([0, 2, TOP], np.int32)
    temperature = np.array([1, 0.5, 2], np.float32)
    ids, top = np.full((3, TOP), -9, np.int32), np.full((3, TOP), 9, np.float32)
    ranks, logprobs = np.zeros(3, np.int32), np.zeros(3, np.float32)
    kernel_for(kernels, "score", vocab).launch(
        *(3, THREADS, bits, vocab, temperature, targets, num_top, TOP), *(ids, top, ranks, logprobs)
    )
    for i in range(3):
        logprob, rank, likeliest = oracle.score(
            logits[i].astype(np.float64), float(temperature[i]), int(targets[i]), int(num_top[i])
        )
        assert logprobs[i] == pytest.approx(logprob, abs=2e-5)
        assert ranks[i] == rank
        found = len(likeliest)
        np.testing.assert_array_equal(ids[i, :found], [token for token, _ in likeliest])
        np.testing.assert_allclose(top[i, :found], [one for _, one in likeliest], atol=2e-5)
        np.testing.assert_array_equal(ids[i, found:], -1)
        np.testing.assert_array_equal(top[i, found:], 0)
