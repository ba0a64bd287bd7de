"""Tables of a report, for Markdown and HTML alike: heads with units, formatted cells."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from srm.loadtest.quantities import (
    DISTRIBUTIONS,
    MEASURES,
    PERCENTILES,
    Scale,
    number,
    statistic_name,
    unit_for,
    value_of,
)
from srm.loadtest.report.report import RunReport
from srm.loadtest.scenario import Scenario

ENOUGH = 0.99
"""The share of requests that must meet an objective for it to pass."""


class Table(NamedTuple):
    """Cells as text, not escaped; the first column names its row."""

    caption: str
    head: list[str]
    rows: list[list[str]]
    words: bool = False
    """Whether cells are words, not numbers."""


_STEP_MEASURES = (
    *("concurrency", "planned_per_s", "completed_per_s", "output_tokens_per_s", "good_per_s"),
    *("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "e2e_p50", "e2e_p99", "failed"),
)
_THROUGHPUT = tuple(
    key
    for key, measure in MEASURES.items()
    if key.rpartition("_")[0] not in DISTRIBUTIONS
    and not key.startswith(("cpu", "lag", "check", "miscount"))
)
_HARNESS = ("cpu_share", "lag_max_s", "lateness_p50", "lateness_p99", "lateness_max")


def columns(
    caption: str,
    label: str,
    names: Sequence[str],
    data: Sequence[tuple[str, Scale, list[float]]],
) -> Table:
    """Build a table from columns of numbers: each with its label, unit and one value per name."""
    head = [label, *(unit.head(title) for title, unit, _ in data)]
    rows = [
        [name, *(unit.write(values[index]) for _, unit, values in data)]
        for index, name in enumerate(names)
    ]
    return Table(caption, head, rows)


def steps_table(runs: Sequence[RunReport]) -> Table:
    """Return a table with one row per step; columns without any value are left out."""
    data = []
    for key in _STEP_MEASURES:
        values = [value_of(run.summary, key) for run in runs]
        if not all(map(math.isnan, values)):
            measure = MEASURES[key]
            data.append((measure.label, unit_for(measure.kind, values), values))
    return columns("Steps", "Step", [run.summary.name for run in runs], data)


def latency_table(run: RunReport) -> Table:
    """Return a table of all distributions, in one unit."""
    distributions = {name: getattr(run.summary, name) for name in DISTRIBUTIONS}
    distributions = {
        name: distribution for name, distribution in distributions.items() if distribution.count
    }
    unit = unit_for("seconds", [distribution.p99 for distribution in distributions.values()])
    statistics = ("mean", *PERCENTILES, "max")
    data = [
        (
            "Count",
            Scale("", 1.0),
            [float(distribution.count) for distribution in distributions.values()],
        )
    ]
    for statistic in statistics:
        values = [
            float(getattr(distribution, statistic)) for distribution in distributions.values()
        ]
        data.append((statistic_name(statistic), unit, values))
    return columns("Latency", "Measure", [DISTRIBUTIONS[name] for name in distributions], data)


def throughput_table(run: RunReport) -> Table:
    """Return a table of rates and counts, each in its own unit."""
    return _values_table("Throughput and counts", run, _THROUGHPUT)


def harness_table(run: RunReport) -> Table:
    """Return a table that shows whether the harness was slow, and whether token counts agree."""
    table = _values_table("The harness itself", run, _HARNESS)
    summary = run.summary
    counted = (
        f"{summary.counted_output_tokens:,} here, {summary.usage_output_tokens:,} by the server"
    )
    differing = f"{summary.miscounted:,} of {summary.checked:,}"
    if not summary.checked:
        counted = differing = "none checked"
    table.rows.append(["Output tokens of replies that both counted", counted, ""])
    table.rows.append(["Replies whose token counts differ", differing, ""])
    return table


def _values_table(caption: str, run: RunReport, keys: Sequence[str]) -> Table:
    known = [key for key in keys if not math.isnan(value_of(run.summary, key))]
    return Table(caption, ["Measure", "Value", "Unit"], [labelled(run, key) for key in known])


def labelled(run: RunReport, key: str) -> list[str]:
    """Return a measure's label, its value and the unit of that."""
    value, measure = value_of(run.summary, key), MEASURES[key]
    unit = unit_for(measure.kind, [value])
    return [measure.label, unit.write(value), unit.name]


def errors_table(run: RunReport) -> Table:
    """Return a table of how requests ended, by kind."""
    summary = run.summary
    kinds = {"whole reply": summary.completed, **summary.errors}
    total = max(summary.planned, 1)
    rows = [
        [kind, f"{count:,}", number(100 * count / total)]
        for kind, count in kinds.items()
        if count or kind == "whole reply"
    ]
    return Table("How requests ended", ["End", "Requests", "Share (%)"], rows)


def objectives_table(run: RunReport) -> Table:
    """Return a table of objectives and conditions of `fail_if`, and whether each passes."""
    rows = [
        [objective, number(100 * share), _verdict(share >= ENOUGH)]
        for objective, share in run.objectives.items()
    ]
    if rows:
        rows.append(["all of these", number(100 * run.summary.good_share), ""])
    for condition in run.scenario.fail_if:
        held = next(
            (lines for lines in run.failed if lines.startswith(f"{condition.strip()}: ")), ""
        )
        rows.append([f"fail if {held or condition}", "", _verdict(not held)])
    return Table("Objectives", ["Objective", "Met by requests (%)", "Verdict"], rows)


def _verdict(passes: bool) -> str:
    return "pass" if passes else "fail"


def conditions_table(runs: Sequence[RunReport]) -> Table:
    """Return a table of server, machine, versions, and settings that differ between the runs."""
    first = runs[0]
    rows = [
        ["Server", first.scenario.url],
        ["Machine", first.machine],
        *([name, version] for name, version in first.versions.items()),
    ]
    for name in Scenario.__struct_fields__:
        values = [str(getattr(run.scenario, name)) for run in runs]
        if len(set(values)) > 1 and name != "output":
            rows.append([f"{name}, of each step", ", ".join(values)])
    return Table("Where and with what", ["What", "Value"], rows, words=True)


def scenario_toml(scenario: Scenario) -> str:
    """Write the settings that are not at their defaults, as a file for `srm loadtest run`."""
    lines = []
    for field in msgspec.structs.fields(Scenario):
        value = getattr(scenario, field.name)
        if value != field.default and value is not None:
            lines.append(f"{field.name} = {_toml(value)}")
    return "\n".join(lines) or "# all settings are at their defaults"


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    text = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    return json.dumps(text).replace("\x7f", "\\u007f")
