"""The benchmarks of the engine run from end to end, on a model too small to say anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import srm
from engine.config import ModelConfig
from engine.random_model import write_random_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    config = ModelConfig(d_model=16, num_layers=1, num_heads=2, n_ctx=16, vocab_size=32)
    write_random_model(folder, config)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "measured"),
    [
        ("engine", ["--batch-sizes=1,8"], {"srm", "PyTorch eager", "PyTorch compiled"}),
        ("prefill", ["--prompt-lengths=1,8,99", "--step-tokens=99"], set()),
    ],
)
def test_a_benchmark_writes_its_record(
    name: str, sizes: list[str], measured: set[str], tiny: Path, tmp_path: Path
) -> None:
    quick = ["--repetitions=1", "--seconds=0.01", "--random-widths="]
    model, output = f"--demo-model={tiny}", f"--output={tmp_path}"
    assert srm.main(["bench", name, model, output, *quick, *sizes]) == 0
    (path,) = tmp_path.glob(f"*-{name}.json")
    (entry,) = json.loads(path.read_text())["models"]
    assert {run["by"] for run in entry["runs"] if "by" in run} == measured
    assert "| demo |" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".svg").exists() == (name == "engine")


@pytest.mark.slow
def test_the_text_benchmark_writes_its_record(text_model: Path, tmp_path: Path) -> None:
    sizes = ["--streams=8", "--requests=2", "--n=5", "--max-tokens=20", "--repetitions=1"]
    flags = [f"--model={text_model}", f"--output={tmp_path}", "--api-processes=2", *sizes]
    assert srm.main(["bench", "text", *flags]) == 0
    (path,) = tmp_path.glob("*-text.json")
    for case in json.loads(path.read_text())["cases"]:
        assert [one["tokens"] for one in case["raw"]] == [20 * case["requests"] * case["n"]]
    assert "| streams | 8 × 1 |" in path.with_suffix(".md").read_text()
