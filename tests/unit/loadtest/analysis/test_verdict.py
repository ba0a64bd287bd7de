"""What speaks against a summary is said, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from loadtest.analysis.summarize import summarize
from loadtest.analysis.verdict import growth, warnings
from loadtest.recording import Recording
from tests.loads.recorded import NAN, recording, request

Change = Callable[[dict[str, Any]], dict[str, Any]]


def steady(change: Change = lambda row: row, num: int = 1200, **settings: Any) -> Recording:
    """`num` requests over 30 s, each of which took 0.1 s; every fiftieth as `change` says."""
    rows = []
    for index in range(num):
        planned = 30 * index / num
        row = request(index, planned, planned + 0.1, output_tokens=2, usage_output_tokens=2)
        rows.append(change(row) if index % 50 == 0 else row)
    events = [
        (row["index"], 0, row["planned"] + after, 1) for row in rows for after in (0.0625, 0.09375)
    ]
    run: dict[str, Any] = {"arrivals": "constant", "duration_s": 30.0, "seconds": 30.1}
    return recording(rows, events, **(run | settings))


def said(run: Recording, window: tuple[float, float] | None = None) -> list[str]:
    return warnings(summarize(run, window=window), run)


def test_nothing_speaks_against_a_good_run() -> None:
    assert said(steady()) == []


def changed(**fields: Any) -> Change:
    return lambda row: row | fields


def later(seconds: float) -> Change:
    return lambda row: row | {"sent": row["sent"] + seconds}


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (steady(clients=[(0, 30.0, 27.0, 0.0, 1)]), "used 90% of a core: the harness may"),
        (steady(clients=[]), "did not record its CPU time"),
        (steady(clients=[(0, 30.0, 3.0, 0.25, 1)]), "was late by up to 250 ms"),
        (steady(later(0.02)), "p99 of lateness is 20 ms, the median TTFT 62.5 ms"),
        (steady(later(0.007)), "p99 of lateness is 7 ms"),
        (steady(changed(error=8)), "24 of 1200 requests were cut"),
        (steady(changed(error=2)), "24 of 1200 requests failed (24 timeout)"),
        (steady(num=900), "900 requests completed: p99.9"),
        (steady(changed(output_tokens=3)), "In 24 of 1200 replies the client counts other tokens"),
        (steady(changed(output_tokens=3)), "than the server: 2424 against 2400 in all"),
        (
            steady(changed(output_tokens=-1, usage_output_tokens=-1)),
            "Tokens of 24 replies were counted by neither",
        ),
        (steady(num=0), "No request was planned in the window"),
    ],
)
def test_what_speaks_against_a_run(run: Recording, sentence: str) -> None:
    found = said(run)
    assert sum(sentence in line for line in found) == 1, found


def test_a_short_window_is_told_unless_it_is_the_whole_run() -> None:
    run = steady()
    assert any("is 10.0 times as long as the median request" in line for line in said(run, (5, 6)))
    assert not any("median request" in line for line in said(run, (5, 7.5)))
    one = recording([request(0, 0.0, 8.0)], stopped_by="requests", seconds=8.0)
    assert not any("median request" in line for line in said(one))


def test_what_has_no_first_token_is_told() -> None:
    run = steady()
    run.events = run.events[:0]
    assert any("No reply brought a token" in line for line in said(run))
    run.about.scenario = recording(stream=False, duration_s=30.0).about.scenario
    assert not any("No reply" in line for line in said(run))


def queue(rate: float, capacity: float, arrivals: str, seed: int) -> Recording:
    """Requests over 30 s for a server that takes 1/capacity for each, one after the other."""
    rng = np.random.default_rng(seed)
    rows, free = [], 0.0
    for index, planned in enumerate(np.sort(rng.uniform(0, 30, rng.poisson(rate * 30)))):
        free = max(free, float(planned)) + 1 / capacity
        rows.append(request(index, float(planned), free))
    return recording(rows, arrivals=arrivals, duration_s=30.0, seconds=max(30.0, free))


@pytest.mark.parametrize("seed", range(5))
def test_an_open_loop_that_outruns_the_server_is_told(seed: int) -> None:
    def told(run: Recording) -> bool:
        return any("the server does not keep up" in line for line in said(run))

    assert told(queue(40, 30, "poisson", seed))
    assert told(queue(40, 30, "constant", seed))
    assert not told(queue(40, 80, "poisson", seed))
    assert not told(queue(40, 30, "concurrent", seed))  # cannot: it waits
    assert not told(queue(40, 30, "ramp", seed))  # the load itself grows


def test_growth_is_that_of_a_line() -> None:
    planned = np.arange(0, 20, 0.01)
    ended = planned + 0.5 * planned  # each takes half as long again as it came late
    grown, mean = growth(planned, ended, (0.0, 20.0))
    assert grown == pytest.approx(100 / 1.5 * 10 * 0.5, rel=0.02)
    assert mean == pytest.approx(100 / 1.5 * 15 * 0.5, rel=0.02)
    grown, mean = growth(planned, planned + 1.0, (2.0, 20.0))
    assert grown == pytest.approx(0, abs=2)
    assert mean == pytest.approx(100, rel=0.02)


def test_a_run_that_never_sent_has_a_verdict() -> None:
    run = recording([request(0, 1.0, 2.0, sent=NAN, error="connect")])
    assert any("1 of 1 requests failed (1 connect)" in line for line in said(run))
