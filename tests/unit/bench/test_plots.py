"""Records as pictures: of each kind the newest one that pages may show."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from research.bench.model.plots import KINDS, main
from research.bench.records.figures import is_whole
from srm.loadtest.records import RECORDS

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
