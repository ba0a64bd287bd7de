"""A sweep of a server of known capacity finds it: slots × fixed service time, in virtual time."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

from srm.errors import ConfigError
from srm.loadtest.__main__ import main
from srm.loadtest.commands.run_command import INTERRUPTED
from srm.loadtest.recording import Recording
from srm.loadtest.report.report import read_report
from srm.loadtest.scenario import Scenario
from tests.kit.loads.run_loadtest import simulate
from tests.kit.loads.toy_server import Fault, ToyConfig, ToyServer
from tests.kit.loads.virtual import virtually

SLOTS = 6
TOKENS = 8
CAPACITY = 60
"""Requests a second: the last token comes 0.03 + 7 × 0.01 s after the start of service."""
FLAGS = (
    *("--duration-s=4", "--settle-s=1", "--repeats=1", "--grace-s=0.5", "--metrics-url=none"),
    *(f"--output-tokens={TOKENS}", "--prompt-tokens=2"),
)


def sweep(folder: Path, *flags: str, url: str = "http://toy") -> int:
    return main(["sweep", f"--url={url}", f"--output={folder}", *FLAGS, *flags])


@pytest.fixture(autouse=True)
def _without_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plots take longer than all else, and have tests of their own."""
    monkeypatch.setattr("srm.loadtest.report.report_files.html", lambda _report: "")


class Toys(NamedTuple):
    """How each step's toy is."""

    config: ToyConfig = ToyConfig(ttft_s=0.03, itl_s=0.01, slots=SLOTS)
    cache: set[str] | None = None


def virtual_steps(monkeypatch: pytest.MonkeyPatch, toys: Toys) -> None:
    """Runs every step in virtual time, against a toy of its own."""

    async def step_of(scenario: Scenario) -> Recording:
        async with ToyServer(toys.config, cache=toys.cache) as toy:
            return (await simulate(scenario, toy.url))[0]

    def record(scenario: Scenario, command: str, folder: Path, _name: str) -> Recording:
        recording = virtually(step_of(scenario))
        recording.about.command = command
        recording.save(folder)
        return recording

    monkeypatch.setattr("srm.loadtest.commands.run_command.record", record)


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    virtual_steps(monkeypatch, Toys())


def test_sweeps_do_not_measure_a_servers_prefix_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each step sent the prompts of the step before, so throughput grew with what was cached."""
    config = ToyConfig(ttft_s=0.2, itl_s=0.01, slots=SLOTS)
    flags = ("--prompt-tokens=32", "--max-load=16")
    results = {}
    for name, cache in (("without", None), ("with", set[str]()), ("again", set[str]())):
        virtual_steps(monkeypatch, Toys(config, cache))
        if name == "again":
            assert sweep(tmp_path / "first", *flags, "--max-load=2") == 0
        assert sweep(tmp_path / name, "--repeats=2", *flags) == 0
        result = msgspec.json.decode((tmp_path / name / "sweep.json").read_bytes())
        results[name] = result["knee"], [point["throughput"] for point in result["points"]]
        runs = read_report(tmp_path / name).runs
        assert len({run.scenario.seed for run in runs}) == len(runs) > SLOTS
        assert not any("prefix cache" in warning for run in runs for warning in run.warnings)
        (seed,) = {run.command.partition(" --seed=")[2] for run in runs}
    assert results["without"] == results["with"] == results["again"]

    assert sweep(tmp_path / "same", f"--seed={seed}", "--repeats=2", *flags) == 0
    first, same = read_report(tmp_path / "again").runs, read_report(tmp_path / "same").runs
    assert first[0].scenario.seed == same[0].scenario.seed, "the command repeats it"
    assert any("prefix cache" in warning for run in same for warning in run.warnings)


def test_a_closed_loop_is_full_when_its_slots_are(
    virtual: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path, "--first-load=3") == 0
    decoded = msgspec.json.decode((tmp_path / "sweep.json").read_bytes())
    assert decoded["knee"] == SLOTS
    assert not decoded["knee_may_lie_beyond"] and decoded["largest_good"] is None
    most = max(point["throughput"] for point in decoded["points"])
    assert most == pytest.approx(CAPACITY * TOKENS, rel=0.02)
    report = read_report(tmp_path)
    assert report.knee == f"concurrent {SLOTS}"
    names = [run.summary.name for run in report.runs]
    assert sorted(names) == sorted(decoded["names"])
    assert names == sorted(names, key=lambda name: float(name.split()[1]))  # by load
    printed = capsys.readouterr().out
    assert f"Knee: {SLOTS} requests under way" in printed
    assert all(sentence in printed for sentence in report.outcome)
    assert all(sentence in (tmp_path / "report.md").read_text() for sentence in report.outcome)
    assert f"report: {tmp_path / 'report.html'}" in printed
    for folder in decoded["folders"]:
        assert (tmp_path / "steps" / folder / "recording.npz").exists()


def test_an_open_loop_with_objectives_finds_the_rate_that_it_can_bear(
    virtual: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ("--sweep=rate", "--arrivals=constant", "--first-load=40", "--max-load=80")
    assert sweep(tmp_path / "a", *rates, "--objectives=ttft<0.1", "--good-share=0.9") == 0
    decoded = msgspec.json.decode((tmp_path / "a" / "sweep.json").read_bytes())
    assert 0.8 * CAPACITY <= decoded["largest_good"] <= 1.05 * CAPACITY
    assert "of requests meet ttft<0.1" in capsys.readouterr().out
    again = [f"--output={tmp_path / 'b'}", "--objectives=ttft<1e-9", "--fail-if=ttft_p50>1e-9"]
    assert main(["report", str(tmp_path / "a"), *again]) == 1
    printed = capsys.readouterr().out
    assert "At no load at least 90% of requests meet ttft<1e-9." in printed
    assert "FAILED at the knee: ttft_p50>1e-9" in printed
    assert len(read_report(tmp_path / "b").runs) == len(decoded["points"])


@pytest.mark.parametrize("ending", ["the server ends", "ctrl-c", "ctrl-c between two steps"])
def test_what_was_measured_before_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Of real processes: the first step has five requests, and the sixth is never answered."""
    main_process = os.getpid()

    def fault(number: int) -> Fault | None:
        if number == 5:
            os.kill(main_process, signal.SIGINT)
        return None if number < 5 else "silent"

    def shown(_run: object) -> None:
        if ending == "the server ends":
            listening.close()
        elif ending == "ctrl-c between two steps":
            raise KeyboardInterrupt

    monkeypatch.setattr("srm.loadtest.commands.sweep.show_step", shown)
    flags = ("--duration-s=0", "--settle-s=0", "--requests=5")
    with ExitStack() as listening:
        toy = listening.enter_context(ToyServer(ToyConfig(ttft_s=0.0, itl_s=0.0), fault=fault))
        if ending == "the server ends":
            with pytest.raises(ConfigError, match="nothing listens"):
                sweep(tmp_path, *flags, url=toy.url)
        else:
            assert sweep(tmp_path, *flags, url=toy.url) == INTERRUPTED
    (run,) = read_report(tmp_path).runs
    assert (run.summary.name, run.summary.completed) == ("concurrent 1", 5)
