"""Writes requests.csv, a row per request, and summary.csv, a row per run; no value is an empty
cell.

Numbers are as measured, in seconds and per second, not rounded.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loadtest.analysis.observed import Observed
from loadtest.quantities import MEASURES, value_of
from loadtest.recording import ERRORS
from loadtest.report.report import RunReport

_COUNTS = ("prompt_tokens", "output_tokens", "usage_prompt_tokens", "usage_output_tokens")
"""Columns in which -1 means unknown."""


def write_summary(path: Path, runs: Sequence[RunReport]) -> None:
    """Write every measure of MEASURES; names of times end in `_s`."""
    heads = [
        f"{key}_s" if measure.kind == "seconds" and not key.endswith("_s") else key
        for key, measure in MEASURES.items()
    ]
    rows = []
    for run in runs:
        values = [_cell(value_of(run.summary, key)) for key in MEASURES]
        rows.append([run.summary.name, *run.summary.window, *values])
    _write(path, ["name", "window_start_s", "window_end_s", *heads], rows)


def write_requests(path: Path, runs: Iterable[tuple[str, Observed]]) -> None:
    """Write all requests of all runs, including those outside of the window."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        for index, (name, observed) in enumerate(runs):
            found = _columns(observed)
            if index == 0:
                writer.writerow(["run", *found])
            writer.writerows([name, *row] for row in zip(*found.values(), strict=True))


def _columns(observed: Observed) -> dict[str, list[Any]]:
    requests = observed.recording.requests
    planned = requests["planned"]
    found: dict[str, list[Any]] = {
        "index": requests["index"].tolist(),
        "worker": requests["worker"].tolist(),
        "planned_s": _times(planned),
        "sent_s": _times(requests["sent"]),
        "first_byte_s": _times(requests["first_byte"]),
        "first_token_s": _times(observed.first),
        "last_token_s": _times(observed.last),
        "ended_s": _times(requests["ended"]),
        "lateness_s": _times(requests["sent"] - planned),
        "ttft_s": _times(observed.first - planned),
        "e2e_s": _times(requests["ended"] - planned),
        "queue_s": _times(requests["queue_s"]),
        "error": [ERRORS[number] for number in requests["error"].tolist()],
        "status": requests["status"].tolist(),
        "retries": requests["retries"].tolist(),
        "n": requests["n"].tolist(),
        "max_tokens": requests["max_tokens"].tolist(),
        "num_bytes": requests["num_bytes"].tolist(),
    }
    for name in _COUNTS:
        found[name] = ["" if value < 0 else value for value in requests[name].tolist()]
    return found


def _times(values: NDArray[np.float64]) -> list[Any]:
    """Round to the microsecond, since no client measures better."""
    return [_cell(value) for value in np.round(values, 6).tolist()]


def _cell(value: float) -> float | int | str:
    return "" if math.isnan(value) else int(value) if value.is_integer() else value


def _write(path: Path, head: list[str], rows: Iterable[list[Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([head, *rows])
