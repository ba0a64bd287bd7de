"""The kit for a GPU machine: nothing that fails costs more than itself, and all of it runs."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

import deploy.gpu.run as run_module
from deploy.gpu import graphs
from deploy.gpu.calls import GPU, REHEARSAL, KitPart, calls
from deploy.gpu.run import TIMED_OUT, Call, wrong_products
from research.bench.gpu.profile import last_step, read_kernels
from research.bench.gpu.report import markdown, record_of
from research.bench.gpu.task import Task
from srm.errors import ConfigError
from tests.kit.serving import ROOT

OPS = "research.bench.gpu.ops"
TASK = {"part": "", "lines": "", "device": "gpu", "cache_dir": ""}
ATTEMPTS = """
import os, sys, time
from pathlib import Path
from research.bench.gpu.task import Lines, read_task

task = read_task(sys.argv[1:])
lines = Lines.from_task(task)

def measure(rows):
    if rows == 2:
        raise ValueError("2 is too many")
    if rows == 3:
        os.abort()  # as a process whose GPU is gone
    if rows == 5:
        time.sleep(600)
    return {"ok": rows != 4}

for rows in task.rows:
    known = {"product": "plain", "rows": rows}
    lines.attempt(f"up {rows}", lambda: measure(rows), **known)
"""


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """A call in whose parts `attempts` is a module that fails at some sizes."""
    (tmp_path / "attempts.py").write_text(ATTEMPTS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    return Call(1, "cpu", tmp_path / "results", str(tmp_path), math.inf)


def part(*rows: int, name: str = "a", **fields: Any) -> KitPart:
    settings = {"rows": rows}
    return KitPart(name=name, limit_s=300, module="attempts", settings=settings, **fields)


def is_missing(part: KitPart) -> bool:
    """Whether the program that runs it is not here."""
    return bool(part.under) and shutil.which(part.under[0]) is None


def write_line(call: Call, **facts: Any) -> None:
    """As a process of the call's does."""
    with call.lines.open("a") as file:
        file.write(json.dumps({"part": "a", "key": "", "at": 0, **facts}) + "\n")


def written(call: Call) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in call.lines.read_bytes().splitlines()]
    return [line for line in lines if not line.get("begun")]


def test_a_size_that_fails_costs_no_other(call: Call) -> None:
    assert call.run([part(1, 2, 3, 4), part(1, name="b")]) == 1
    *sizes, end, other, _ = written(call)
    assert [(line["key"], line["ok"]) for line in sizes] == [
        (f"up {rows}", rows == 1) for rows in (1, 2, 3, 4)
    ]
    assert "ValueError: 2 is too many" in sizes[1]["died"]
    assert end["key"] == "end" and end["exit"] == 2 and other["part"] == "b"


def test_what_was_measured_is_kept_when_time_runs_out(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(process: subprocess.Popen[bytes], timeout: float, _: Callable[[], None]) -> int:
        while b'"up 5"' not in call.lines.read_bytes():  # which would take ten minutes
            time.sleep(0.01)
        raise subprocess.TimeoutExpired([], timeout)

    monkeypatch.setattr(run_module, "waited", wait)
    assert call.run([part(1, 5)]) == 1
    first, end = written(call)
    assert first["ok"] and end["exit"] == TIMED_OUT
    call.ends = 0.0
    assert call.run([part(6, name="b")]) == 1
    assert written(call)[-1]["left_out"] == "no time"


def test_speed_is_not_measured_of_products_that_are_wrong(call: Call) -> None:
    checks = part(1, 4, checks_products=True)
    assert call.run([checks, part(6, name="b", needs_products=True), part(7, name="c")]) == 1
    ends = {line["part"]: line for line in written(call) if line["key"] == "end"}
    assert ends["b"]["left_out"] == "products are wrong: a: up 4" and ends["c"]["exit"] == 0


def test_products_of_one_width_say_nothing_of_anothers(call: Call) -> None:
    narrow = replace(part(1, name="c", needs_products=True), settings={"rows": (1,), "d_model": 8})
    call.run([part(1, 4, checks_products=True), narrow])
    assert written(call)[-1]["exit"] == 0


def test_one_row_and_products_that_nobody_looked_at() -> None:
    looked = {"product": "plain", "key": "up 1", "rows": 1, "ok": False}
    assert not wrong_products("a", [looked])  # a step on a GPU has two at least
    assert wrong_products("a", [looked, looked | {"rows": 2, "key": "up 2"}]) == ["a: up 2"]
    assert wrong_products("a", [{"product": None, "key": "mix 2", "ok": True}])


def test_a_step_of_ncus_table() -> None:
    """MAX's kernels are named by digits; what a step is follows from what repeats."""
    names = ["k0", "k1", *["k2", "k3", "k3", "k4", "k3"] * 2, "k2", "k5", "k6", "k7"]
    report = '==PROF== Connected\n"ID","Kernel Name","gpu__time_duration.sum"\n"","","us"\n'
    report += "".join(f'"{i}","{name}","1.5"\n' for i, name in enumerate(["fill", *names]))
    report += "".join(f'"{i}","{name}","1,000"\n' for i, name in enumerate(names))
    result = last_step(read_kernels(report), num_layers=2)
    assert result["launches"] == 16 and result["ns"] == 16_000_000
    kernels = {kernel["name"]: (kernel["calls"], kernel["ns"]) for kernel in result["kernels"]}
    assert kernels["mix"] == kernels["up"] == (2, 2_000_000)
    assert kernels["expand"] == kernels["head"] == kernels["score"] == (1, 1_000_000)
    assert len(last_step(read_kernels(report), num_layers=3)["kernels"]) == 16
    with pytest.raises(ValueError, match="no step repeats"):
        last_step([("a", 1.0), ("b", 1.0)], num_layers=2)
    with pytest.raises(ValueError, match="no table"):
        read_kernels("==ERROR== ERR_NVGPUCTRPERM")
    with pytest.raises(ValueError, match="in 'fortnight'"):
        read_kernels(report.replace('"us"', '"fortnight"'))


def test_a_size_that_never_ends_costs_its_limit_alone(call: Call) -> None:
    assert call.run([part(1, 5, 4, attempt_s=0.1)]) == 1
    first, hung, last, end = written(call)
    assert first["ok"] and last["key"] == "up 4" and end["exit"] == 1
    assert hung["key"] == "up 5" and hung["died"].startswith("exit 1: longer than 2 s, in ")
    assert hung["died"].endswith("in measure") and "attempts.py" in hung["died"]
    assert "Timeout (0:00:02)!" in call.log.read_text() and "measure" in call.log.read_text()


def test_what_died_is_tried_once_more_where_an_error_names_its_place(call: Call) -> None:
    call.device = "gpu"
    call.run([part(1, 2, 4)])
    again = [file for file in written(call) if file["part"] == "a again: up 2"]
    assert not again, "it died again, so that its line has only begun"
    begun = [json.loads(line) for line in call.lines.read_bytes().splitlines()]
    assert [start["key"] for start in begun if start["part"] == "a again: up 2"] == ["up 2"]
    assert call.log.read_text().count("ValueError: 2 is too many") == 2


def test_nothing_runs_on_a_gpu_that_does_not_open(call: Call) -> None:
    opens = replace(part(4, name="opening"), opens=True, needs_device=False)
    torch = replace(part(1, name="torch"), needs_device=False)
    assert call.run([opens, part(1), torch]) == 1
    ends = {file["part"]: file for file in written(call) if file["key"] == "end"}
    assert ends["a"]["left_out"] == "no GPU opened" and ends["torch"]["exit"] == 0


def test_the_variables_that_a_gpu_opened_with_are_those_of_all_that_follows(call: Call) -> None:
    rungs: dict[str, dict[str, Any]] = {"a": {"ok": False}}
    rungs["b"] = {"ok": True, "environment": {"SRM_TRIED": "b"}}
    for key, rung in rungs.items():
        write_line(call, part="opening", key=key, **rung)
    call.run([replace(part(name="opening"), opens=True)])
    assert call.environment == {"SRM_TRIED": "b"} and call.opened


def test_both_sizes_have_parts_alike_with_settings_they_can_read() -> None:
    for number, parts in calls(GPU, "graphs").items():
        rehearsed = calls(REHEARSAL, "graphs")[number]
        names = {item.module for item in parts} - {"srm.engine.device.graph_notes"}
        assert {item.module for item in rehearsed} == names
        assert all((ROOT / f"{name.replace('.', '/')}.py").exists() for name in names - {"pytest"})
        for sizes, own in ((GPU, parts), (REHEARSAL, rehearsed)):
            for item in own:
                if item.arguments is None:
                    msgspec.convert({**TASK, **sizes.common, **item.settings}, Task)


def test_timing_ops_leaves_half_of_their_time_to_feeding_and_checking_them() -> None:
    """A repetition takes up to twice its least time, and finding out how many calls as long."""
    parts = [item for each in calls(GPU, "").values() for item in each if item.module == OPS]
    assert len(parts) == 8
    for item in parts:
        task = msgspec.convert({**TASK, **item.settings}, Task)
        products, others = (2, 1) if task.dtype == "float8" else (5, 11)
        sizes = products * len(task.rows) + others * len(task.op_rows)
        assert sizes * (2 * task.repetitions + 2) * task.seconds <= item.limit_s / 2


def test_every_graph_that_a_gpu_is_measured_with_is_packed() -> None:
    for item in calls(GPU, "")[2] + calls(GPU, "")[3] + calls(GPU, "")[4]:
        if "d_model" in item.settings:
            task = msgspec.convert({**TASK, **item.settings}, Task)
            module = graphs.OPS if item.module == OPS else graphs.STEP
            wanted = f"{module} --d-model {task.d_model} --dtype {task.dtype}"
            assert wanted in {**graphs.GRAPHS, **graphs.GPU_GRAPHS}.values()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_a_processor_is_given_no_graph_that_it_cannot_have(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled: list[str] = []

    def note(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        compiled.append(" ".join(command))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", note)
    monkeypatch.setattr(graphs, "_missing", lambda _: {**graphs.GRAPHS, **graphs.GPU_GRAPHS})
    caplog.set_level(logging.INFO)
    assert graphs.main(["--device", device, "--output", str(tmp_path)]) == 0
    of_a_gpu = [text for text in compiled if "float8" in text or "--model models" in text]
    assert len(of_a_gpu) == (6 if device == "gpu" else 0) and len(compiled) - len(of_a_gpu) == 5
    assert ("a GPU alone has it: demo; countdown; d 1,024, float8;" in caplog.text) == (
        device == "cpu"
    )


MACHINE = {"part": "machine", "key": "machine", "machine": "A100", "commit": "1"}
MACHINE |= {"date": "2026-11-26", "time": "2026-11-26T00:00:00Z"}


def write(path: Path, *lines: dict[str, Any], cut: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line | {"at": 0}) + "\n" for line in lines) + cut)


def test_a_line_that_broke_off_costs_no_other(call: Call) -> None:
    write(call.lines, {"part": "a", "key": "up 1", "begun": True}, cut='{"part": "a", "ke')
    assert call.run([part(1, 4)]) == 0
    content = call.lines.read_text().splitlines()
    assert content[1] == '{"part": "a", "ke' and [json.loads(line) for line in content[2:]]
    write(call.lines.with_name("call-2.jsonl"), MACHINE, cut="[]\n\n7")
    call.lines.unlink()
    record = record_of(call.lines.parent)
    assert record["damaged_lines"] == 2
    assert "Lines that broke off, and are left out: 2." in markdown(record)


def test_a_size_at_which_a_call_broke_off_is_tried_once_more(call: Call) -> None:
    begun = {"part": "a", "begun": True, "product": "plain"}
    ended = {"part": "a", "key": "up 1", "ok": True}
    write(call.lines, begun | {"key": "up 1"}, ended, begun | {"key": "up 6", "rows": 6})
    assert call.run([part(1, 6, checks_products=True), part(8, name="b", needs_products=True)]) == 0
    _, broke_off, result, end, *_ = written(call)
    assert not broke_off["ok"] and broke_off["died"] == "the call broke off"
    assert result["key"] == broke_off["key"] == "up 6" and result["ok"] and end["exit"] == 0
    write(call.lines.with_name("call-2.jsonl"), MACHINE)
    lines = [line for line in record_of(call.lines.parent)["lines"] if line["key"] == "up 6"]
    assert [line["ok"] for line in lines] == [True]


def test_a_size_at_which_two_calls_broke_off_is_left(call: Call) -> None:
    begun = {"part": "a", "key": "up 6", "begun": True, "product": "plain", "rows": 6}
    write(call.lines, begun, begun | {"begun": False, "died": "the call broke off"}, begun)
    assert call.run([part(6, 7, checks_products=True)]) == 0
    first, second, other, _ = written(call)
    assert [item["key"] for item in (first, second, other)] == ["up 6", "up 6", "up 7"]
    assert second["died"] == "the call broke off" and not second["ok"]
    assert wrong_products("a", written(call)) == ["a: up 6"]


ENDLESS = """
import sys
from deploy.gpu import run

part = run.KitPart(name="a", limit_s=300, module="attempts", settings=SETTINGS)
run.calls = lambda *_: {1: [part]}
sys.exit(run.main(["1", sys.argv[1], "--device", "cpu"]))
"""


@pytest.mark.parametrize(
    ("under", "numbers", "status"),
    [
        ([], [signal.SIGTERM], 143),
        ([], [signal.SIGHUP], 129),
        ([], [signal.SIGKILL], -9),
        (["nohup"], [signal.SIGHUP, signal.SIGTERM], 143),
    ],
)
def test_no_part_outlives_a_call_that_is_ended(
    call: Call, under: list[str], numbers: list[signal.Signals], status: int
) -> None:
    """A part holds the log open as long as it lives: a pipe, whose reader sees that."""
    program = ENDLESS.replace("SETTINGS", repr({"rows": (5,)}))
    os.mkfifo(pipe := call.log)
    heeded = ["env", "--default-signal=HUP"]  # in `nohup make test` too
    command = [*heeded, *under, sys.executable, "-c", program, str(call.log.parent)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running, pipe.open("rb") as log:
        while b'"up 5"' not in call.lines.read_bytes():
            time.sleep(0.01)
        for number in numbers:
            running.send_signal(number)
        assert running.wait() == status
        log.read()  # ends when the last that writes there has ended


def test_results_of_two_machines_or_commits_are_no_report(call: Call) -> None:
    write(call.lines, MACHINE)
    write(call.lines.with_name("call-2.jsonl"), MACHINE)
    assert record_of(call.lines.parent)["commit"] == "1"
    for other, named in (({"commit": "2"}, "A100 at 2"), ({"machine": "H200"}, "H200 at 1")):
        write(call.lines.with_name("call-2.jsonl"), MACHINE | other)
        message = f"call-1 is of A100 at 1 and call-2 is of {named}: put each"
        with pytest.raises(ConfigError, match=message):
            record_of(call.lines.parent)


def test_results_are_printed_as_they_come_without_what_is_long(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[str] = []
    monkeypatch.setattr(run_module, "say", printed.append)

    def wait(process: subprocess.Popen[bytes], _: float, meanwhile: Callable[[], None]) -> int:
        while not printed:
            meanwhile()
        raise subprocess.TimeoutExpired([], 1)

    monkeypatch.setattr(run_module, "waited", wait)
    write_line(call, key="of the call before")
    call = Call(1, "cpu", call.lines.parent, "", math.inf)
    assert call.run([part(1, 5)]) == 1
    first, end = map(json.loads, printed)
    assert first["key"] == "up 1" and end["key"] == "end" and end["exit"] == TIMED_OUT
    write_line(call, raw=[1.0], wrong={"elements": 1}, ok=False)
    call.run([replace(part(1), needs_gpu="a clock")])
    assert {*json.loads(printed[-2])} == {"part", "key", "at", "ok"}


@pytest.fixture
def theirs(tmp_path: Path) -> str:
    """A PYTHONPATH with a plugin of pytest that cannot be imported."""
    (tmp_path / "theirs-1.dist-info").mkdir()
    (tmp_path / "theirs-1.dist-info" / "METADATA").write_text("Name: theirs\nVersion: 1\n")
    (tmp_path / "theirs-1.dist-info" / "entry_points.txt").write_text("[pytest11]\na = theirs\n")
    (tmp_path / "theirs.py").write_text("raise RuntimeError('made for another version')\n")
    return str(tmp_path)


def rehearse(number: int, results: Path, theirs: str) -> list[dict[str, Any]]:
    """Make a call on a processor, which must succeed; return the ends of its parts."""
    command = [sys.executable, "-m", "deploy.gpu.run", str(number), str(results)]
    done = subprocess.run(
        [*command, "--device", "cpu"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": theirs},
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 0, done.stdout + (results / f"call-{number}.log").read_text()
    lines = [*map(json.loads, (results / f"call-{number}.jsonl").read_bytes().splitlines())]
    assert all(line.get("ok", True) for line in lines)
    return [line for line in lines if line["key"] == "end"]


@pytest.mark.slow
def test_all_calls_run_to_their_end_on_a_processor_and_are_reported(
    theirs: str, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    for number in (1, 2, 3):
        ends, parts = rehearse(number, results, theirs), calls(REHEARSAL, "")[number]
        assert [item["part"] for item in ends] == [item.name for item in parts]
        left_out = {item["part"] for item in ends if "left_out" in item}
        assert left_out == {item.name for item in parts if item.needs_gpu or is_missing(item)}
    command = [sys.executable, "-m", "research.bench.gpu.report", str(results), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("*-gpu.md")
    page = path.read_text().replace("random d 256 | ", "")
    for shown in (
        *("PyTorch eager | bfloat16 | 16", "srm | bfloat16 | 16", "parked halfway"),
        *("proj_in | bfloat16 | 256 | 65 | yes", "call-3 | decode float8 256 | left out"),
        "256 | 2 | 4 × 2 | whole",
    ):
        assert f"| {shown} |" in page
    assert path.with_suffix(".svg").exists()
