"""One run from its scenario to its summary: controlled, shown, saved, summed up."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from loadtest import objectives
from loadtest.analysis.summarize import summarize
from loadtest.analysis.verdict import warnings
from loadtest.analysis.window import Window, load_name
from loadtest.client.server_metrics import Sampling
from loadtest.client.target import api_key, base_url
from loadtest.client.workers import run
from loadtest.recording import Recording
from loadtest.report.live import OnProgress, shown
from loadtest.report.report_files import Run
from loadtest.scenario import Scenario

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell expects it."""


def say(text: str) -> None:
    """Write a line to standard error, apart from the output proper."""
    sys.stderr.write(text + "\n")


def check(scenario: Scenario) -> None:
    """Raise ConfigError for objectives and conditions that would fail only after the run."""
    for text in scenario.objectives:
        objectives.parse(text)
    for text in scenario.fail_if:
        objectives.parse_condition(text)


def record(scenario: Scenario, command: str, folder: Path, name: str = "") -> Recording:
    """Run the scenario, show progress, and save the recording. Raises ConfigError."""
    with (
        Sampling(_metrics_url(scenario), api_key(scenario)) as sampling,
        shown(name or load_name(scenario), sampling) as on_progress,
    ):
        recording = asyncio.run(_until_over(scenario, on_progress, command))
    about = recording.about
    about.server_metrics = sampling.samples(about.started_unix, about.seconds)
    if sampling.note:
        say(f"note: {sampling.note}")
    recording.save(folder)
    return recording


async def _until_over(scenario: Scenario, on_progress: OnProgress, command: str) -> Recording:
    """Run to the end. Ctrl-C ends the run in order; a second one ends the program."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        say("interrupted: what is under way is cut; once more to leave at once")
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        recording = await run(scenario, on_progress, command, stop)
        if stop.is_set():  # too late for this run, but whoever pressed it wants no further one
            recording.about.stopped_by = "interrupt"
        return recording
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def summed_up(recording: Recording, name: str | None = None, window: Window | None = None) -> Run:
    """Summarize a recording. Raises ConfigError if nothing is left to measure."""
    summary = summarize(recording, name, window)
    return Run(summary, recording, warnings(summary, recording))


def failed(run: Run) -> list[str]:
    """Return the conditions of `fail_if` that hold, in words."""
    return objectives.check(run.summary, run.recording.about.scenario.fail_if)


def exit_code(runs: list[Run]) -> int:
    """Return 1 if a condition of `fail_if` holds, or if no request was answered; else 0."""
    answered = any(run.summary.completed for run in runs)
    return int(not answered or any(failed(run) for run in runs))


def _metrics_url(scenario: Scenario) -> str:
    if scenario.metrics_url == "none":
        return ""
    return scenario.metrics_url.rstrip("/") or base_url(scenario)
