"""The host benchmark keeps as many sequences running as it says, and writes down what it saw."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bench.host.host import HostBenchConfig
from bench.host.load import Load
from tests.serving import ROOT


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("length", [None, 12])
@pytest.mark.parametrize("rows", [64, 24])
def test_so_many_sequences_run(samples: int, length: int | None, rows: int) -> None:
    load = Load(64, rows, length, samples)
    load.run(0, 50)
    cost = load.run(0, 30)
    assert cost.steps == 30
    assert 48 <= load.scheduler.table.num_owned <= 64  # those that ended are replaced a step later
    assert cost.rows == 30 * rows if length is None else cost.rows >= 0.8 * 30 * rows
    assert (cost.ended > 0) == (length is not None)


def test_a_record_has_every_case(tmp_path: Path) -> None:
    flags = ["--running=8,32", "--turn-rows=16", "--length=4", "--samples=2", "--seconds=0.01",
             "--model=absent"]  # fmt: skip
    # In a process of its own, whose memory and garbage collection it may set up as it likes.
    command = [sys.executable, "srm.py", "bench", "host", *flags, "--repetitions=2"]
    done = subprocess.run(
        [*command, f"--output={tmp_path}"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    (path,) = tmp_path.glob("*-host.json")
    record = msgspec.json.decode(path.read_bytes())
    cases = [(case["running"], case["rows"], case["length"]) for case in record["cases"]]
    assert cases == [(8, 8, None), (8, 8, 4), *((32, rows, length) for rows in (32, 16)
                                                for length in (None, 4))]  # fmt: skip
    for case in record["cases"]:
        assert len(case["raw"]) == 2
        assert case["schedule"] > 0 and case["complete"] > 0
    assert "| 32 | in turns of 16, replaced after 4 tokens |" in done.stdout
    assert path.with_suffix(".svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("flags", [{"running": ()}, {"samples": 0}, {"length": 0}])
def test_settings_that_cannot_be_are_refused(flags: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        HostBenchConfig(**flags)  # type: ignore[arg-type]
