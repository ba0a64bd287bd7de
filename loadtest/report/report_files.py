"""Writes the files of a report into one folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from loadtest.analysis.observed import observe
from loadtest.recording import Recording
from loadtest.report.csv_files import write_requests, write_summary
from loadtest.report.html_page import html
from loadtest.report.markdown_page import markdown
from loadtest.report.report import SCHEMA, Report, encode, report_of
from loadtest.summary import Summary


@dataclass(frozen=True)
class Run:
    """The measurements of one run, or of one step of a sweep."""

    summary: Summary
    recording: Recording
    warnings: Sequence[str] = ()
    """Warnings to read before believing the numbers, in sentences."""


def write_reports(
    folder: Path, runs: Sequence[Run], knee: str | None = None, title: str = ""
) -> Report:
    """Write report.json, report.md, report.html, summary.csv and requests.csv into the folder.

    Args:
        folder: made if need be; files of those names in it are replaced.
        runs: one, or the steps of a sweep in the order in which they are to be shown.
        knee: the name of a sweep's step at its knee, if there is one.
        title: what the report is called; by default the load and the server.

    Raises:
        ConfigError: there is no run, the knee is none of them, matplotlib is missing, a recording
            is broken, or the folder cannot be written.
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
            report_of(run.summary, one, run.warnings)
            for run, one in zip(runs, observed, strict=True)
        ),
        knee=knee,
    )
    texts = {"report.html": html(report), "report.md": markdown(report)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _replace(folder / name, text.encode())
        write_summary(folder / "summary.csv", report.runs)
        write_requests(folder / "requests.csv", zip(names, observed, strict=True))
        _replace(folder / "report.json", encode(report))
    except OSError as error:
        raise ConfigError(f"cannot write the report into {folder}: {error}") from None
    return report


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)
