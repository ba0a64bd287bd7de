"""A call of the GPU kit goes on wherever the one before it broke off."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import deploy.gpu.run as run_module
from deploy.gpu.run import HEADING, TIMED_OUT, Call, last_line, waited, wrong_products
from research.bench.gpu.report import markdown, record_of
from srm.errors import ConfigError
from tests.unit.test_gpu_kit import call, part, write_line, written

__all__ = ["call"]
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


def test_a_program_that_cannot_be_executed_costs_its_part_alone(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ncu").write_bytes(b"\x7fELF of another machine")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert call.run([part(1, under=("ncu", "--set")), part(1, name="b")]) == 1
    first, *_, last = written(call)
    assert first["exit"] == 1 and first["last"].startswith("OSError: [Errno 8]")
    assert last["part"] == "b" and last["exit"] == 0


def test_a_call_whose_output_nobody_reads_any_more_goes_on(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert call.run([part(1), part(1, name="b")]) == 0
    assert written(call)[-1]["part"] == "b"


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


@pytest.mark.parametrize("other", [{"commit": "2"}, {"machine": "H200"}])
def test_results_of_two_machines_or_commits_are_no_report(
    call: Call, other: dict[str, str]
) -> None:
    write(call.lines, MACHINE)
    write(call.lines.with_name("call-2.jsonl"), MACHINE)
    assert record_of(call.lines.parent)["commit"] == "1"
    write(call.lines.with_name("call-2.jsonl"), MACHINE | other)
    named = r"call-1 is of A100 at 1 and call-2 is of (A100 at 2|H200 at 1): put each"
    with pytest.raises(ConfigError, match=named):
        record_of(call.lines.parent)


def test_times_of_the_synchronous_mode_are_no_rates(call: Call) -> None:
    rate = {"d_model": 512, "dtype": "bfloat16", "batch_size": 2, "tokens_per_s": 3.0}
    rate |= {"top_p": 1.0, "flops_per_token": 4, "bytes": {}, "ok": True, "key": "2"}
    parts = ("decode 512", "decode 512 again: 2")
    write(call.lines, MACHINE, *({**rate, "part": name} for name in parts))
    record = record_of(call.lines.parent)
    (run,) = record["models"][0]["runs"]
    assert [batch["part"] for batch in run["batches"]] == ["decode 512"]
    write(call.lines, MACHINE, {"part": parts[1], "key": "2", "gflops": 1, "dtype": "bfloat16"})
    assert not record_of(call.lines.parent)["peak_gflops"]


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


def test_who_waits_for_a_part_looks_at_what_it_wrote_meanwhile() -> None:
    looks: list[int] = []

    class Process:
        def wait(self, timeout: float) -> int:
            if len(looks) < 2:
                raise subprocess.TimeoutExpired([], timeout)
            return 7

    process = cast(Any, Process())
    assert waited(process, 1e6, lambda: looks.append(1)) == 7 and len(looks) == 2


HANG = """Timeout (0:01:20.500000)!
Thread 0x00007f8 (most recent call first):
  File "watchdog.py", line 3 in wait
Thread 0x00007f9 [MainThread] (most recent call first):
  File "runner.py", line 7 in synchronize
  File "<frozen runpy>", line 88 in _run_code
"""


def test_a_hang_is_named_by_what_the_main_thread_did(call: Call) -> None:
    call.log.write_text(f"{HEADING}before\n{HANG}{HEADING}command\nopening\n{HANG}")
    assert last_line(call.log) == 'longer than 80 s, in "runner.py", line 7 in synchronize'
    call.log.write_text(f"{HEADING}before\n{HANG}{HEADING}command\nValueError: 2\n\n")
    assert last_line(call.log) == "ValueError: 2"
