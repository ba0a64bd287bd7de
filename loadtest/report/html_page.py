"""A report as one HTML page: no script, no external resources, and all text escaped.

Its layout is templates/report.html, of jinja2.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from srm.loadtest.report import tables
from srm.loadtest.report.plot_latency import latency_pictures
from srm.loadtest.report.plot_sweep import sweep_pictures
from srm.loadtest.report.plot_timelines import timeline_pictures
from srm.loadtest.report.report import Report, RunReport

_TILES = ("output_tokens_per_s", "completed_per_s", "ttft_p50", "ttft_p99", "itl_p50", "e2e_p50")

TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["svg"] = lambda picture: Markup(picture.svg)  # escaped where it was made
TEMPLATES.filters["code"] = lambda text: Markup(
    re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text)))
)


def html(report: Report) -> str:
    """Render the whole page."""
    single = len(report.runs) == 1
    first = report.runs[0]
    return TEMPLATES.get_template("report.html").render(
        title=report.title,
        when=datetime.fromtimestamp(first.started_unix, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=first.machine,
        url=first.scenario.url,
        warnings=first.warnings if single else _of_sweep(report),
        tiles=[tables.labelled(first, key) for key in _TILES] if single else [],
        outcome=report.outcome,
        steps=None if single else tables.steps_table(report.runs),
        sweep=sweep_pictures(report),
        runs=[_run(run, f"r{index}") for index, run in enumerate(report.runs)],
        conditions=tables.conditions_table(report.runs),
        enough=f"{100 * tables.ENOUGH:g}",
        command=report.command,
        scenario=tables.scenario_toml(first.scenario),
    )


def _of_sweep(report: Report) -> list[str]:
    """Return the warnings of the knee's step, and how many other steps have warnings."""
    warned = [run for run in report.runs if run.warnings]
    warnings = [
        f"{run.summary.name}: {warning}"
        for run in warned
        if run.summary.name == report.knee
        for warning in run.warnings
    ]
    if warned:
        warnings.append(
            f"{len(warned)} of {len(report.runs)} steps have warnings, which stand there."
        )
    return warnings


def _run(run: RunReport, name: str) -> dict[str, Any]:
    summary = run.summary
    low, high = summary.window
    pictures = {
        "Latency": latency_pictures(run, name),
        "Over time": timeline_pictures(run, name),
    }
    shown = (
        *(tables.latency_table(run), tables.throughput_table(run)),
        *(tables.errors_table(run), tables.harness_table(run)),
    )
    return {
        "name": summary.name,
        "warnings": run.warnings,
        "measured": f"Measured from {low:g} s to {high:g} s of {run.seconds:.1f} s; "
        f"the run ended by {run.stopped_by}.",
        "objectives": tables.objectives_table(run),
        "tables": [table for table in shown if table.rows],
        "pictures": {heading: warnings for heading, warnings in pictures.items() if warnings},
        "shaded": low > 0 or high < run.seconds,
    }
