"""The GPU's own products, run without one, against float64; and what an assembler makes of them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine.device.linear import round_bfloat16
from tests.kernels.harness import EPILOGUES, Array, widened
from tests.kernels.ptx import printed
from tests.kernels.ptx_async import TensorMap
from tests.kernels.ptx_cluster import Cluster
from tests.kernels.ptx_text import PTXError

THREADS, SHARED_BYTES = 384, 213_056  # of _sm90_kernel.mojo
SLICE = 256
COLUMNS = 512
ROW_COUNTS = [1, 2, 127, 128, 129, 257]
KINDS = [*EPILOGUES, "slices"]
"""Epilogues of harness.py, and the head with the softmax of each slice."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The PTX of each epilogue, N and K."""
    return compile_kernels(tmp_path_factory.mktemp("products"))


def compile_kernels(folder: Path, *defines: str) -> dict[str, str]:
    found = printed("product_kernels.mojo", folder, *defines)
    return {name: text.decode() for name, text in found.items()}


def check(text: str, kind: str, rows: int, depth: int, columns: int = COLUMNS) -> int:
    """Run a kernel and hold all that it writes to float64; return `Cluster.epilogue`."""
    rng = np.random.default_rng([rows, depth])
    shapes = (rows, depth), (columns, depth), (columns,), (rows, columns)
    drawn = [rng.standard_normal(shape, np.float32) for shape in shapes]
    drawn[1] /= np.sqrt(depth)
    given = [round_bfloat16(one) for one in drawn]
    x, weight, bias, residual = (widened(one).astype(np.float64) for one in given)
    out = np.full((rows, columns), 0x7FC0, np.uint16)
    slices = np.full((rows, columns // SLICE, 2), np.nan, np.float32)
    factors = TensorMap(given[0], 128), TensorMap(given[1], 128)
    arguments: list[Array | int | TensorMap] = [*factors, out, *given[2:], slices, rows]
    cluster = Cluster(text, THREADS, SHARED_BYTES, tuple(arguments), seed=rows)
    cluster.run()

    has_bias, silu, has_residual = EPILOGUES.get(kind, (False, False, False))
    y = x @ weight.T + (bias if has_bias else 0)
    y = y / (1 + np.exp(-y)) if silu else y
    y = y + residual if has_residual else y
    np.testing.assert_allclose(widened(out), y, rtol=2**-8, atol=3e-6)
    rounded_once = round_bfloat16(y.astype(np.float32))  # but for sums next to a tie
    assert (out != rounded_once).sum() <= 2 + out.size // 1000
    if kind == "slices":
        check_slices(slices, widened(out))
    return cluster.epilogue


def check_slices(found: Array, outputs: Array) -> None:
    parts = outputs.reshape(len(outputs), -1, SLICE).astype(np.float64)
    largest = parts.max(axis=-1)
    np.testing.assert_array_equal(found[..., 0], largest)
    sums = np.exp(parts - largest[..., None]).sum(axis=-1)
    np.testing.assert_allclose(found[..., 1], sums, rtol=2e-6)


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_right(kernels: dict[str, str], kind: str, rows: int) -> None:
    """The ring of stages goes round once a tile, or twice with the most rows."""
    depth = 512 if rows == max(ROW_COUNTS) else 256
    check(kernels[f"{kind} {COLUMNS} {depth}"], kind, rows, depth)


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
        check(text, "down", 128, 512)


@pytest.mark.slow
def test_every_product_of_the_benchmarks_is_right(tmp_path: Path) -> None:
    """In a tile with rows beyond it, and one more."""
    for name, text in compile_kernels(tmp_path, "wide").items():
        kind, columns, depth = name.split()
        check(text, kind, 257 if int(columns) < 8192 else 100, int(depth), int(columns))


needs_ptxas = pytest.mark.skipif(
    shutil.which("ptxas") is None, reason="needs CUDA's assembler, ptxas"
)


@needs_ptxas
def test_nothing_spills(kernels: dict[str, str], tmp_path: Path) -> None:
    for kind in KINDS:
        name = f"{kind} {COLUMNS} 512"
        check_registers(name, kernels[name], tmp_path)


def check_registers(name: str, text: str, folder: Path) -> None:
    """168 registers a thread, 384 of which fill a processor; `setmaxnreg` shares them out anew."""
    path = folder / "kernel.ptx"
    path.write_text(text)
    command = ["ptxas", "-arch=sm_90a", "-v", str(path), "-o", str(folder / "kernel.cubin")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said, name
    assert "Used 168 registers" in said and "C7510" not in said, (name, said)
