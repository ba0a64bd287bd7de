"""What benchmarks make of their measurements: tables, and pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from research.bench.engine import kernels, prefill, throughput
from research.bench.host import host
from research.bench.model.plots import KINDS, main
from research.bench.peaks.rates import memory_peak, peaks
from research.bench.records.figures import is_whole
from srm.loadtest.records import RECORDS

BATCHES = [
    {"batch_size": 1, "tokens_per_s": 10.0, "raw": [10.0]},
    {"batch_size": 64, "tokens_per_s": 500.0, "raw": [500.0]},
]


def record(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a model of 1 GFLOP a token, half of it in the head; only float32 has a peak."""
    products = [{"by": "numpy", "dtype": "float32", "shape": [2, 3, 4], "gflops": 1000.0}]
    streams = [{"by": "numpy", "stream": "copy", "bytes": 2**20, "gb_per_s": 20.0}]
    model = {
        "name": "some",
        "flops_per_token": 10**9,
        "prefill_flops_per_token": 5 * 10**8,
        "bytes": {"float32": {"once": 10**9, "row": 10**6}},
        "runs": runs,
    }
    return {
        "gemm_before": products,
        "gemm_after": products,
        "peak_gflops": peaks(products),
        "memory_before": streams,
        "memory_after": streams,
        "peak_gb_per_s": memory_peak(streams),
        "top_p": 0.9,
        "models": [model],
    }


def test_the_peak_is_the_best_of_a_dtype() -> None:
    rates = {"float32": [3.0, 5.0, 4.0], "bfloat16": [7.0, 6.0]}
    products = [{"dtype": dtype, "gflops": g} for dtype, rate in rates.items() for g in rate]
    assert peaks(products) == {"float32": 5.0, "bfloat16": 7.0}


def test_the_engine_is_shown_beside_pytorch_and_against_the_peak() -> None:
    sampler = {"batch_size": 64, "sampled_s": 0.1, "unsampled_s": 0.09, "top_p_s": 0.12}
    startup = {"cold_s": 20.0, "warm_s": [1.0, 4.0, 2.0]}
    ours = {"by": "srm", "dtype": "float32", "startup": startup, "sampler": sampler}
    theirs = {"by": "PyTorch compiled", "dtype": "bfloat16", "first_steps_s": 30.0}
    runs = [run | {"batches": BATCHES} for run in (ours, theirs)]
    lines = throughput.markdown(record(runs))
    assert (
        lines.count("| some | srm | float32 | 64 | 128.0 ms | 500 | 500 | 50% | 8.3 | 42% |") == 2
    )
    assert lines.count("| some | srm | float32 | 1 | 100.0 ms | 10 | 10 | 1% | 10.0 | 50% |") == 1
    theirs_line = "| some | PyTorch compiled | bfloat16 | 64 | 128.0 ms | 500 | 500 | – | – | – |"
    assert lines.count(theirs_line) == 2
    assert "| some | float32 | 64 | 100.0 ms | 90.0 ms | 10.0% | 25.0% |" in lines
    assert "| some | srm | float32 | 20.0 s | 2.0 s |" in lines
    assert "| some | PyTorch compiled | bfloat16 | 30.0 s | – |" in lines


def test_prefill_is_shown_without_the_head_and_beside_as_many_decoded() -> None:
    run = {
        "dtype": "float32",
        "prefill": [{"prompt_tokens": 16, "prompts": 4, "tokens_per_s": 800.0, "bytes": 8 * 10**8}],
        "decode": BATCHES,
        "prompt": {
            "prompt_tokens": 500,
            "engine_s": 0.1,
            "decode_rows_s": 2.0,
            "prefill_rows_s": 1.0,
        },
    }
    lines = prefill.markdown(record([run]))
    assert "| some | float32 | 16 | 4 | 800 | 400 | 40% | 10.0 | 50% | 50% |" in lines
    assert "| some | float32 | 500 | 100.0 ms | 2000 ms | 1000 ms | 20.0, 10.0 |" in lines


def test_an_op_is_set_against_the_limit_that_binds_it() -> None:
    ops = [
        {"op": "up", "rows": 64, "flops": 10**9, "bytes": 10**6, "seconds": 0.002},
        {"op": "proj_in", "rows": 1, "flops": 10**6, "bytes": 10**7, "seconds": 0.001},
    ]
    run = {"dtype": "float32", "call": {"seconds": 5e-6}, "ops": ops}
    lines = kernels.markdown(record([run]))
    up = "| some | float32 | up | 64 | 2,000 µs | 1,000.00 | 1.00 | 500.0 | 0.5 | GEMM | 50% |"
    assert up in lines
    assert "| 1,000 µs | 1.00 | 10.00 | 1.0 | 10.0 | memory | 50% |" in "".join(lines)
    assert "takes 5 µs (some, float32)" in lines[0]


def test_the_host_is_a_part_of_a_step_and_of_what_the_memory_moves() -> None:
    case = {"running": 9, "rows": 9, "length": None, "schedule": 20.0, "complete": 30.0}
    case |= {"add": 0.0, "bytes_per_row": 100.0, "bytes_per_slot": 2000.0}
    step = {"model": "demo", "d_model": 256, "rows": 2048, "row_ns": 5000.0}
    retained = record([]) | {"cases": [case], "step": step}
    table = "\n".join(host.markdown(retained))
    assert "| 9 | in one step, going on | 20.0 | 30.0 | 50.0 | 1.00% | 2.00 | 10% | 0.0 |" in table
    assert "2,048 rows on all cores, float32, 5,000 ns a row" in table
    assert "| 50.0 | – | 2.00 |" in "".join(host.markdown(retained | {"step": None}))


LABELS = {
    "engine": ["demo", "random d 512", "srm, float32", "PyTorch eager, float32"],
    "kernels": ["random d 512, bfloat16", "up", "mix", "16 rows", "1,024 rows"],
    "prefill": ["one prompt, float32", "a full step, bfloat16", "fraction of GEMM peak"],
    "host": ["in one step, going on", "in turns, replaced after 128 tokens"],
    "peers": ["vLLM for CPUs: llama-512", "srm serve: srm-1024", "sequences at once"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_is_drawn_and_shown_once(kind: str, tmp_path: Path) -> None:
    result = sorted(RECORDS.glob(f"*-{kind}.json"))
    whole = [path for path in result if is_whole(json.loads(path.read_text()))]
    record = Path(shutil.copy((whole or result)[-1], tmp_path))
    known = json.loads(record.read_text())
    if kind == "peers":  # all of them take long to draw
        named = ("vllm", "srm-1024")
        known["results"] = [
            result for result in known["results"] if result["name"].startswith(named)
        ]
        record.write_text(json.dumps(known))
    report, picture = record.with_suffix(".md"), record.with_suffix(".svg")
    report.write_text("A table.\n")
    main([kind, str(record)])
    drawn = picture.read_text()
    if kind == "host":  # the same each time
        main([kind, str(record)])
        assert picture.read_text() == drawn
    assert report.read_text() == f"A table.\n\n![{KINDS[kind][1]}]({picture.name})\n"
    assert [label for label in LABELS[kind] if f"<!-- {label} -->" not in drawn] == []


def test_a_record_without_peaks_is_drawn(tmp_path: Path) -> None:
    """As of a call of deploy/gpu without the one that measures them."""
    whole = sorted(RECORDS.glob("*-engine.json"))
    known = json.loads(whole[-1].read_text()) | {"peak_gflops": {}}
    del known["peak_gb_per_s"]
    record = tmp_path / "record.json"
    record.write_text(json.dumps(known))
    record.with_suffix(".md").write_text("A table.\n")
    main(["engine", str(record)])
    assert record.with_suffix(".svg").exists()
