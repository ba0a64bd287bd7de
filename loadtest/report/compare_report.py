"""A comparison as text for a terminal, as Markdown, and as an HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable

from srm.loadtest.analysis.confidence import BATCHES, SMALLEST
from srm.loadtest.quantities import MEASURES, number, unit_for
from srm.loadtest.report.compare import Comparison, Step
from srm.loadtest.report.html_page import TEMPLATES
from srm.loadtest.report.markdown_page import escaped
from srm.loadtest.report.markdown_page import table as markdown_table
from srm.loadtest.report.plot_compare import comparison_pictures
from srm.loadtest.report.tables import Table

HOW = (
    f"Intervals are of 95 %, from {BATCHES} parts of each window; they know what varies within a "
    f"run, not between runs, so less than {100 * SMALLEST:g} % is called no clear difference. Of "
    "twenty rows that are tested one is called different by chance. Not tested are tails, and "
    "whatever runs are too short for: a part must be longer than most requests and have enough "
    "of them."
)


def step_table(comparison: Comparison, step: Step) -> Table:
    """Return a table with every row in the unit that suits its larger value."""
    labels = comparison.label_a, comparison.label_b
    head = ["Measure", "Unit", *labels, "Ratio", "Difference", "95 % interval", "Verdict"]
    rows = []
    for row in step.rows:
        measure = MEASURES[row.key]
        unit = unit_for(measure.kind, [row.a, row.b])
        limits = [row.difference.low * unit.factor, row.difference.high * unit.factor]
        interval = "" if math.isnan(limits[0]) else " to ".join(map(_signed, limits))
        apart = _signed((row.b - row.a) * unit.factor)
        values = unit.write(row.a), unit.write(row.b), number(row.ratio), apart
        rows.append([measure.label, unit.name, *values, interval, row.verdict])
    return Table(step.name, head, rows)


def conditions_table(comparison: Comparison) -> Table:
    """Return a table of the conditions that differ."""
    head = ["Setting", comparison.label_a, comparison.label_b]
    rows = [list(row) for row in comparison.conditions]
    return Table("What else differs", head, rows, words=True)


def text(comparison: Comparison) -> str:
    """Render the comparison for a terminal."""
    head = [_title(comparison), *(f"! {warning}" for warning in _list_warnings(comparison))]
    return "\n\n".join([*head, *_tables(comparison, _aligned), HOW]) + "\n"


def markdown(comparison: Comparison) -> str:
    """Render the comparison to be put into an issue."""
    head = [f"# {escaped(_title(comparison))}"]
    if lines := _list_warnings(comparison):
        head.append("\n".join(f"> ⚠ {escaped(line)}" for line in lines))
    return "\n\n".join([*head, *_tables(comparison, markdown_table), HOW]) + "\n"


def html(comparison: Comparison) -> str:
    """Render the comparison as a page like that of a report."""
    return TEMPLATES.get_template("compare.html").render(
        title=_title(comparison),
        warnings=_list_warnings(comparison),
        conditions=conditions_table(comparison),
        tables=[step_table(comparison, step) for step in comparison.steps],
        pictures=comparison_pictures(comparison),
        how=HOW,
    )


def _tables(comparison: Comparison, render: Callable[[Table], str]) -> list[str]:
    tables = [step_table(comparison, step) for step in comparison.steps]
    rendered = [render(table) for table in (*tables, conditions_table(comparison)) if table.rows]
    if not comparison.conditions and comparison.steps:
        rendered.append("Scenarios, machines and versions are the same.")
    return rendered


def _title(comparison: Comparison) -> str:
    return f"{comparison.label_b} compared with {comparison.label_a}"


def _list_warnings(comparison: Comparison) -> list[str]:
    """Return the warnings, and which steps have no match."""
    only = {comparison.label_a: comparison.only_a, comparison.label_b: comparison.only_b}
    warnings = [*comparison.warnings]
    warnings += [f"Only in {label}: {', '.join(names)}." for label, names in only.items() if names]
    return warnings if comparison.steps else [*warnings, "No step has the same name in both."]


def _aligned(table: Table) -> str:
    lines = [table.head, *table.rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(table.head))]
    is_left = {0, 1, len(widths) - 1} if not table.words else set(range(len(widths)))
    shown = [
        "  ".join(
            cell.ljust(width) if index in is_left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return "\n".join([table.caption, "", *shown])


def _signed(value: float) -> str:
    return f"+{number(value)}" if value > 0 else number(value)
