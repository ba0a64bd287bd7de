"""Compares two reports: their measures, their differences, and what may be noise.

Steps of sweeps are matched by their names. Only measures whose spread within a run is known are
called different (`loadtest/analysis/confidence.py`); of all others only the numbers are shown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from srm.loadtest.analysis.confidence import Difference, difference
from srm.loadtest.quantities import MEASURES, value_of
from srm.loadtest.report.report import Report, RunReport, read_report
from srm.loadtest.scenario import Scenario

COMPARED = (
    *("output_tokens_per_s", "completed_per_s", "good_share"),
    *("ttft_p50", "ttft_p99", "ttft_p999", "itl_p50", "itl_p99", "tpot_p50", "e2e_p50", "e2e_p99"),
    *("concurrency", "failed", "rejected_share", "lateness_p99", "cpu_share"),
)
_ASKED = frozenset(Scenario.__struct_fields__) - set(
    """
    url served_model_name api_key_env grace_s timeout_s retries seed workers objectives fail_if
    metrics_url output
    """.split()
)
"""Settings that decide what is asked of a server, and when."""


class ComparisonRow(msgspec.Struct, frozen=True):
    """One measure of both, in SI units; measures that neither has are left out."""

    key: str
    a: float
    b: float
    ratio: float
    """b / a; NaN if a is 0."""
    difference: Difference

    @property
    def verdict(self) -> str:
        """Return `better` or `worse` for b if that is known; else the difference's verdict."""
        verdict, better = self.difference.verdict, MEASURES[self.key].better
        if verdict not in {"more", "less"} or not better:
            return verdict
        return "better" if (verdict == "more") == (better > 0) else "worse"


class Step(msgspec.Struct, frozen=True):
    """A run of a and the matching run of b."""

    name: str
    a: RunReport
    b: RunReport
    rows: tuple[ComparisonRow, ...]


class Comparison(msgspec.Struct, frozen=True):
    """The comparison of report b with report a."""

    label_a: str
    label_b: str
    steps: tuple[Step, ...]
    only_a: tuple[str, ...]
    """Steps of a without one of the same name in b."""
    only_b: tuple[str, ...]
    conditions: tuple[tuple[str, str, str], ...]
    """Settings, machines and versions that differ: name, value in a, value in b."""
    warnings: tuple[str, ...]


def compare(folder_a: Path, folder_b: Path) -> Comparison:
    """Compare two folders' reports. Raises ConfigError for a folder without one of this schema."""
    a, b = read_report(folder_a), read_report(folder_b)
    labels = [folder_a.resolve().name, folder_b.resolve().name]
    if labels[0] == labels[1]:
        labels = [str(folder_a), str(folder_b)]
    return compare_reports(a, b, *labels)


def compare_reports(a: Report, b: Report, label_a: str = "A", label_b: str = "B") -> Comparison:
    """Compare two reports: single runs whatever their names, steps of sweeps by name."""
    if label_a == label_b:  # a folder with itself
        label_a, label_b = f"{label_a} (A)", f"{label_b} (B)"
    if len(a.runs) == len(b.runs) == 1:
        name_a, name_b = a.runs[0].summary.name, b.runs[0].summary.name
        name = name_a if name_a == name_b else f"{name_a} and {name_b}"
        pairs, only_a, only_b = [(name, a.runs[0], b.runs[0])], [], []
    else:
        runs_a, runs_b = _named(a.runs), _named(b.runs)
        pairs = [(name, run, runs_b[name]) for name, run in runs_a.items() if name in runs_b]
        only_a = [name for name in runs_a if name not in runs_b]
        only_b = [name for name in runs_b if name not in runs_a]
    conditions = _conditions(pairs)
    asked = [f"{name} ({a} and {b})" for name, a, b in conditions if name in _ASKED]
    otherwise = [f"The runs asked different things: {', '.join(asked)}."] if asked else []
    return Comparison(
        label_a=label_a,
        label_b=label_b,
        steps=tuple(Step(name, base, other, _rows(base, other)) for name, base, other in pairs),
        only_a=tuple(only_a),
        only_b=tuple(only_b),
        conditions=conditions,
        warnings=(
            *otherwise,
            *(
                f"{label}, {run.summary.name}: {warning}"
                for label, report in ((label_a, a), (label_b, b))
                for run in report.runs
                for warning in run.warnings
            ),
        ),
    )


def _named(runs: Sequence[RunReport]) -> dict[str, RunReport]:
    """Return the runs by name; repeated names get a number."""
    seen: Counter[str] = Counter()
    entries = {}
    for run in runs:
        seen[run.summary.name] += 1
        again = seen[run.summary.name]
        entries[run.summary.name if again == 1 else f"{run.summary.name} ({again})"] = run
    return entries


def _rows(base: RunReport, other: RunReport) -> tuple[ComparisonRow, ...]:
    rows = []
    for key in COMPARED:
        a, b = value_of(base.summary, key), value_of(other.summary, key)
        if math.isnan(a) and math.isnan(b):
            continue
        tested = difference(a, b, base.parts.get(key, []), other.parts.get(key, []))
        rows.append(ComparisonRow(key, a, b, b / a if a else math.nan, tested))
    return tuple(rows)


def _conditions(
    pairs: Sequence[tuple[str, RunReport, RunReport]],
) -> tuple[tuple[str, str, str], ...]:
    """Return the settings, machines and versions that differ, each once."""
    differing: dict[tuple[str, str, str], None] = {}
    for _, base, other in pairs:
        lines = [("machine", base.machine, other.machine)]
        for name in dict.fromkeys((*base.versions, *other.versions)):
            versions = base.versions.get(name, "–"), other.versions.get(name, "–")
            lines.append((f"version of {name}", *versions))
        for name in Scenario.__struct_fields__:
            if name != "output":
                a, b = _shown(getattr(base.scenario, name)), _shown(getattr(other.scenario, name))
                lines.append((name, a, b))
        differing.update(dict.fromkeys(row for row in lines if row[1] != row[2]))
    return tuple(differing)


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "–"
    return "–" if value is None or value == "" else str(value)
