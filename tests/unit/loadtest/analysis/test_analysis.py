"""The default window, what is refused, and what speaks against a summary.

tests/property/test_measures.py holds every measure to plain loops over rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from srm.errors import ConfigError
from srm.loadtest.analysis.chunks import sort_stably
from srm.loadtest.analysis.summarize import summarize
from srm.loadtest.analysis.verdict import growth, warnings
from srm.loadtest.analysis.window import default_window, load_name
from srm.loadtest.recording import Recording
from tests.kit.loads.recorded import NAN, recording, request

FOUR = [(float(index), 6.0) for index in range(4)]


@pytest.mark.parametrize(
    ("times", "run", "window"),
    [
        (FOUR, {"warmup_s": 2.0, "cooldown_s": 3.0}, (2.0, 7.0)),
        (FOUR, {"arrivals": "constant", "stopped_by": "requests"}, (0.0, 4.0)),
        (FOUR, {"arrivals": "constant", "stopped_by": "requests", "cooldown_s": 1.0}, (0.0, 3.0)),
        (FOUR, {"arrivals": "trace", "stopped_by": "trace", "warmup_s": 1.0}, (1.0, 4.0)),
        (FOUR, {"arrivals": "constant", "stopped_by": "interrupt", "seconds": 3.5}, (0.0, 3.5)),
        (FOUR, {"stopped_by": "requests", "seconds": 6.0}, (0.0, 6.0)),
        (FOUR, {"stopped_by": "interrupt", "seconds": 6.0, "cooldown_s": 2.0}, (0.0, 4.0)),
        ([(0.0, 8.0)], {"stopped_by": "requests", "seconds": 8.0}, (0.0, 8.0)),
        ([(0.0, 8.0)], {"arrivals": "trace", "stopped_by": "trace", "seconds": 8.0}, (0.0, 8.0)),
    ],
)
def test_the_default_window_has_what_comes_at_its_end(
    times: list[tuple[float, float]], run: dict[str, Any], window: tuple[float, float]
) -> None:
    made = recording([request(index, *both) for index, both in enumerate(times)], **run)
    assert default_window(made) == pytest.approx(window)
    if len(times) == 1:  # one huge request, measured to its end
        assert summarize(made).completed_per_s == pytest.approx(1 / 8)


@pytest.mark.parametrize(
    ("window", "scenario"),
    [
        ((3.0, 3.0), {}),
        ((3.0, 2.0), {}),
        ((-1.0, 2.0), {}),
        ((0.0, math.inf), {}),
        ((0.0, NAN), {}),
        (None, {"warmup_s": 6.0, "duration_s": 20.0, "seconds": 5.0, "stopped_by": "interrupt"}),
    ],
)
def test_windows_without_time_are_refused(window: Any, scenario: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="nothing is measured from"):
        summarize(recording([request(0, 1.0, 2.0)], **scenario), window=window)


@pytest.mark.parametrize("objective", ["ttft<1", "tpot<1", "itl<1"])
def test_objectives_that_whole_replies_cannot_meet_are_refused(objective: str) -> None:
    with pytest.raises(ConfigError, match="cannot be judged without `stream`"):
        summarize(recording(stream=False, objectives=(objective,)))


@pytest.mark.parametrize(
    ("rows", "field", "values", "message"),
    [
        ("requests", "index", [2, 0], "requests are not sorted by index"),
        ("events", "time", [2.0, 1.0], "events are not sorted by time"),
        ("events", "tokens", [1, 0], "events without tokens"),
        ("events", "request", [0, 1], "no request 1 is"),
        ("events", "request", [0, 3], "no request 3 is"),
        ("events", "request", [0, -1], "no request -1 is"),
    ],
)
def test_broken_recordings_are_refused(rows: str, field: str, values: Any, message: str) -> None:
    run = recording([request(0, 0.0, 1.0), request(2, 0.0, 1.0)], [(0, 0, 1.0, 1), (2, 0, 2.0, 1)])
    getattr(run, rows)[field] = values
    with pytest.raises(ConfigError, match=message):
        summarize(run)


@pytest.mark.parametrize("far", [1, 2**61])  # apart so far that keys and places are over 63 bits
def test_events_of_a_sample_stay_in_order(far: int) -> None:
    keys = np.random.default_rng(3).integers(0, 4, 1000) * far
    result, order = sort_stably(keys)
    assert np.array_equal(order, np.argsort(keys, kind="stable"))
    assert np.array_equal(result, keys[order])


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"arrivals": "synchronous"}, "synchronous"),
        ({"arrivals": "concurrent", "concurrency": 64}, "concurrent 64"),
        ({"arrivals": "constant", "rate": 0.5}, "constant 0.5/s"),
        ({"arrivals": "poisson", "rate": 40.0}, "poisson 40/s"),
        ({"arrivals": "ramp", "rate": 1.0, "rate_end": 9.0}, "ramp 1 to 9/s"),
        ({"arrivals": "trace", "trace": Path("days/monday.jsonl")}, "trace monday.jsonl"),
    ],
)
def test_loads_have_names(settings: dict[str, Any], name: str) -> None:
    assert load_name(recording(**settings).about.scenario) == name


Change = dict[str, Any] | float
"""Fields of a request, or how many seconds later it is sent."""


def steady(change: Change | None = None, num: int = 1200, **settings: Any) -> Recording:
    """`num` requests over 30 s, each of which took 0.1 s; every fiftieth as `change` says."""
    rows = []
    for index in range(num):
        planned = 30 * index / num
        row = request(index, planned, planned + 0.1, output_tokens=2, usage_output_tokens=2)
        if change is not None and index % 50 == 0:
            row |= change if isinstance(change, dict) else {"sent": planned + change}
        rows.append(row)
    events = [
        (row["index"], 0, row["planned"] + after, 1) for row in rows for after in (0.0625, 0.09375)
    ]
    run: dict[str, Any] = {"arrivals": "constant", "duration_s": 30.0, "seconds": 30.1}
    return recording(rows, events, **(run | settings))


def read_verdict(run: Recording, window: tuple[float, float] | None = None) -> str:
    return "\n".join(warnings(summarize(run, window=window), run))


def test_nothing_speaks_against_a_good_run() -> None:
    assert read_verdict(steady()) == ""


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (steady(clients=[(0, 30.0, 27.0, 0.0, 1)]), "used 90% of a core: the harness may"),
        (steady(clients=[]), "did not record its CPU time"),
        (steady(clients=[(0, 30.0, 3.0, 0.25, 1)]), "was late by up to 250 ms"),
        (steady(0.02), "p99 of lateness is 20 ms, the median TTFT 62.5 ms"),
        (steady(0.007), "p99 of lateness is 7 ms"),
        (steady({"error": 8}), "24 of 1200 requests were cut"),
        (steady({"error": 2}), "24 of 1200 requests failed (24 timeout)"),
        (steady({"error": 1, "sent": NAN}), "24 of 1200 requests failed (24 connect)"),
        (steady(num=900), "900 requests completed: p99.9"),
        (steady({"output_tokens": 3}), "In 24 of 1200 replies the client counts other tokens"),
        (steady({"output_tokens": 3}), "than the server: 2424 against 2400 in all"),
        (
            steady({"output_tokens": -1, "usage_output_tokens": -1}),
            "Tokens of 24 replies were counted by neither",
        ),
        (steady(num=0), "No request was planned in the window"),
        (
            steady({"max_tokens": 3, "n": 2}),
            "24 of 1200 replies were shorter than asked for, in spite of `ignore_eos`: 48 of 144",
        ),
        (steady({"max_tokens": 3, "output_tokens": -1}), "24 of 1200 replies were shorter"),
    ],
)
def test_what_speaks_against_a_run(run: Recording, sentence: str) -> None:
    assert read_verdict(run).count(sentence) == 1


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        ({"max_tokens": 3}, {"ignore_eos": False}),
        ({"max_tokens": 3}, {"extra_body": '{"ignore_eos": false}'}),
        ({"max_tokens": 3, "error": 2}, {}),
        ({"max_tokens": 3, "output_tokens": -1, "usage_output_tokens": -1}, {}),
        ({"max_tokens": 2}, {}),
    ],
)
def test_replies_that_may_end_are_not_short(
    change: dict[str, Any], settings: dict[str, Any]
) -> None:
    assert "shorter" not in read_verdict(steady(change, **settings))


def test_why_requests_failed_is_told() -> None:
    run = steady({"error": 5})
    run.about.reasons = {"client": "400: no such model", "server": "outside of the window"}
    assert "The first client error: 400: no such model" in read_verdict(run)
    assert "outside" not in read_verdict(run)


@pytest.mark.parametrize(
    ("cached", "settings", "is_reported"),
    [
        (40, {}, True),
        (4, {}, False),
        (-1, {}, False),
        (40, {"prefixes": 2, "prefix_tokens": 40}, False),
        (40, {"prefixes": 2, "prefix_tokens": 40, "prefix_share": 0.5}, True),
    ],
)
def test_a_prefix_cache_that_knows_the_prompts_is_told(
    cached: int, settings: dict[str, Any], is_reported: bool
) -> None:
    run = steady(**settings)
    run.requests["usage_prompt_tokens"], run.requests["usage_cached_tokens"] = 100, cached
    assert ("had 40% of the prompt tokens in its prefix cache" in read_verdict(run)) == is_reported


def test_a_short_window_is_told_unless_it_is_the_whole_run() -> None:
    assert "is 10.0 times as long as the median request" in read_verdict(steady(), (5, 6))
    assert "median request" not in read_verdict(steady(), (5, 7.5))
    one = recording([request(0, 0.0, 8.0)], stopped_by="requests", seconds=8.0)
    assert "median request" not in read_verdict(one)


def test_what_has_no_first_token_is_told() -> None:
    run = steady()
    run.events = run.events[:0]
    assert "No reply brought a token" in read_verdict(run)
    run.about.scenario = recording(stream=False, duration_s=30.0).about.scenario
    assert "No reply" not in read_verdict(run)


def queue(rate: float, capacity: float, arrivals: str, seed: int) -> Recording:
    """Requests over 30 s for a server that takes 1/capacity for each, one after the other."""
    rng = np.random.default_rng(seed)
    rows, free = [], 0.0
    for index, planned in enumerate(np.sort(rng.uniform(0, 30, rng.poisson(rate * 30)))):
        free = max(free, float(planned)) + 1 / capacity
        rows.append(request(index, float(planned), free))
    return recording(rows, arrivals=arrivals, duration_s=30.0, seconds=max(30.0, free))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("capacity", "arrivals", "is_reported"),
    [
        (30, "poisson", True),
        (30, "constant", True),
        (80, "poisson", False),
        (30, "concurrent", False),  # cannot: it waits
        (30, "ramp", False),  # the load itself grows
    ],
)
def test_an_open_loop_that_outruns_the_server_is_told(
    capacity: float, arrivals: str, is_reported: bool, seed: int
) -> None:
    run = queue(40, capacity, arrivals, seed)
    assert ("the server does not keep up" in read_verdict(run)) == is_reported


def test_growth_is_that_of_a_line() -> None:
    planned = np.arange(0, 20, 0.01)
    ended = planned + 0.5 * planned  # each takes half as long again as it came late
    grown, mean = growth(planned, ended, (0.0, 20.0))
    assert grown == pytest.approx(100 / 1.5 * 10 * 0.5, rel=0.02)
    assert mean == pytest.approx(100 / 1.5 * 15 * 0.5, rel=0.02)
    grown, mean = growth(planned, planned + 1.0, (2.0, 20.0))
    assert grown == pytest.approx(0, abs=2)
    assert mean == pytest.approx(100, rel=0.02)
