"""A report as data: the content of report.json, from which all its other forms are made.

Its schema is the structs below, under the number SCHEMA: fields may be added within it, but none
changes its meaning or goes away. Times are in seconds; null is a number that was not measured.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from srm.errors import UNDECODABLE, ConfigError
from srm.files import open_file
from srm.loadtest.analysis.confidence import parts
from srm.loadtest.analysis.measures import good_requests, is_whole, within
from srm.loadtest.analysis.observed import Observed
from srm.loadtest.analysis.summarize import histograms
from srm.loadtest.analysis.timelines import ServerTimeline, Timeline, server_timeline, timeline
from srm.loadtest.objectives import check
from srm.loadtest.quantities import NAN
from srm.loadtest.scenario import Scenario, as_path
from srm.loadtest.summary import Summary

SCHEMA = "srm-loadtest-1"
_OF_RUN = ("scenario", "command", "started_unix", "seconds", "stopped_by", "machine", "versions")


class Buckets(msgspec.Struct, frozen=True):
    """The buckets of an HDR histogram that are not empty, sorted."""

    start_s: list[float]
    end_s: list[float]
    counts: list[int]


class RunReport(msgspec.Struct, frozen=True):
    """One run, without its single requests and events."""

    summary: Summary
    scenario: Scenario
    command: str
    started_unix: float
    seconds: float
    stopped_by: str
    machine: str
    versions: dict[str, str]
    warnings: tuple[str, ...]
    """Warnings to read before believing the numbers, in sentences."""
    objectives: dict[str, float]
    """By objective: the share of the requests planned in the window that meets it."""
    failed: tuple[str, ...]
    """Conditions of `fail_if` that hold, and why."""
    histograms: dict[str, Buckets]
    """By name of a summary's distribution; those without values are left out."""
    parts: dict[str, list[float]]
    """By measure: its value in each tenth of the window (`loadtest/analysis/confidence.py`)."""
    timeline: Timeline
    server: ServerTimeline


class Report(msgspec.Struct, frozen=True):
    """One run, or the steps of a sweep in their order."""

    schema: str
    title: str
    command: str
    runs: tuple[RunReport, ...]
    knee: str | None = None
    """The name of the step at the knee: the smallest load that brings most of the throughput."""
    knee_may_lie_beyond: bool = False
    """Whether throughput still grew at the largest load."""
    outcome: tuple[str, ...] = ()
    """The result of a sweep in sentences, as on the terminal."""


def report_of(summary: Summary, observed: Observed, warnings: Sequence[str] = ()) -> RunReport:
    """Build the report of a run. Raises ConfigError for an invalid objective or condition."""
    about = observed.recording.about
    return RunReport(
        summary=summary,
        **{name: getattr(about, name) for name in _OF_RUN},
        warnings=tuple(warnings),
        objectives=_objectives(observed),
        failed=tuple(check(summary, about.scenario.fail_if)),
        histograms={
            name: Buckets(*(column.tolist() for column in histogram.buckets()))
            for name, histogram in histograms(observed).items()
            if histogram.count
        },
        parts=parts(observed),
        timeline=timeline(observed),
        server=server_timeline(about.server_metrics),
    )


def _objectives(observed: Observed) -> dict[str, float]:
    recording = observed.recording
    planned = within(recording.requests["planned"], observed.window)
    completed = planned & is_whole(recording.requests)
    shares = {}
    for objective in recording.about.scenario.objectives:
        good = completed & good_requests(recording, observed.chunks, [objective])
        shares[objective] = float(good.sum() / planned.sum()) if planned.any() else NAN
    return shares


def encode(report: Report) -> bytes:
    """Return the content of report.json."""
    encoded = msgspec.json.encode(report, enc_hook=os.fspath)
    return msgspec.json.format(encoded, indent=0) + b"\n"


def read_report(folder: Path) -> Report:
    """Read a report. Raises ConfigError for a folder without a report of this schema."""
    path = folder / "report.json" if folder.is_dir() else folder
    try:
        with open_file(path) as file:
            content = msgspec.json.decode(file.read())
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise ConfigError(f"{path}: schema is {schema!r}; this program reads {SCHEMA!r}")
        for run in content["runs"]:
            for part in ("summary", "objectives", "parts", "timeline", "server"):
                run[part] = _numbers(run[part])
        return msgspec.convert(content, Report, dec_hook=as_path)
    except (OSError, KeyError, TypeError, *UNDECODABLE) as error:
        raise ConfigError(f"cannot read the report {path}: {error}") from None


def _numbers(content: Any) -> Any:
    """Replace null by NaN, which JSON lacks; in these parts null means nothing else."""
    if content is None:
        return NAN
    if isinstance(content, dict):
        return {name: _numbers(value) for name, value in content.items()}
    return [_numbers(value) for value in content] if isinstance(content, list) else content
