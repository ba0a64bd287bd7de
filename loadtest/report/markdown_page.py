"""A report in Markdown, short enough to be put into an issue."""

from __future__ import annotations

import re
from datetime import UTC, datetime

from srm.loadtest.report import tables
from srm.loadtest.report.report import Report, RunReport


def markdown(report: Report) -> str:
    """Render warnings, measures, and how to repeat the run."""
    blocks = [f"# {escaped(report.title)}", *(_warnings(run, report) for run in report.runs)]
    if len(report.runs) > 1:
        blocks.append(table(tables.steps_table(report.runs)))
        blocks.append(escaped(" ".join(report.outcome)))
    else:
        blocks += _single(report.runs[0])
    for run in report.runs:
        objectives = tables.objectives_table(run)
        if objectives.rows:
            blocks.append(table(objectives._replace(caption=f"Objectives, {run.summary.name}")))
    first = report.runs[0]
    when = datetime.fromtimestamp(first.started_unix, UTC)
    blocks += [
        f"## How\n\nOn {when:%Y-%m-%d %H:%M} UTC, {escaped(first.machine)}.",
        table(tables.conditions_table(report.runs)),
        fenced(report.command, "sh"),
        fenced(tables.scenario_toml(first.scenario), "toml"),
    ]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _single(run: RunReport) -> list[str]:
    low, high = run.summary.window
    measured = f"Measured from {low:g} s to {high:g} s of {run.seconds:.1f} s."
    return [
        f"**{escaped(run.summary.name)}**. {measured}",
        *map(table, (tables.throughput_table(run), tables.latency_table(run))),
        table(tables.errors_table(run)) if run.summary.errors else "",
        table(tables.harness_table(run)),
    ]


def _warnings(run: RunReport, report: Report) -> str:
    of = f"{run.summary.name}: " if len(report.runs) > 1 else ""
    return "\n".join(f"> ⚠ {escaped(of + warning)}" for warning in run.warnings)


def table(content: tables.Table) -> str:
    """Render a table, numbers aligned right; empty for one without rows."""
    if not content.rows:
        return ""
    ruler = ["---", *("---" if content.words else "--:" for _ in content.head[1:])]
    lines = [content.head, ruler, *content.rows]
    body = "\n".join(f"| {' | '.join(map(escaped, line))} |" for line in lines)
    return f"**{escaped(content.caption)}**\n\n{body}"


def escaped(text: str) -> str:
    """Escape text for Markdown: it ends no table cell and begins no tag and no link."""
    one_line = " ".join(text.split())
    return re.sub(r"([\\|*_`\[\]#])", r"\\\1", one_line).replace("<", "&lt;")


def fenced(text: str, info: str) -> str:
    """Render a block of code, whatever backticks it contains."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{info}\n{text}\n{fence}"
