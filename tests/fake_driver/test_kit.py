"""The kit's calls run to their end on a fake H100, with the graphs that are kept, and are reported.

Nothing is computed there, so that products are wrong: the kit is told that they are not. A compiler
is where the kit goes to none, and so here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.fake_driver.driver import FakeDriver, launches_of, read_log
from tests.kit.serving import ROOT

NVIDIA_SMI = """#!/bin/sh
echo 'NVIDIA H100, 580, 96, 9.0, 81559 MiB, 600 MiB, 1980, 1980, 2619, 2619, 70, 700, 30, 1, 0, 1'
"""
NCU = f"""#!{sys.executable}
import os, subprocess, sys
from pathlib import Path
from tests.kit.fake_driver.driver import launches_of, read_log

given, log = sys.argv[1:], Path(os.environ["FAKE_CUDA_LOG"])
options = dict(zip(given, given[1:]))
if "--import" not in options:
    before = len(launches_of(read_log(log)))
    subprocess.run(given[given.index(sys.executable) :], check=True)
    names = [one["kernel"] for one in launches_of(read_log(log))][before:]
    skipped = int(options.get("--launch-skip", 0))
    shown = names[skipped : skipped + int(options.get("--launch-count", len(names)))]
    rows = ['"ID","Kernel Name","gpu__time_duration.sum"', '"","","us"']
    rows += [f'"{{number}}","{{name}}","1"' for number, name in enumerate(shown)]
    Path(options.get("-o") or options["--log-file"]).write_text(chr(10).join(rows))
"""
"""A profiler that knows the launches of its program from the driver's log."""
KERNELS = 11
"""Of a step of any number of rows."""
CALL = """
import sys
from dataclasses import replace
from pathlib import Path
from max.engine import InferenceSession
from deploy.gpu import run
from deploy.gpu.calls import GPU, SIZES, calls

number, results, graphs = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
run.wrong_products = lambda *_: []
SIZES["gpu"] = sizes = replace(
    GPU,
    patience=20,
    widths=(512,),
    common={"seconds": 0.01, "repetitions": 2, "gib": 0.01},
    product_rows=(0, 1, 2, 129),
    first_rows=(2, 129),
    first_steps=(4096, 256),
    replayed_rows=(4096, 256),
    first_seconds=0.01,
    counted_rows=256,
    op_rows=(2, 129),
    op_seconds=0.005,
    streams=(8,),
    served=64,
    step_rows=(256, 4096),
    same_rows=(300,),
    many_slots=(4096, 262_144),
    scored=(2, 5),
    looked_at_rows=256,
)
parts = [one for one in calls(sizes, graphs)[number] if one.settings.get("dtype") != "float8"]
kept = [one for one in parts if one.module != "pytest" and "research.bench.model" not in one.module]
run.Call(number, "gpu", results, graphs, float("inf")).run(kept)
"""
BEGIN = {"machine", "opening", "adopt"}
RAN = {
    1: BEGIN | {"products 512", "decode 512", "logprobs 512", "profile 512", "two engines 512"},
    2: BEGIN
    | {"probe 512", "decode more 512", "wide pool 512", "4096 slots 512", "262144 slots 512"},
    3: BEGIN | {"http 512", "launches 512", "states 512"},
    4: BEGIN | {"replays 512", "serve", "profile 512"},
}
"""Parts that end well, though nothing is computed."""
NO_PROGRAM = {"memcheck 512", "racecheck 512"}
DIED = "the last tokens are not those sampled"
"""Of a sampler that samples nothing; its size is left out then, and the part goes on."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, program in (("nvidia-smi", NVIDIA_SMI), ("ncu", NCU)):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "log").touch()
    return tmp_path


def ends(results: Path, number: int) -> dict[str, Any]:
    lines = map(json.loads, (results / f"call-{number}.jsonl").read_bytes().splitlines())
    return {line["part"]: line for line in lines if line["key"] == "end"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_a_call_runs_to_its_end_and_is_reported(
    fake: FakeDriver, graphs: Path, place: Path, number: int
) -> None:
    results = place / "results"
    path = {"PATH": f"{place}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CALL, str(number), str(results), str(graphs)]
    environment = os.environ | path | fake.environment(place / "log")
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    result = ends(results, number)
    text = (results / f"call-{number}.log").read_text()
    assert {name for name, record in result.items() if record.get("exit") == 0} == RAN[number], text
    for name in result.keys() & NO_PROGRAM:
        assert result[name]["left_out"].startswith("no ")
    for name in result.keys() - RAN[number] - NO_PROGRAM:
        assert name == "ops 512" and result[name]["exit"] and DIED in text
    assert len(launches_of(read_log(place / "log"))) > 46
    for counted in results.glob("*-counters.ncu-rep"):  # of the first and the fourth call
        kernels = [row.split(",")[1] for row in counted.read_text().splitlines()[2:]]
        assert len(kernels) == len({*kernels}) == KERNELS, "each kernel of a step once"
    report = [sys.executable, "-m", "research.bench.gpu.report", str(results), str(place)]
    subprocess.run(report, cwd=ROOT, check=True, capture_output=True)
    (page,) = place.glob("*-gpu.md")
    assert "NVIDIA H100" in page.read_text()
