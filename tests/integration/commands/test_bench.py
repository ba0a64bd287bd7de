"""The benchmarks run from end to end, on models too small to say anything, and write records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import srm.__main__ as srm
from srm.engine.config import DEMO_MODEL, ModelConfig
from srm.engine.weights.random_model import write_random_model

Record = dict[str, Any]
QUICK = "--repetitions=1 --seconds=0.01 --random-widths= --demo-model={bare}"


def engines(record: Record) -> None:
    (entry,) = record["models"]
    bies = {run["by"] for run in entry["runs"]}
    assert bies == {"srm", "PyTorch eager", "PyTorch compiled"}


def ops(record: Record) -> None:
    assert record["peak_gb_per_s"] > 0 and len(record["memory_before"]) == 3
    ((run,),) = (entry["runs"] for entry in record["models"])
    names = {op["op"] for op in run["ops"]}
    assert names >= {"embed", "norm", "up", "down", "mix", "taps", "edit", "sample", "score"}
    assert [op["rows"] for op in run["ops"]] == [1, 70] * len(names)
    assert all(op["seconds"] > 0 and op["bytes"] > 0 for op in run["ops"])


def prompts(record: Record) -> None:
    (entry,) = record["models"]
    assert {item["prompt_tokens"] for run in entry["runs"] for item in run["prefill"]} == {1, 8, 16}


def hosts(record: Record) -> None:
    cases = [(case["running"], case["rows"], case["length"]) for case in record["cases"]]
    expected = [(32, rows, length) for rows in (32, 16) for length in (None, 4)]
    assert cases == [(8, 8, None), (8, 8, 4), *expected]
    assert all(case["schedule"] > 0 and len(case["raw"]) == 2 for case in record["cases"])


def bursts(record: Record) -> None:
    kinds = [(case["requests"], case["n"], case["is_stream"]) for case in record["cases"]]
    assert kinds == [(3, 1, True), (2, 5, True), (2, 5, False)]
    assert all(case["http_tokens_per_s"][0] > 0 for case in record["cases"])
    assert all(case["harmless_tokens_per_s"][0] > 0 for case in record["cases"])
    assert all(case["hostile_tokens_per_s"][0] > 0 for case in record["cases"])
    for case in record["cases"]:
        assert case["hostile_answers"] and {*case["hostile_answers"]} <= {"200", "400", "503"}


def drained(record: Record) -> None:
    cases = [(case["requests"], case["n"], case["by"]) for case in record["cases"]]
    assert cases == [(size, n, by) for size, n in ((3, 1), (2, 5)) for by in ("sink", "loadtest")]
    for case in record["cases"]:
        (burst,) = case["raw"]
        assert burst["tokens"] == 9 * case["requests"] * case["n"]
        assert burst.get("events", 99) > case["requests"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags", "check", "line"),
    [
        ("engine", f"{QUICK} --batch-sizes=1,8", engines, "| demo | srm |"),
        ("prefill", f"{QUICK} --prompt-lengths=1,8,99 --step-tokens=99", prompts,
         "| demo | float32 | 16 |"),
        ("kernels", f"{QUICK} --dtypes=float32 --rows=1,70", ops,
         "| demo | float32 | mix, prompts of 64 | 70 |"),
        ("host", "--running=8,32 --turn-rows=16 --length=4 --samples=2 --seconds=0.01 "
         "--model=absent --repetitions=2", hosts, "| 32 | in turns of 16, replaced after 4 tokens"),
        ("http", "--model={demo} --streams=3 --requests=2 --n=5 --max-tokens=9 --repetitions=1 "
         "--hostile=7", bursts, "| 2 × 5 | whole |"),
        ("sink", "--model={demo} --streams=3 --requests=2 --n=5 --max-tokens=9 --repetitions=1 "
         "--compare=true", drained, "| 2 × 5 | loadtest |"),
    ],
)  # fmt: skip
def test_a_benchmark_writes_its_record(
    name: str, flags: str, check: Callable[[Record], None], line: str, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shape = ModelConfig(d_model=16, num_layers=1, num_heads=2, n_ctx=16, vocab_size=32)
    write_random_model(bare, shape)
    given = flags.format(bare=bare, demo=DEMO_MODEL).split()
    assert srm.main(["bench", name, f"--output={tmp_path}", *given]) == 0
    (path,) = tmp_path.glob("*.json")
    check(json.loads(path.read_text()))
    assert line in path.with_suffix(".md").read_text()
