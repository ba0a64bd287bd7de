"""Recordings of load tests, written down in tests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from srm.loadtest.recording import CLIENT, ERRORS, EVENT, REQUEST, About, Recording
from srm.loadtest.scenario import Scenario

NAN = math.nan


def request(index: int, planned: float, ended: float, **fields: Any) -> dict[str, Any]:
    """One that was sent when planned and completed, of which no count is known."""
    values: dict[str, Any] = dict.fromkeys(REQUEST.names or (), 0)
    values |= {"prompt_tokens": -1, "usage_prompt_tokens": -1, "n": 1, "status": 200}
    values |= {"usage_cached_tokens": -1}
    values |= {"output_tokens": -1, "usage_output_tokens": -1, "queue_s": NAN, "first_byte": NAN}
    values |= {"index": index, "planned": planned, "sent": planned, "ended": ended}
    if "error" in fields:
        fields["error"] = ERRORS.index(fields["error"])
    assert set(fields) <= set(values)
    return values | fields


def recording(
    requests: Iterable[dict[str, Any]] = (),
    events: Iterable[tuple[int, int, float, int]] = (),
    clients: Iterable[tuple[int, float, float, float, int]] = ((0, 1e3, 1.0, 0.0, 0),),
    seconds: float = 10.0,
    stopped_by: str = "duration",
    **scenario: Any,
) -> Recording:
    """Events are (request, choice, time, tokens) in any order; clients as in CLIENT."""
    needed: dict[str, dict[str, Any]] = {
        "trace": {"trace": Path("trace.jsonl")},
        "ramp": {"rate_end": 100.0},
    }
    kind = needed.get(scenario.get("arrivals", ""), {})
    settings = Scenario(**({"duration_s": 10.0} | kind | scenario))
    return Recording(
        About(settings, "", 0.0, seconds, stopped_by, "", {}, []),
        np.array([tuple(row.values()) for row in requests], REQUEST),
        np.array(sorted(events, key=lambda row: row[2]), EVENT),
        np.array(list(clients), CLIENT),
    )
