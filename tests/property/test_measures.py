"""Every measure of a small random recording equals what plain loops over its rows say."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from srm.loadtest.analysis.summarize import summarize
from srm.loadtest.analysis.verdict import warnings
from srm.loadtest.quantities import DISTRIBUTIONS
from srm.loadtest.recording import CLIENT, ERRORS, EVENT, REQUEST, About, Recording
from srm.loadtest.scenario import Scenario
from srm.loadtest.summary import Distribution

NAN = math.nan
OBJECTIVES = ("ttft<0.5", "tpot<=250ms", "itl<0.3", "e2e<2")
quarters = st.integers(0, 16).map(lambda number: number / 4)
"""So coarse that ties and edges of windows are common; sums of them are exact."""
counts = st.integers(-1, 12)


@st.composite
def runs(draw: st.DrawFn) -> Recording:
    requests, events = [], []
    index = 0
    for _ in range(draw(st.integers(0, 6))):
        index += draw(st.integers(1, 3))
        planned = draw(quarters)
        sent = draw(st.sampled_from([NAN, planned, planned, planned + 0.125, planned + 1]))
        begun = planned if math.isnan(sent) else sent
        n = draw(st.integers(1, 3))
        tokens = draw(
            st.lists(st.tuples(st.integers(0, n - 1), quarters, st.integers(1, 3)), max_size=6)
        )
        if math.isnan(sent):
            tokens = []
        events += [(index, choice, begun + later, number) for choice, later, number in tokens]
        ended = max([begun, *(begun + later for _, later, _ in tokens)]) + draw(quarters)
        error = draw(st.sampled_from([0, 0, 0, *range(1, len(ERRORS))]))
        queue = draw(st.one_of(st.just(NAN), quarters))
        requests.append(
            (
                *(index, 0, planned, sent, NAN, ended, error, 200, draw(st.integers(0, 2)), n),
                *(draw(counts), 4, draw(counts), draw(counts), draw(counts), -1, queue, 0),
            )
        )
    clients = [
        (worker, time, draw(quarters) / 4, draw(quarters), 0)
        for worker in range(draw(st.integers(0, 2)))
        for time in sorted(draw(st.sets(quarters.filter(bool), max_size=4)))
    ]
    stream = draw(st.sampled_from([True, True, True, False]))
    scenario = Scenario(arrivals="poisson", stream=stream, objectives=OBJECTIVES if stream else ())
    return Recording(
        About(scenario, "", 0.0, 9.0, "duration", "", {}, []),
        np.array(requests, REQUEST),
        np.array(sorted(events, key=lambda row: row[2]), EVENT),
        np.array(clients, CLIENT),
    )


windows = st.tuples(quarters, quarters).filter(lambda window: window[0] < window[1])


def read_count(row: Any) -> int:
    return int(row["output_tokens"] if row["output_tokens"] >= 0 else row["usage_output_tokens"])


class Plain:
    """The definitions of docs/loadtest-measures.md, one row at a time."""

    def __init__(self, recording: Recording, window: tuple[float, float]) -> None:
        self.recording, self.window = recording, window
        self.is_stream = recording.about.scenario.stream
        self.seconds = window[1] - window[0]
        self.planned = [row for row in recording.requests if self.has(row["planned"])]
        self.completed = [row for row in self.planned if row["error"] == 0]

    def has(self, time: float) -> bool:
        return self.window[0] <= time < self.window[1]

    def scale(self, row: Any) -> float:
        seen = sum(e["tokens"] for e in self.recording.events if e["request"] == row["index"])
        return read_count(row) / seen if seen and read_count(row) > 0 else 1.0

    def samples(self, row: Any) -> list[list[tuple[float, int]]]:
        """Of each sample that has any: [(time, tokens)] of its chunks."""
        entries: dict[int, dict[float, int]] = {}
        for e in self.recording.events:
            if e["request"] == row["index"]:
                chunks = entries.setdefault(int(e["choice"]), {})
                chunks[float(e["time"])] = chunks.get(float(e["time"]), 0) + int(e["tokens"])
        return [sorted(chunks.items()) for chunks in entries.values()]

    def first(self, row: Any) -> float:
        return min((chunks[0][0] for chunks in self.samples(row)), default=NAN)

    def tpots(self, row: Any) -> list[float]:
        results = []
        for chunks in self.samples(row):
            tokens = sum(number for _, number in chunks) * self.scale(row)
            if len(chunks) > 1 and round(tokens) > 1:
                results.append((chunks[-1][0] - chunks[0][0]) / (tokens - 1))
        return results

    def gaps(self, row: Any) -> list[tuple[float, float, int]]:
        """(when it ended, its length, tokens that it brought) of every sample."""
        return [
            (after, after - before, number)
            for chunks in self.samples(row)
            for (before, _), (after, number) in pairwise(chunks)
        ]

    def is_good(self, row: Any) -> bool:
        gaps = self.gaps(row)
        tokens = sum(number for _, _, number in gaps) * self.scale(row)
        itl = sum(gap for _, gap, _ in gaps) / tokens if gaps else 0.0
        return bool(
            row["error"] == 0
            and self.first(row) - row["planned"] < 0.5
            and all(tpot <= 0.25 for tpot in self.tpots(row))
            and itl < 0.3
            and row["ended"] - row["planned"] < 2
        )

    def times(self) -> dict[str, list[float]]:
        gaps = [
            (gap, number, self.scale(row))
            for row in self.recording.requests
            for when, gap, number in self.gaps(row)
            if self.has(when)
        ]
        done = self.completed
        entries: dict[str, list[Any]] = {
            "ttft": [self.first(row) - row["planned"] for row in done],
            "ttft_sent": [self.first(row) - row["sent"] for row in done],
            "itl": [gap / (k * scale) for gap, k, scale in gaps for _ in range(k)],
            "gap": [gap for gap, _, _ in gaps],
            "tpot": [tpot for row in done for tpot in self.tpots(row)],
            "e2e": [row["ended"] - row["planned"] for row in done],
            "e2e_sent": [row["ended"] - row["sent"] for row in done],
            "queue": [row["queue_s"] for row in done],
            "lateness": [row["sent"] - row["planned"] for row in self.planned],
        }
        if not self.is_stream:  # whole replies have no times of tokens
            entries |= {name: [] for name in ("ttft", "ttft_sent", "itl", "gap", "tpot")}
        return {
            name: sorted(float(time) for time in times if not math.isnan(time))
            for name, times in entries.items()
        }

    def concurrency(self) -> tuple[float, int]:
        requests = [row for row in self.recording.requests if not math.isnan(row["sent"])]
        time = sum(
            max(0.0, min(row["ended"], self.window[1]) - max(row["sent"], self.window[0]))
            for row in requests
        )
        moments = [self.window[0], *(row["sent"] for row in requests if self.has(row["sent"]))]
        most = max(
            sum(bool(row["sent"] <= moment < row["ended"]) for row in requests)
            for moment in moments
        )
        return time / self.seconds, most

    def client_load(self) -> tuple[float, float]:
        """The share of the CPU that the busiest process used, and the worst lag of any."""
        shares, lags = [], []
        for worker in {int(row["worker"]) for row in self.recording.clients}:
            used = inside = before = 0.0
            for row in self.recording.clients:
                if row["worker"] == worker:
                    begin, end = max(before, self.window[0]), min(row["time"], self.window[1])
                    if end > begin:
                        used += row["cpu_s"] * (end - begin) / (row["time"] - before)
                        inside += end - begin
                        lags.append(float(row["lag_s"]))
                    before = float(row["time"])
            if inside:
                shares.append(used / inside)
        return max(shares, default=NAN), max(lags, default=NAN)


def same(value: float) -> Any:
    return pytest.approx(value, rel=1e-9, abs=1e-12, nan_ok=True)


def assert_distribution(distribution: Distribution, times: list[float]) -> None:
    """HDR's rank, and at most 0.1 % and one microsecond from the time of that rank."""
    assert distribution.count == len(times)
    if not times:
        assert all(
            math.isnan(getattr(distribution, name)) for name in distribution.__struct_fields__[1:]
        )
        return
    assert distribution.mean == same(sum(times) / len(times))
    assert distribution.std == pytest.approx(float(np.std(times)), rel=1e-6, abs=1e-9)
    assert (distribution.min, distribution.max) == (same(times[0]), same(times[-1]))
    shares = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "p999": 0.999}
    for name, share in shares.items():
        rank = max(1, math.floor(share * len(times) + 0.5 + 1e-9))
        assert getattr(distribution, name) == pytest.approx(times[rank - 1], rel=1e-3, abs=1e-6)


@settings(max_examples=100)
@given(recording=runs(), window=windows)
def test_every_measure_equals_plain_loops(
    recording: Recording, window: tuple[float, float]
) -> None:
    result = summarize(recording, window=window)
    plain = Plain(recording, window)
    requests, planned, completed = recording.requests, plain.planned, plain.completed
    event(f"{len(planned)} of {len(requests)} in the window")

    for name, times in plain.times().items():
        assert_distribution(getattr(result, name), times)
    assert set(plain.times()) == set(DISTRIBUTIONS)

    assert result.planned == len(planned)
    assert result.completed == len(completed)
    errors = [ERRORS[row["error"]] for row in planned if row["error"]]
    assert result.errors == {kind: errors.count(kind) for kind in errors}
    assert result.retried == sum(bool(row["retries"] > 0) for row in planned)
    rejected = errors.count("rejected")
    assert result.rejected_share == same(rejected / len(planned) if planned else NAN)
    whole = [row for row in requests if row["error"] == 0 and plain.has(row["ended"])]
    assert result.planned_per_s == same(len(planned) / plain.seconds)
    assert result.completed_per_s == same(len(whole) / plain.seconds)
    by_index = {int(row["index"]): row for row in requests}
    received = [e for e in recording.events if plain.has(e["time"])]
    tokens = sum(e["tokens"] * plain.scale(by_index[int(e["request"])]) for e in received)
    assert result.output_tokens_per_s == same(tokens / plain.seconds)
    prompts = 0.0
    for row in requests:
        if plain.has(plain.first(row)):
            known = [row["prompt_tokens"], row["usage_prompt_tokens"]]
            prompts += next((number for number in known if number >= 0), NAN)
    assert result.prompt_tokens_per_s == same(prompts / plain.seconds)
    good = sum(plain.is_good(row) for row in planned) if plain.is_stream else NAN
    assert result.good_per_s == same(good / plain.seconds)
    assert result.good_share == same(good / len(planned) if planned else NAN)
    concurrency, most = plain.concurrency()
    assert (result.concurrency, result.concurrency_max) == (same(concurrency), most)

    both = [row for row in planned if row["output_tokens"] >= 0 and row["usage_output_tokens"] >= 0]
    assert result.checked == len(both)
    assert result.miscounted == sum(
        bool(row["output_tokens"] != row["usage_output_tokens"]) for row in both
    )
    assert result.counted_output_tokens == sum(row["output_tokens"] for row in both)
    assert result.usage_output_tokens == sum(row["usage_output_tokens"] for row in both)
    assert (result.cpu_share, result.lag_max_s) == tuple(map(same, plain.client_load()))
    warnings(result, recording)  # whatever it says, it can
