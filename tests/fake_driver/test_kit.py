"""The kit's calls run to their end on a fake H100, with the graphs that are kept, and are reported.

Nothing is computed there, so that tests of products and of what is served must fail, and say why. A
compiler is where the kit goes to none, and so here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kit.fake_driver.driver import FakeDriver, launches_of, read_log
from tests.kit.serving import ROOT

NVIDIA_SMI = """#!/bin/sh
echo 'NVIDIA H100, 81559 MiB, 580'
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
SMALLER = {
    r"--rows [\d,]+": "--rows 256",
    r"--batch-sizes [\d,]+": "--batch-sizes 256",
    r"--counted-rows [\d,]+": "--counted-rows 256",
    r"--dtypes bfloat16,float8": "--dtypes bfloat16",
    r"(--rows 256|--batch-sizes 256.*)(?= --cache-dir)": r"\1 --seconds 0.01",
    r"(?<=test_ops_on_a_gpu.py) .*": " -k 'float8 and 129 and 512'",
    r"--streams [\d,]+": "--streams 8 --requests 2 --n 9",
    r"(profile --random-widths 512 --rows 256)": r"\1 --counted-rows 256",
    r"^(\d+)": r"\g<1>0",
}
"""Flags that replace those of the kit on a fake GPU, whose limits are ten times as long."""
LEFT_OUT = re.compile(r"\d+ (pytorch|tests|\S*1024|turns)")
"""Commands that compute, or do the same as others."""
RAN = {
    "4": {"adopt", "machine", "sink", "replays-512", "float8-512", "profile-512"},
    "basics": {"adopt", "machine", "engine-512"},
}
"""Commands that end well, though nothing is computed."""
SHOWN = {"4": "\n| 512 | 256 | ", "basics": "\n| random d 512 | srm | bfloat16 | 256 | "}
LAST = {
    "right": r"\d+ failed",
    "serve": "countdown --product=own: after .*, as its card says",
    "memcheck": "compute-sanitizer",
    "racecheck": "compute-sanitizer",
}
"""What the others print last."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, program in (("nvidia-smi", NVIDIA_SMI), ("ncu", NCU)):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "log").touch()
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("number", RAN)
def test_a_call_runs_to_its_end_and_is_reported(
    fake: FakeDriver, graphs: Path, place: Path, number: str
) -> None:
    text = (ROOT / "deploy" / "gpu" / f"call-{number}.txt").read_text()
    for pattern, smaller in SMALLER.items():
        text = re.sub(pattern, smaller, text, flags=re.MULTILINE)
    lines = [line for line in text.splitlines() if not LEFT_OUT.match(line)]
    results, given = place / "results", place / f"call-{number}.txt"
    given.write_text("\n".join(lines))
    path = {"PATH": f"{place}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    path["SRM_CACHE_DIR"] = str(graphs)
    command = [sys.executable, "-m", "deploy.gpu.run", str(given), str(results)]
    environment = os.environ | path | fake.environment(place / "log")
    subprocess.run(command, cwd=ROOT, env=environment, check=False)  # it counts those that fail
    written = (results / f"call-{number}.jsonl").read_bytes().split(b"\n")
    ends: dict[str, Any] = {line["name"]: line for line in map(json.loads, filter(None, written))}
    assert {name for name, end in ends.items() if end["exit"] == 0} == RAN[number], ends
    for name in ends.keys() - RAN[number]:
        assert re.search(LAST[name], ends[name]["last"]), ends[name]
    assert len(launches_of(read_log(place / "log"))) > 46
    counters = [*results.glob("*/counters-*.ncu-rep")]
    assert len(counters) == (number == "4")
    for counted in counters:
        kernels = [row.split(",")[1] for row in counted.read_text().splitlines()[2:]]
        assert len(kernels) == len({*kernels}) == KERNELS, "each kernel of a step once"
    report = [sys.executable, "-m", "research.bench.gpu.report", str(results), str(place)]
    subprocess.run(report, cwd=ROOT, check=True, capture_output=True)
    (page,) = place.glob("*-gpu.md")
    assert "NVIDIA H100" in page.read_text() and SHOWN[number] in page.read_text()
