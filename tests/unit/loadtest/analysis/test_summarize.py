"""The default window, and what is refused.

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
from srm.loadtest.analysis.window import default_window, load_name
from tests.kit.loads.recorded import NAN, recording, request


def test_one_request_by_hand() -> None:
    tokens = {"prompt_tokens": 7, "output_tokens": 6, "usage_output_tokens": 6}
    result = summarize(
        recording(
            [request(0, 1.0, 3.0, sent=1.25, **tokens)],
            [(0, 0, 1.5, 1), (0, 0, 2.0, 1), (0, 0, 2.75, 3), (0, 0, 2.875, 1)],
            clients=[(0, 5.0, 2.0, 0.25, 1), (0, 10.0, 1.0, 0.5, 1), (1, 10.0, 1.0, 0.0, 1)],
        )
    )
    assert result.window == (0.0, 10.0)
    assert (result.ttft.mean, result.e2e.mean, result.lateness.mean) == (0.5, 2.0, 0.25)
    assert result.tpot.mean == (2.875 - 1.5) / 5
    assert (result.itl.count, result.itl.min, result.itl.max) == (5, 0.125, 0.5)
    assert (result.concurrency, result.concurrency_max) == (0.175, 1)
    assert (result.output_tokens_per_s, result.prompt_tokens_per_s) == (0.6, 0.7)
    assert (result.cpu_share, result.lag_max_s) == (0.3, 0.5)


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
