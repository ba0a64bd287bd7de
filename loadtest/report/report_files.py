"""Writes the files of a report into one folder, two tables in CSV among them."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from srm.errors import ConfigError
from srm.loadtest.analysis.observed import Observed, observe
from srm.loadtest.quantities import MEASURES, value_of
from srm.loadtest.recording import ERRORS, Recording
from srm.loadtest.report.html_page import html
from srm.loadtest.report.markdown_page import markdown
from srm.loadtest.report.report import SCHEMA, Report, RunReport, encode, report_of
from srm.loadtest.summary import Summary

_COUNTS = (
    *("prompt_tokens", "output_tokens"),
    *("usage_prompt_tokens", "usage_output_tokens", "usage_cached_tokens"),
)
"""Columns in which -1 means unknown."""


@dataclass(frozen=True)
class MeasuredRun:
    """The measurements of one run, or of one step of a sweep."""

    summary: Summary
    recording: Recording
    warnings: Sequence[str] = ()
    """Warnings to read before believing the numbers, in sentences."""


def write_reports(
    folder: Path,
    runs: Sequence[MeasuredRun],
    knee: str | None = None,
    title: str = "",
    knee_may_lie_beyond: bool = False,
    outcome: Sequence[str] = (),
) -> Report:
    """Write report.json, report.md, report.html, summary.csv and requests.csv into the folder.

    The folder is made if need be, and its files of those names are replaced. `runs` are one, or the
    steps of a sweep in the order to show them; `knee` is the name of the step at its knee, if there
    is one; by default the title is the load and the server. Raises ConfigError if there is no run,
    the knee is none of them, a recording is broken, or the folder cannot be written.
    """
    if not runs:
        raise ConfigError("a report wants at least one run")
    names = [run.summary.name for run in runs]
    if knee is not None and knee not in names:
        raise ConfigError(f"knee {knee!r} is none of the runs {', '.join(names)}")
    observed = [observe(run.recording, run.summary.window) for run in runs]
    about = runs[0].recording.about
    load = names[0] if len(runs) == 1 else f"sweep of {len(runs)} steps"
    report = Report(
        schema=SCHEMA,
        title=title or f"Load test of {about.scenario.url}: {load}",
        command=about.command,
        runs=tuple(
            report_of(run.summary, observation, run.warnings)
            for run, observation in zip(runs, observed, strict=True)
        ),
        knee=knee,
        knee_may_lie_beyond=knee_may_lie_beyond,
        outcome=tuple(outcome),
    )
    texts = {"report.html": html(report), "report.md": markdown(report)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _replace(folder / name, text.encode())
        _write_summary(folder / "summary.csv", report.runs)
        _write_requests(folder / "requests.csv", zip(names, observed, strict=True))
        _replace(folder / "report.json", encode(report))
    except OSError as error:
        raise ConfigError(f"cannot write the report into {folder}: {error}") from None
    return report


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


def _write_summary(path: Path, runs: Sequence[RunReport]) -> None:
    """Write a row per run: every measure of MEASURES; names of times end in `_s`.

    Numbers of both tables are as measured, in seconds and per second; no value is an empty cell.
    """
    heads = [
        f"{key}_s" if measure.kind == "seconds" and not key.endswith("_s") else key
        for key, measure in MEASURES.items()
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["name", "window_start_s", "window_end_s", *heads])
        for summary in [run.summary for run in runs]:
            values = [_cell(value_of(summary, key)) for key in MEASURES]
            writer.writerow([summary.name, *summary.window, *values])


def _write_requests(path: Path, runs: Iterable[tuple[str, Observed]]) -> None:
    """Write a row per request of all runs, including those outside of the window."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for index, (name, observed) in enumerate(runs):
            columns = _columns(observed)
            if index == 0:
                writer.writerow(["run", *columns])
            writer.writerows([name, *row] for row in zip(*columns.values(), strict=True))


def _columns(observed: Observed) -> dict[str, list[Any]]:
    requests = observed.recording.requests
    planned, sent, ended = requests["planned"], requests["sent"], requests["ended"]
    times = {
        "planned_s": planned,
        "sent_s": sent,
        "first_byte_s": requests["first_byte"],
        "first_token_s": observed.first,
        "last_token_s": observed.last,
        "ended_s": ended,
        "lateness_s": sent - planned,
        "ttft_s": observed.first - planned,
        "e2e_s": ended - planned,
        "queue_s": requests["queue_s"],
    }
    columns: dict[str, list[Any]] = {name: requests[name].tolist() for name in ("index", "worker")}
    for name, values in times.items():  # to the microsecond, since no client measures better
        columns[name] = [_cell(value) for value in np.round(values, 6).tolist()]
    columns["error"] = [ERRORS[code] for code in requests["error"].tolist()]
    for name in ("status", "retries", "n", "max_tokens", "num_bytes"):
        columns[name] = requests[name].tolist()
    for name in _COUNTS:
        columns[name] = ["" if value < 0 else value for value in requests[name].tolist()]
    return columns


def _cell(value: float) -> float | int | str:
    return "" if math.isnan(value) else int(value) if value.is_integer() else value
