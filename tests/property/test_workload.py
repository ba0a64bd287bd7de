"""Planned times against closed forms and statistics; requests as functions of their index."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from srm.errors import ConfigError
from srm.loadtest.scenario import Scenario
from srm.loadtest.workload.arrivals import times
from srm.loadtest.workload.workload import Workload
from tests.kit.serving import ROOT

RATES = st.floats(0.1, 200)
DURATIONS = st.floats(0.1, 20)
SEEDS = st.integers(0, 2**64 - 1)


def make_scenario(**settings: Any) -> Scenario:
    return Scenario(**{"arrivals": "poisson", **settings})


@given(rate=RATES, duration=DURATIONS)
def test_constant_times_are_multiples_of_the_gap(rate: float, duration: float) -> None:
    planned = times(make_scenario(arrivals="constant", rate=rate, duration_s=duration))
    assert planned.tolist() == [number / rate for number in range(len(planned))]
    assert planned[-1] < duration <= len(planned) / rate


@given(rate=RATES, rate_end=RATES, duration=DURATIONS)
def test_ramp_times_are_where_the_integral_of_the_rate_is_whole(
    rate: float, rate_end: float, duration: float
) -> None:
    planned = times(
        make_scenario(arrivals="ramp", rate=rate, rate_end=rate_end, duration_s=duration)
    )
    due = rate * planned + (rate_end - rate) * planned**2 / (2 * duration)
    np.testing.assert_allclose(due, np.arange(len(planned)), atol=1e-6)
    assert abs(len(planned) - math.ceil((rate + rate_end) / 2 * duration)) <= 1
    assert all(item < other for item, other in pairwise(planned.tolist()))


@given(seed=SEEDS, rate=RATES, duration=DURATIONS)
def test_poisson_times_are_those_of_the_seed(seed: int, rate: float, duration: float) -> None:
    scenario = make_scenario(seed=seed, rate=rate, duration_s=duration)
    planned = times(scenario)
    assert planned.tolist() == times(scenario).tolist()
    assert ((planned > 0) & (planned < duration)).all() and (np.diff(planned) >= 0).all()
    (first,) = times(make_scenario(seed=seed, rate=rate, duration_s=0, requests=1))
    if first < duration:
        longer = times(make_scenario(seed=seed, rate=rate, duration_s=2 * duration))
        assert longer[: len(planned)].tolist() == planned.tolist()
        assert (longer[len(planned) :] >= duration).all()
    faster = times(make_scenario(seed=seed, rate=2 * rate, duration_s=duration / 2))
    np.testing.assert_allclose(faster * 2, planned)
    other = make_scenario(seed=seed ^ 1, rate=rate, duration_s=duration)
    assert not np.intersect1d(planned, times(other)).size


@pytest.mark.parametrize(
    ("rate", "duration"),
    [
        *((0.5, 8.0), (1e-3, 1e-3)),
        *(pytest.param(*given, marks=pytest.mark.slow) for given in ((0.01, 1.0), (0.1, 5.0))),
    ],
)
def test_every_poisson_run_plans_a_request(rate: float, duration: float) -> None:
    """Seed 0 planned nothing in 8 s at 0.5/s. The times are those of runs that plan something."""
    planned = [
        times(make_scenario(seed=seed, rate=rate, duration_s=duration)) for seed in range(2000)
    ]
    assert min(map(len, planned)) >= 1
    expected = -rate * duration / math.expm1(-rate * duration)  # the mean of counts above 0
    assert np.mean([len(run) for run in planned]) == pytest.approx(expected, rel=0.05)
    shares = np.sort([-math.expm1(-rate * run[0]) for run in planned]) / -math.expm1(
        -rate * duration
    )
    assert np.abs(shares - (np.arange(2000) + 0.5) / 2000).max() < 1.63 / math.sqrt(2000)


def test_poisson_gaps_are_exponential_and_their_counts_poisson() -> None:
    rate, seconds = 100.0, 2000.0
    planned = times(make_scenario(seed=7, rate=rate, duration_s=seconds))
    gaps = np.sort(np.diff(planned, prepend=0.0))
    expected = -np.expm1(-rate * gaps)
    places = np.arange(len(gaps) + 1) / len(gaps)
    distance = max(np.abs(expected - places[:-1]).max(), np.abs(expected - places[1:]).max())
    assert distance < 1.63 / math.sqrt(len(gaps))  # Kolmogorov and Smirnov, at 1 %
    counts = np.bincount(planned.astype(int), minlength=int(seconds))
    assert counts.mean() == pytest.approx(rate, rel=0.01)
    assert counts.var() == pytest.approx(rate, rel=0.1)  # a constant rate would have 0
    neighbours = np.corrcoef(counts[:-1], counts[1:])[0, 1]
    assert abs(neighbours) < 3 / math.sqrt(seconds)


@given(
    arrivals=st.sampled_from(["constant", "poisson", "ramp"]),
    requests=st.integers(1, 300),
    duration=DURATIONS,
)
def test_requests_are_a_limit_too(arrivals: str, requests: int, duration: float) -> None:
    ramp = {"rate_end": 90.0} if arrivals == "ramp" else {}
    unlimited = make_scenario(arrivals=arrivals, rate=30.0, duration_s=duration, **ramp)
    limited = msgspec.structs.replace(unlimited, requests=requests)
    assert times(limited).tolist() == times(unlimited)[:requests].tolist()


@given(
    stamps=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    scale=st.floats(0.01, 100),
    duration=st.sampled_from([0.0, 1e4]),
)
def test_times_of_a_trace_are_sorted_shifted_and_scaled(
    stamps: list[float], scale: float, duration: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    file.write_text("\n".join(f'{{"timestamp": {stamp!r}}}' for stamp in stamps))
    result = times(
        make_scenario(arrivals="trace", trace=file, trace_scale=scale, duration_s=duration)
    ).tolist()
    whole = [(stamp - min(stamps)) * scale for stamp in sorted(stamps)]
    assert result == [time for time in whole if not duration or time < duration]
    assert result[0] == 0


@pytest.mark.parametrize("arrivals", ["constant", "poisson"])
def test_requests_alone_end_a_run_and_more_than_any_machine_sends_are_refused(
    arrivals: str,
) -> None:
    for requests in (1, 65_536, 65_537, 200_000):
        planned = times(make_scenario(arrivals=arrivals, duration_s=0, requests=requests))
        assert len(planned) == requests
    with pytest.raises(ConfigError, match="more than 100000000 requests"):
        times(make_scenario(arrivals=arrivals, rate=1e9, duration_s=1e9))


LENGTHS = st.one_of(
    st.integers(40, 99).map(str),
    st.builds("uniform:{},{}".format, st.integers(40, 60), st.integers(60, 200)),
    st.builds("normal:{},{},min=40".format, st.floats(1, 200), st.floats(0, 100)),
    st.builds("lognormal:{},{},min=40,max=300".format, st.floats(1, 200), st.floats(0, 3)),
    st.just("choice:40=0.5,90=0.5"),
)
PREFIXES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {
            "prefixes": st.integers(1, 5),
            "prefix_tokens": st.integers(1, 38),
            "prefix_share": st.floats(0, 1),
        }
    ),
)
SCENARIOS = st.builds(
    lambda given_settings, prefixes, tokenizer, is_chat: Scenario(
        **given_settings,
        **prefixes,
        tokenizer=ROOT / "models/demo" if tokenizer or is_chat else None,
        api="chat" if is_chat else "completions",
    ),
    st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2**64 - 1),
            "prompt_tokens": LENGTHS,
            "output_tokens": LENGTHS,
            "n": st.sampled_from(["1", "64", "choice:1=0.5,1024=0.5"]),
            "vocab_size": st.integers(1, 200_000),
            "stream": st.booleans(),
        }
    ),
    PREFIXES,
    st.booleans(),
    st.booleans(),
)
INDICES = st.lists(st.integers(0, 2**40), min_size=1, max_size=8, unique=True)


@settings(max_examples=25)
@given(scenario=SCENARIOS, indices=INDICES, more=INDICES)
def test_requests_do_not_depend_on_which_others_were_made(
    scenario: Scenario, indices: list[int], more: list[int]
) -> None:
    one, other = Workload(scenario), Workload(scenario)
    for index in more:
        other.request(index)
    made = {index: one.request(index) for index in indices}
    assert {index: other.request(index) for index in sorted(indices)} == made
    shorter = msgspec.structs.replace(scenario, requests=5, duration_s=7.0, workers=3)
    assert Workload(shorter).request(indices[0]) == made[indices[0]]


@settings(max_examples=50)
@given(scenario=SCENARIOS, indices=INDICES)
def test_bodies_say_what_is_said_of_them(scenario: Scenario, indices: list[int]) -> None:
    workload = Workload(scenario)
    for index in indices:
        asked = workload.request(index)
        body: dict[str, Any] = json.loads(asked.body)
        assert (body["n"], body["max_tokens"]) == (asked.n, asked.max_tokens)
        assert body.get("stream", False) == scenario.stream
        if scenario.api == "chat":
            length = workload.count_tokens(body["messages"][0]["content"])
        elif scenario.tokenizer:
            length = (workload.count_tokens(body["prompt"]) or 0) + 1  # the one of its beginning
        else:
            length = len(body["prompt"])
            assert 0 <= min(body["prompt"]) <= max(body["prompt"]) < scenario.vocab_size
        assert length == asked.prompt_tokens >= 40
