"""Records as pictures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench.model.plot_records import KINDS, main
from engine.records import RECORDS


def test_every_model_and_run_is_drawn_the_same_each_time(tmp_path: Path) -> None:
    batches = [{"batch_size": size, "tokens_per_s": 9.0 * size} for size in (1, 4)]
    runs = [
        {"by": by, "dtype": dtype, "batches": batches}
        for by in ("srm", "PyTorch eager", "PyTorch compiled")
        for dtype in ("float32", "bfloat16")
    ]
    counted = {"float32": {"once": 10**6, "row": 10**3}}
    models = [
        {"name": name, "flops_per_token": 10**9, "bytes": counted, "runs": runs}
        for name in ("one", "other")
    ]
    peaks = {"peak_gflops": {"float32": 50.0}, "peak_gb_per_s": 9.0}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(peaks | {"models": models}))
    path.with_suffix(".md").write_text("A table.\n")
    main(["engine", str(path)])
    picture = path.with_suffix(".svg").read_text()
    labels = ["one", "other", *(f"{run['by']}, {run['dtype']}" for run in runs)]
    assert all(f"<!-- {label} -->" in picture for label in labels)
    main(["engine", str(path)])
    assert path.with_suffix(".svg").read_text() == picture


def test_every_op_of_every_run_is_drawn(tmp_path: Path) -> None:
    ops = [
        {"op": op, "rows": rows, "flops": 10**6, "bytes": 10**6, "seconds": 1e-3}
        for op in ("up", "mix")
        for rows in (1, 4096)
    ]
    models = [
        {"name": "one", "runs": [{"dtype": dtype, "ops": ops} for dtype in ("float32", "bfloat16")]}
    ]
    peaks = {"peak_gflops": {"float32": 50.0, "bfloat16": 90.0}, "peak_gb_per_s": 9.0}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(peaks | {"models": models}))
    path.with_suffix(".md").write_text("A table.\n")
    main(["kernels", str(path)])
    picture = path.with_suffix(".svg").read_text()
    for label in ("one, float32", "one, bfloat16", "up", "mix", "1 rows", "4,096 rows"):
        assert f"<!-- {label} -->" in picture


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"engine", "kernels"}))
def test_the_newest_record_of_a_kind_is_drawn_and_shown_once(kind: str, tmp_path: Path) -> None:
    newest = max(RECORDS.glob(f"*-{kind}.json"))
    record = Path(shutil.copy(newest, tmp_path))
    report = record.with_suffix(".md")
    report.write_text("A table.\n")
    for _ in range(2):
        main([kind, str(record)])
    picture = record.with_suffix(".svg")
    assert report.read_text() == f"A table.\n\n![{KINDS[kind][1]}]({picture.name})\n"
    labels = {
        "prefill": ["one prompt, float32", "a full step, bfloat16", "fraction of GEMM peak"],
        "prefix-reuse": ["nothing kept", "prompt tokens fed"],
        "host": ["in one step, going on", "in turns, replaced after 128 tokens"],
        "simulate": ["the device alone", "with the host"],
        "samples": ["pass@k", "tokens per second"],
    }[kind]
    assert all(f"<!-- {label} -->" in picture.read_text() for label in labels)
