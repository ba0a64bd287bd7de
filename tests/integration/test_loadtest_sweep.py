"""A sweep of a server of known capacity finds it: slots × fixed service time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.__main__ import main
from loadtest.commands.run_command import INTERRUPTED
from loadtest.report.report import read_report
from tests.loads.toy_server import ToyConfig, ToyServer
from tests.serving import ROOT

SLOTS = 6
TOKENS = 8
SERVICE_S = 0.1
TOY = ToyConfig(ttft_s=0.03, itl_s=0.01, slots=SLOTS)
"""The last token comes 0.03 + 7 × 0.01 s after the start of service: 60 a second in all."""
FLAGS = (
    *("--duration-s=0.8", "--settle-s=0.2", "--repeats=1", "--grace-s=0.5"),
    *(f"--output-tokens={TOKENS}", "--prompt-tokens=2", "--metrics-url=none"),
)


def sweep(url: str, folder: Path, *flags: str) -> int:
    return main(["sweep", f"--url={url}", f"--output={folder}", *FLAGS, *flags])


@pytest.mark.slow
def test_a_closed_loop_is_full_when_its_slots_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ToyServer(TOY) as toy:
        assert sweep(toy.url, tmp_path, "--first-load=3") == 0
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert SLOTS / 2 <= found["knee"] <= SLOTS * 2
    assert not found["knee_may_lie_beyond"] and found["largest_good"] is None
    report = read_report(tmp_path)
    assert report.knee == f"concurrent {found['knee']:g}"
    names = [run.summary.name for run in report.runs]
    assert sorted(names) == sorted(found["names"])
    assert names == sorted(names, key=lambda name: float(name.split()[1]))  # by load
    most = max(point["throughput"] for point in found["points"])
    assert 0.5 * SLOTS * TOKENS / SERVICE_S < most < 1.1 * SLOTS * TOKENS / SERVICE_S
    printed = capsys.readouterr().out
    assert f"Knee: {found['knee']:g} requests under way" in printed
    assert f"report: {tmp_path / 'report.html'}" in printed
    for folder in found["folders"]:
        assert (tmp_path / "steps" / folder / "recording.npz").exists()


@pytest.mark.slow
def test_an_open_loop_with_objectives_finds_the_rate_that_it_can_bear(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with ToyServer(TOY) as toy:
        code = sweep(
            toy.url,
            tmp_path / "a",
            *("--sweep=rate", "--arrivals=constant", "--first-load=40", "--max-load=160"),
            *("--objectives=ttft<0.25", "--good-share=0.9"),
        )
    assert code == 0
    capacity = SLOTS / SERVICE_S
    found = json.loads((tmp_path / "a" / "sweep.json").read_text())
    assert capacity / 2 <= found["largest_good"] <= capacity * 2
    assert found["largest_good"] < max(point["load"] for point in found["points"])
    assert "of requests meet ttft<0.25" in capsys.readouterr().out
    again = [f"--output={tmp_path / 'b'}", "--objectives=ttft<1e-9", "--fail-if=ttft_p50>1e-9"]
    assert main(["report", str(tmp_path / "a"), *again]) == 1
    printed = capsys.readouterr().out
    assert "At no load at least 90% of requests meet ttft<1e-9." in printed
    assert "FAILED at the knee: ttft_p50>1e-9" in printed
    assert len(read_report(tmp_path / "b").runs) == len(found["points"])


def test_a_server_that_ends_does_not_take_what_was_measured_with_it(tmp_path: Path) -> None:
    with ToyServer(TOY) as toy:
        process = _started(toy.url, tmp_path)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("concurrent 1: Completed")
    _, err = process.communicate(timeout=600)
    assert process.returncode not in {0, INTERRUPTED}
    assert "Traceback" not in err
    assert read_report(tmp_path).runs[0].summary.completed > 0


def test_ctrl_c_reports_the_steps_before(tmp_path: Path) -> None:
    with ToyServer(TOY) as toy:
        process = _started(toy.url, tmp_path)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("concurrent 1: Completed")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
    assert process.returncode == INTERRUPTED, err
    assert "Traceback" not in err
    assert [run.summary.name for run in read_report(tmp_path).runs] == ["concurrent 1"]


def _started(url: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(sys.executable, "srm.py", "loadtest", "sweep"),
            *(f"--url={url}", f"--output={folder}", *FLAGS),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
