"""The outcome of a run as printed: a few lines of plain text, for people and for pipes."""

from __future__ import annotations

from pathlib import Path

from loadtest.commands.offline import Offline
from loadtest.quantities import DISTRIBUTIONS, MEASURES, value_of, with_unit
from loadtest.report.report_files import Run
from loadtest.summary import Summary

_COUNTS = ("planned", "completed", "failed", "retried")
_RATES = ("completed_per_s", "output_tokens_per_s", "prompt_tokens_per_s", "good_per_s")
_STATISTICS = ("mean", "p50", "p90", "p99", "p999", "max")
_STEP = ("completed_per_s", "output_tokens_per_s", "good_share", "ttft_p50", "ttft_p99", "e2e_p99")


def of_run(run: Run, failed: list[str]) -> str:
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
    lines += [
        f"{MEASURES[key].label}: {_shown(summary, key)}"
        for key in _RATES
        if value_of(summary, key) == value_of(summary, key)  # not NaN
    ]
    for name, label in DISTRIBUTIONS.items():
        if getattr(summary, name).count:
            values = "  ".join(f"{one} {_shown(summary, f'{name}_{one}')}" for one in _STATISTICS)
            lines.append(f"{label}: {values}")
    lines += [f"warning: {warning}" for warning in run.warnings]
    lines += [f"FAILED: {condition}" for condition in failed]
    return "\n".join(lines) + "\n"


def of_step(run: Run) -> str:
    """Describe one step of a sweep in a line."""
    shown = [f"{MEASURES[key].label} {_shown(run.summary, key)}" for key in _STEP
             if value_of(run.summary, key) == value_of(run.summary, key)]  # fmt: skip
    return f"{run.summary.name}: {', '.join(shown)}"


def of_offline(found: Offline) -> str:
    """Return a table in Markdown, which offline.md has as well."""
    rows = {
        "answered": f"{found.completed:,} of {found.completed + found.failed:,}",
        "samples": f"{found.samples:,}",
        "prompt tokens": f"{found.prompt_tokens:,}",
        "output tokens": f"{found.output_tokens:,}",
        "received": f"{found.num_bytes:,} bytes",
        "upload": _seconds(found.upload_s),
        "run": _seconds(found.run_s),
        "download": _seconds(found.download_s),
        "until the first sample was whole": _seconds(found.first_sample_s),
        "until the last was there": _seconds(found.seconds),
        "samples a second": f"{found.samples_per_s:,.1f}",
        "output tokens a second": "" if found.output_tokens_per_s is None
        else f"{found.output_tokens_per_s:,.0f}",
        "first error": found.first_error,
    }  # fmt: skip
    lines = [f"| {name} | {value} |" for name, value in rows.items() if value not in {"", "-1"}]
    return "\n".join([f"| {found.kind} {found.form} | |", "|---|---|", *lines]) + "\n"


def where(folder: Path) -> str:
    return f"report: {folder / 'report.html'}\n"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:,.3f} s"


def _shown(summary: Summary, key: str) -> str:
    return with_unit(MEASURES[key].kind, value_of(summary, key))
