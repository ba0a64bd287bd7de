"""The benchmarks of the engine run from end to end, on a model too small to say anything."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import srm
from bench.host.tiny import main as write_tiny_model
from bench.server.processes import processor_seconds
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.weights.random_model import write_random_model
from tests.serving import SERVER_FLAGS, Server


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
    assert path.with_suffix(".svg").exists()


@pytest.mark.slow
def test_the_kernels_benchmark_measures_every_op(tiny: Path, tmp_path: Path) -> None:
    quick = ["--repetitions=1", "--seconds=0.001", "--random-widths=", "--dtypes=float32"]
    model, output = f"--demo-model={tiny}", f"--output={tmp_path}"
    assert srm.main(["bench", "kernels", model, output, "--rows=1,70", *quick]) == 0
    (path,) = tmp_path.glob("*-kernels.json")
    record = json.loads(path.read_text())
    assert record["peak_gb_per_s"] > 0 and len(record["memory_before"]) == 3
    (entry,) = record["models"]
    (run,) = entry["runs"]
    ops = {one["op"] for one in run["ops"]}
    assert ops >= {"embed", "norm", "up", "down", "mix", "taps", "edit", "sample", "score", "head"}
    assert [one["rows"] for one in run["ops"]] == [1, 70] * len(ops)
    assert all(one["seconds"] > 0 and one["bytes"] > 0 for one in run["ops"])
    assert "| demo | float32 | mix, prompts of 64 | 70 |" in path.with_suffix(".md").read_text()
    assert path.with_suffix(".svg").exists()


@pytest.mark.slow
def test_the_text_benchmark_writes_its_record(text_model: Path, tmp_path: Path) -> None:
    sizes = ["--streams=8", "--requests=2", "--n=5", "--max-tokens=20", "--repetitions=1"]
    flags = [f"--model={text_model}", f"--output={tmp_path}", "--api-processes=2", *sizes]
    assert srm.main(["bench", "text", *flags]) == 0
    (path,) = tmp_path.glob("*-text.json")
    for case in json.loads(path.read_text())["cases"]:
        assert [one["tokens"] for one in case["raw"]] == [20 * case["requests"] * case["n"]]
    assert "| streams | 8 × 1 |" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_the_jobs_benchmark_writes_its_record(text_model: Path, tmp_path: Path) -> None:
    flags = ["--lines=20,50", "--engine=instant", "--num-slots=64", f"--model={text_model}"]
    assert srm.main(["bench", "jobs", f"--output={tmp_path}", *flags]) == 0
    (path,) = tmp_path.glob("*-jobs.json")
    cases = json.loads(path.read_text())["cases"]
    assert [case["lines"] for case in cases] == [20, 50]
    for case in cases:
        assert {"supervisor", "server api", "server jobs"} < set(case["processes"])
        assert all(one["peak_bytes"] > 2**20 for one in case["processes"].values())
    assert "| 50 |" in path.with_suffix(".md").read_text()


@pytest.mark.slow
def test_the_background_benchmark_writes_its_record(tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert write_tiny_model([str(model)]) == 0
    flags = ["--seconds=3", "--max-tokens=4", "--batch-max-tokens=9", "--num-slots=8"]
    flags += [f"--model={model}", "--batch-lines=100000", f"--output={tmp_path}"]
    assert srm.main(["bench", "background", *flags]) == 0
    (path,) = tmp_path.glob("*-background.json")
    alone, beside = json.loads(path.read_text())["cases"]
    assert len(alone["first_token_s"]) == len(beside["first_token_s"]) == 12
    assert beside["batch_tokens_per_s"] > 0


@pytest.fixture(scope="module")
def server(text_model: Path) -> Iterator[Server]:
    with Server(text_model, *SERVER_FLAGS) as started:
        yield started


def bench_server(server: Server, output: Path, *flags: str) -> int:
    sizes = ["--streams=8", "--requests=2", "--n=5", "--max-tokens=20", "--repetitions=1"]
    named = ["--served-model-name=tiny", "--server-name=SRM 1.0 (numpy)", "--server-note=Tiny."]
    return srm.main(
        ["bench", "server", f"--url={server.url}", f"--output={output}", *sizes, *named, *flags]
    )


def test_any_server_can_be_measured(server: Server, tmp_path: Path) -> None:
    assert bench_server(server, tmp_path, f"--server-pid={server.process.pid}") == 0
    (path,) = tmp_path.glob("*-server-srm-1.0-numpy.json")
    cases = json.loads(path.read_text())["cases"]
    assert [(case["requests"], case["n"], case["raw"][0]["tokens"]) for case in cases] == [
        (8, 1, 160),
        (2, 5, 200),
        (8, 1, 160),
        (2, 5, 200),
    ]
    for case in cases:
        assert (case["raw"][0]["events"] > 0) == case["name"].startswith("streams")
    table = path.with_suffix(".md").read_text()
    assert "SRM 1.0 (numpy). Tiny." in table
    assert "| streams of many | 2 × 5 | 200 |" in table
    assert "| of `tests.engines.numpy_engine` |" in table


def test_processor_time_is_told_by_what_processes_run(server: Server) -> None:
    assert {"server", "tests.engines.numpy_engine"} <= set(processor_seconds(server.process.pid))
    with pytest.raises(ConfigError, match="no process"):
        processor_seconds(2**22 + 1)  # above the largest that Linux gives


def test_a_server_that_is_not_asked_for_its_processor_time(server: Server, tmp_path: Path) -> None:
    assert bench_server(server, tmp_path) == 0
    (path,) = tmp_path.glob("*.json")
    cases = json.loads(path.read_text())["cases"]
    assert not any(case["raw"][0]["processor_s"] for case in cases)


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--n=1000001", "n must be"),
        ("--served-model-name=nobody", "nobody"),
        ("--url=http://127.0.0.1:1", "http://127.0.0.1:1: "),
        ("--url=https://127.0.0.1:1", "url must be http://HOST:PORT"),
        ("--server-name=", "server_name must be given"),
        ("--server-pid=-1", "server_pid must be at least 0"),
        ("--streams=0", "streams must be at least 1"),
    ],
)
def test_what_the_server_refuses_is_said(
    flag: str, said: str, server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_server(server, tmp_path, flag) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_snapshot_benchmark_writes_its_record(tiny: Path, tmp_path: Path) -> None:
    sizes = ["--sequences=8,20", "--max-tokens=12", "--repetitions=1"]
    assert srm.main(["bench", "snapshot", f"--model={tiny}", f"--output={tmp_path}", *sizes]) == 0
    (path,) = tmp_path.glob("*-snapshot.json")
    for run, count in zip(json.loads(path.read_text())["runs"], (8, 20), strict=True):
        assert run["same_tokens"]
        assert [one["sequences"] for one in run["snapshots"]] == [count]
    assert "| 20 |" in path.with_suffix(".md").read_text()
