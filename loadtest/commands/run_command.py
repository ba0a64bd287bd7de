"""One run from its scenario to its summary: controlled, shown, saved, summed up, and printed as a
few lines of plain text, for people and for pipes."""

from __future__ import annotations

import asyncio
import functools
import math
import secrets
import signal
import sys
from pathlib import Path

import msgspec

from srm.loadtest import objectives
from srm.loadtest.analysis.summarize import summarize
from srm.loadtest.analysis.verdict import warnings
from srm.loadtest.analysis.window import Window, load_name
from srm.loadtest.client.server_metrics import MetricsSampler
from srm.loadtest.client.target import api_key, base_url
from srm.loadtest.client.workers import run
from srm.loadtest.quantities import DISTRIBUTIONS, MEASURES, value_of, with_unit
from srm.loadtest.recording import Recording
from srm.loadtest.report.live import OnProgress, shown
from srm.loadtest.report.report_files import MeasuredRun
from srm.loadtest.scenario import Scenario
from srm.loadtest.summary import Summary

INTERRUPTED = 130
"""Exit code after Ctrl-C, as a shell expects it."""
_COUNTS = ("planned", "completed", "failed", "retried")
_RATES = ("completed_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "good_per_s")
_STATISTICS = ("mean", "p50", "p90", "p99", "p999", "max")
_STEP = ("completed_per_s", "output_tokens_per_s", "good_share", "ttft_p50", "ttft_p99", "e2e_p99")


def say(text: str) -> None:
    """Write a line to standard error, apart from the output proper."""
    sys.stderr.write(text + "\n")


def check(scenario: Scenario) -> None:
    """Raise ConfigError for objectives and conditions that would fail only after the run."""
    for text in scenario.objectives:
        objectives.parse(text)
    for text in scenario.fail_if:
        objectives.parse_condition(text)


def seeded(scenario: Scenario, command: str) -> tuple[Scenario, str]:
    """Return the scenario with a seed, and the command that repeats it. A new seed is drawn if none
    is given: a server's prefix cache knows the prompts of those that it has served."""
    if scenario.seed is not None:
        return scenario, command
    seed = secrets.randbits(32)
    return msgspec.structs.replace(scenario, seed=seed), f"{command} --seed={seed}"


def record(scenario: Scenario, command: str, folder: Path, name: str = "") -> Recording:
    """Run the scenario, show progress, and save the recording. Raises ConfigError."""
    metrics_url = scenario.metrics_url.rstrip("/") or base_url(scenario)
    with (
        MetricsSampler("" if metrics_url == "none" else metrics_url, api_key(scenario)) as sampling,
        shown(name or load_name(scenario), sampling) as on_progress,
    ):
        recording = asyncio.run(_until_over(scenario, on_progress, command))
    about = recording.about
    about.server_metrics = sampling.samples(about.started_unix, about.seconds)
    if sampling.note:
        _note_once(sampling.note)
    recording.save(folder)
    return recording


@functools.cache
def _note_once(text: str) -> None:
    """Print a note; the steps of a sweep all have the same."""
    say(f"note: {text}")


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


def summed_up(
    recording: Recording, name: str | None = None, window: Window | None = None
) -> MeasuredRun:
    """Summarize a recording. Raises ConfigError if nothing is left to measure."""
    summary = summarize(recording, name, window)
    return MeasuredRun(summary, recording, warnings(summary, recording))


def failed(run: MeasuredRun) -> list[str]:
    """Return the conditions of `fail_if` that hold, in words."""
    return objectives.check(run.summary, run.recording.about.scenario.fail_if)


def exit_code(runs: list[MeasuredRun]) -> int:
    """Return 1 if a condition of `fail_if` holds, or if no request was answered; else 0."""
    answered = any(run.summary.completed for run in runs)
    return int(not answered or any(failed(run) for run in runs))


def run_outcome(run: MeasuredRun) -> str:
    """Describe one run, and the conditions of `fail_if` that hold."""
    summary = run.summary
    begin, end = summary.window
    lines = [
        f"{summary.name}, measured from {begin:g} s to {end:.4g} s, "
        f"ended by {run.recording.about.stopped_by}",
        "requests: " + ", ".join(f"{value_of(summary, key):,.0f} {key}" for key in _COUNTS),
    ]
    if summary.errors:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in summary.errors.items())
        lines.append(f"errors: {kinds}")
    lines += [f"{MEASURES[key].label}: {_shown(summary, key)}" for key in _known(summary, _RATES)]
    for name, label in DISTRIBUTIONS.items():
        if getattr(summary, name).count:
            values = "  ".join(
                f"{statistic} {_shown(summary, f'{name}_{statistic}')}" for statistic in _STATISTICS
            )
            lines.append(f"{label}: {values}")
    lines += [f"warning: {warning}" for warning in run.warnings]
    lines += [f"FAILED: {condition}" for condition in failed(run)]
    return "\n".join(lines) + "\n"


def step_outcome(run: MeasuredRun) -> str:
    """Describe one step of a sweep in a line."""
    summary = run.summary
    shown = [f"{MEASURES[key].label} {_shown(summary, key)}" for key in _known(summary, _STEP)]
    reasons = run.recording.about.reasons
    failures = [
        f"{count:,} {kind}" + (f" ({reasons[kind]})" if kind in reasons else "")
        for kind, count in summary.errors.items()
        if kind != "cut"
    ]
    return f"{summary.name}: {', '.join(shown + failures)}"


def where(folder: Path) -> str:
    return f"report: {folder / 'report.html'}\n"


def _known(summary: Summary, keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if not math.isnan(value_of(summary, key))]


def _shown(summary: Summary, key: str) -> str:
    return with_unit(MEASURES[key].kind, value_of(summary, key))
