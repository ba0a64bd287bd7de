"""Whole updates are timed by width; a case that cannot be computed is a row that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from research.experiments import throughput
from research.experiments.__main__ import main
from srm.training import captured
from srm.training.processes import processes
from tests.kit.recorded_graph import install

TINY: dict[str, Any] = {"num_layers": 1, "n_ctx": 16, "vocab_size": 32}


def test_each_width_is_measured_and_shown(tmp_path: Path) -> None:
    argv = ["throughput", f"--output={tmp_path}", f"--results={tmp_path / 'results'}"]
    argv += ["--rows=2", "--widths=8,16", "--micro-batches=2"]
    sizes = {**TINY, "seconds": 0.001}
    for kinds in ("SRM", "SRM,Transformer"):  # the second time SRM as it was measured
        assert main([*argv, "--threads=1", f"--kinds={kinds}"], **sizes) == 0
    (written,) = tmp_path.glob("*-experiment-throughput.md")
    text, record = written.read_text(), json.loads(written.with_suffix(".json").read_text())
    cases = [f"{kind} {d}" for kind in ("SRM", "Transformer") for d in (8, 16)]
    assert list(record["results"]) == ["matrix product", *cases]
    for name in cases:
        (numbers,) = record["results"][name]
        assert numbers["tokens_per_s"] > 0 < numbers["flops"] and sum(numbers["seconds"]) >= 0.001
    weights = 2 * 8 * 32 + 2 * 8 * 8 + 8 * 32  # channel layers, projections, output layer
    assert record["results"][cases[0]][0]["flops"] == 6 * (weights + 16 * 8) * 2 * 16
    assert text.count("\n| SRM | ") == 4 and "| model | d 8 | d 16 |" in text
    assert "the paper's" not in text  # whose models have other sizes
    assert "<!-- Transformer -->" in written.with_suffix(".svg").read_text()
    assert main(["page", str(written.with_suffix(".json"))]) == 0


@pytest.mark.parametrize("kind", throughput.PAPER_MILLIONS)
def test_parameters_are_those_that_the_paper_counts(kind: str) -> None:
    config = throughput.Settings()
    for width in (128, 1_024):
        counted = throughput.count(config, kind, width)["parameters"] / 1e6
        assert counted == pytest.approx(throughput.PAPER_MILLIONS[kind][width], abs=0.06)


def test_a_case_without_memory_is_a_row() -> None:
    config = throughput.Settings(widths=(8, 16), kinds=("SRM",))
    done = {"parameters": 1, "flops": 1, "tokens_per_s": 2.0, "bytes": 2**20}
    results: dict[str, list[dict[str, Any]]] = {
        "matrix product": [{"flops_per_s": 1e12}],
        "SRM 8": [done],
        "SRM 16": [{"parameters": 2, "failed": throughput.OUT_OF_MEMORY}],
    }
    text = "\n".join(throughput.page(config, results))
    assert "| SRM | 2 | out of memory |" in text and "| SRM | 1 | out of memory |" in text


@pytest.mark.parametrize("kind", ["SRM", "Transformer"])
def test_captured_updates_are_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one is captured, and each by a replay."""
    graph = install(monkeypatch)
    config = throughput.Settings(**TINY, rows=4, micro_batches=2, seconds=0.001)
    with processes("cpu") as own:
        done = throughput._timed(config, kind, "captured", 8, own)
    updates = 1 + done["updates_of_a_window"] * len(done["seconds"])
    assert graph.captures == 1
    assert graph.replays == throughput.WARM_UP - captured.WARM_UP + updates
    with pytest.raises(ValueError, match="forms must be eager or compiled on a CPU, got"):
        throughput.Settings(forms=("eager", "captured"))


def test_triton_is_measured_on_a_gpu_for_an_srm_alone() -> None:
    with pytest.raises(ValueError, match="forms must be eager or compiled on a CPU, got"):
        throughput.Settings(forms=("triton",), kinds=("SRM",))
    with pytest.raises(ValueError, match="kinds must be SRM where forms have triton, got"):
        throughput.Settings(forms=("eager", "triton captured"), device="gpu")


def test_a_forms_rows_are_named_by_it_beside_the_papers_speed() -> None:
    config = throughput.Settings(widths=(512,), kinds=("SRM",), forms=("eager", "compiled"))
    done = {"parameters": 1, "flops": 1, "tokens_per_s": 2.0, "bytes": 2**20}
    peak: dict[str, list[dict[str, Any]]] = {"matrix product": [{"flops_per_s": 1e12}]}
    results = peak | {"SRM 512": [done], "SRM compiled 512": [{**done, "tokens_per_s": 3.0}]}
    text = "\n".join(throughput.page(config, results))
    assert "| SRM | 2 |" in text and "| SRM compiled | 3 |" in text
    assert "one of its two H100 NVL: d 512 412,000" in text


def test_every_kind_can_be_computed() -> None:
    config = throughput.Settings(num_layers=1, n_ctx=16, vocab_size=32)
    for kind in throughput.KINDS:
        assert config.make(kind, 8)(torch.zeros(1, 16, dtype=torch.int64)).shape == (1, 16, 32)
