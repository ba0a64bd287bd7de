"""Measures of one request by hand, the default window, and what is refused.

tests/property/test_measures.py holds every measure to plain loops over rows.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.errors import ConfigError
from loadtest.analysis.chunks import _sorted
from loadtest.analysis.summarize import summarize
from loadtest.analysis.window import default_window, load_name
from loadtest.recording import Recording, load
from loadtest.summary import Distribution
from tests.loads.recorded import NAN, recording, request


def test_one_request_by_hand() -> None:
    found = summarize(
        recording(
            [
                request(
                    0, 1.0, 3.0, sent=1.25, prompt_tokens=7, output_tokens=6, usage_output_tokens=6
                )
            ],
            [(0, 0, 1.5, 1), (0, 0, 2.0, 1), (0, 0, 2.75, 3), (0, 0, 2.875, 1)],
            clients=[(0, 5.0, 2.0, 0.25, 1), (0, 10.0, 1.0, 0.5, 1), (1, 10.0, 1.0, 0.0, 1)],
        )
    )
    assert found.window == (0.0, 10.0)
    assert (found.ttft.mean, found.ttft_sent.mean) == (0.5, 0.25)
    assert (found.e2e.mean, found.e2e_sent.mean) == (2.0, 1.75)
    assert found.lateness.mean == 0.25
    assert found.tpot.mean == (2.875 - 1.5) / 5
    assert (found.gap.count, found.gap.max) == (3, 0.75)
    assert (found.itl.count, found.itl.min, found.itl.max) == (5, 0.125, 0.5)
    assert found.itl.mean == pytest.approx((0.5 + 3 * 0.25 + 0.125) / 5)
    assert (found.concurrency, found.concurrency_max) == (0.175, 1)
    assert (found.output_tokens_per_s, found.prompt_tokens_per_s) == (0.6, 0.7)
    assert (found.checked, found.miscounted) == (1, 0)
    assert (found.cpu_share, found.lag_max_s) == (0.3, 0.5)
    assert math.isnan(found.good_share)


def test_nothing_is_measured_of_an_empty_run() -> None:
    found = summarize(recording(clients=[], objectives=("ttft<1",)))
    for field in msgspec.structs.fields(type(found)):
        value = getattr(found, field.name)
        if field.type is Distribution:
            assert value.count == 0
            assert all(math.isnan(number) for number in msgspec.structs.astuple(value)[1:])
    assert (found.planned, found.completed, found.errors) == (0, 0, {})
    assert (found.output_tokens_per_s, found.concurrency, found.concurrency_max) == (0, 0, 0)
    assert math.isnan(found.good_share)
    assert math.isnan(found.rejected_share)
    assert math.isnan(found.cpu_share)


@pytest.mark.parametrize(
    ("run", "window"),
    [
        ({"warmup_s": 2.0, "cooldown_s": 3.0}, (2.0, 7.0)),
        ({"arrivals": "constant", "stopped_by": "requests"}, (0.0, 4.0)),
        ({"arrivals": "constant", "stopped_by": "requests", "cooldown_s": 1.0}, (0.0, 3.0)),
        ({"arrivals": "trace", "stopped_by": "trace", "warmup_s": 1.0}, (1.0, 4.0)),
        ({"arrivals": "constant", "stopped_by": "interrupt", "seconds": 3.5}, (0.0, 3.5)),
        ({"stopped_by": "requests", "seconds": 6.0}, (0.0, 6.0)),
        ({"stopped_by": "interrupt", "seconds": 6.0, "cooldown_s": 2.0}, (0.0, 4.0)),
    ],
)
def test_the_default_window(run: dict[str, Any], window: tuple[float, float]) -> None:
    requests = [request(index, float(index), 6.0) for index in range(4)]
    assert default_window(recording(requests, **run)) == pytest.approx(window)


@pytest.mark.parametrize("arrivals", ["concurrent", "trace"])
def test_one_huge_request_is_measured_to_its_end(arrivals: str) -> None:
    run = recording(
        [request(0, 0.0, 8.0, n=2)],
        [(0, 0, 4.0, 1), (0, 1, 8.0, 1)],
        arrivals=arrivals,
        stopped_by="requests",
        seconds=8.0,
    )
    found = summarize(run)
    assert (found.planned, found.completed) == (1, 1)
    assert found.output_tokens_per_s == pytest.approx(2 / 8)
    assert found.completed_per_s == pytest.approx(1 / 8)


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


def broken(what: str) -> Recording:
    run = recording([request(0, 0.0, 1.0), request(2, 0.0, 1.0)], [(0, 0, 1.0, 1), (2, 0, 2.0, 1)])
    if what == "requests":
        run.requests["index"] = [2, 0]
    elif what == "times":
        run.events["time"] = [2.0, 1.0]
    elif what == "tokens":
        run.events["tokens"] = [1, 0]
    else:
        run.events["request"] = [0, int(what)]
    return run


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("requests", "requests are not sorted by index"),
        ("times", "events are not sorted by time"),
        ("tokens", "events without tokens"),
        ("1", "no request 1 is"),
        ("3", "no request 3 is"),
        ("-1", "no request -1 is"),
    ],
)
def test_broken_recordings_are_refused(what: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        summarize(broken(what))


@pytest.mark.parametrize("far", [1, 2**61])  # apart so far that keys and places are over 63 bits
def test_events_of_a_sample_stay_in_order(far: int) -> None:
    keys = np.random.default_rng(3).integers(0, 4, 1000) * far
    found, order = _sorted(keys)
    assert np.array_equal(order, np.argsort(keys, kind="stable"))
    assert np.array_equal(found, keys[order])


def test_a_saved_run_has_the_same_summary(tmp_path: Path) -> None:
    run = recording([request(0, 0.0, 3.0)], [(0, 0, 1.0, 1), (0, 0, 2.0, 3)], objectives=("e2e<9",))
    run.save(tmp_path)
    assert repr(summarize(load(tmp_path))) == repr(summarize(run))
    assert np.array_equal(load(tmp_path).events, run.events)


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
