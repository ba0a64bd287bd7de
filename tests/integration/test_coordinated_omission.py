"""What a server does to its users is what the harness says, held against theory.

The server stalls for a second in the midst of a run. Whoever would have come meanwhile has to wait
for what is left of it. An open loop counts them all. A closed loop has each of its streams wait
once, and sends nothing more until then: it omits those who would have come.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.fault_proxy import FaultProxy
from tests.loaded import loaded
from tests.stalled import RATE, SECONDS, STALL_AT, STALL_S, STREAMS, TOKENS, TOY, stalled
from tests.theory import Times, queued
from tests.toy_server import Fault, ToyConfig, ToyServer

_SLACK_S = 0.15
"""How late a busy machine may make a reply. The effects that are looked for are a second."""


def close(measured: Times, expected: Times) -> None:
    """Two distributions agree: at the percentiles of reports, and in the share above any time."""
    for percent in (50, 90, 95, 99, 99.9):
        found = np.percentile(measured, percent)
        assert found == pytest.approx(np.percentile(expected, percent), abs=_SLACK_S), percent
    for above in np.arange(0.2, 1.2, 0.1):
        least = np.mean(expected > above)
        most = np.mean(expected > above - _SLACK_S)
        assert least - 0.01 <= np.mean(measured > above) <= most + 0.01, above


def test_a_stall_is_in_the_percentiles_of_an_open_loop_as_theory_has_it(tmp_path: Path) -> None:
    found = stalled(tmp_path, open_loop=True)
    requests, summary = found.run.recording.requests, found.run.summary
    assert len(requests) == found.num_served == summary.planned == SECONDS * RATE
    waits = found.expected_ttft
    assert np.mean(waits > STALL_S / 2) == pytest.approx(0.1, abs=0.01)  # half a stall's arrivals
    close(found.ttft, waits)
    close(requests["ended"] - requests["planned"], found.expected[:, -1] - found.planned)
    assert summary.ttft.p99 == pytest.approx(np.percentile(waits, 99), abs=_SLACK_S)
    assert summary.ttft.p999 == pytest.approx(np.percentile(waits, 99.9), abs=_SLACK_S)
    assert summary.ttft.mean == pytest.approx(waits.mean(), abs=0.05)
    gaps = np.diff(found.expected, axis=1)
    assert summary.itl.max == pytest.approx(gaps.max(), abs=_SLACK_S)
    assert summary.itl.mean == pytest.approx(gaps.mean(), abs=0.005)


def test_a_closed_loop_has_each_of_its_streams_wait_once(tmp_path: Path) -> None:
    found = stalled(tmp_path, open_loop=False)
    requests = found.run.recording.requests
    whole = requests["ended"] - requests["planned"]
    assert len(requests) == found.num_served > STALL_AT
    assert np.sum(whole > STALL_S * 0.9) == STREAMS
    assert np.sum((whole > STALL_S * 0.3) & (whole < STALL_S * 0.9)) == 0
    assert found.run.summary.ttft.p50 < _SLACK_S


def test_a_delay_is_in_ttft_and_not_between_tokens(tmp_path: Path) -> None:
    runs = []
    for delay_s in (0.0, 0.2):
        with ToyServer(TOY) as toy, FaultProxy(toy.url, delay_s=delay_s) as proxy:
            run = loaded(
                tmp_path / f"{delay_s}",
                proxy.url,
                arrivals="concurrent",
                concurrency=2,
                requests=20,
                output_tokens=TOKENS,
            )
        runs.append(run.summary)
    without, delayed = runs
    assert delayed.ttft.p50 - without.ttft.p50 == pytest.approx(0.2, abs=0.05)
    assert delayed.e2e.p50 - without.e2e.p50 == pytest.approx(0.2, abs=0.05)
    assert delayed.itl.p50 - without.itl.p50 == pytest.approx(0, abs=0.004)


def test_cuts_are_counted_as_such(tmp_path: Path) -> None:
    cut_at = frozenset({3, 11, 12})
    with ToyServer(TOY) as toy, FaultProxy(toy.url, cut_at=cut_at) as proxy:
        run = loaded(
            tmp_path, proxy.url, arrivals="concurrent", concurrency=3, requests=30, output_tokens=20
        )
    assert proxy.cuts == len(cut_at)
    assert run.summary.errors == {"disconnected": len(cut_at)}
    assert run.summary.completed == 30 - len(cut_at)


def test_a_queue_that_grows_is_what_theory_says(tmp_path: Path) -> None:
    """Twice as many requests a second as the slots can serve: each waits longer than the last."""
    slots, ttft_s, itl_s = 3, 0.05, 0.01
    service_s = ttft_s + itl_s * (TOKENS - 1)
    with ToyServer(ToyConfig(ttft_s=ttft_s, itl_s=itl_s, slots=slots)) as toy:
        run = loaded(
            tmp_path,
            toy.url,
            arrivals="poisson",
            rate=2 * slots / service_s,
            duration_s=2,
            output_tokens=TOKENS,
        )
    requests = run.recording.requests
    events = run.recording.events
    firsts = np.full(len(requests), np.inf)
    np.minimum.at(firsts, events["request"], events["time"])
    expected = queued(list(requests["planned"]), slots, service_s) + ttft_s
    waits = expected - requests["planned"]
    assert len(requests) == len(toy.served) > 100
    assert firsts - requests["planned"] == pytest.approx(waits, rel=0.25, abs=_SLACK_S)
    assert run.summary.ttft.max == pytest.approx(waits.max(), rel=0.25)
    assert waits.max() > 1


def test_errors_retries_and_tokens_are_those_of_the_server(tmp_path: Path) -> None:
    kinds: dict[int, Fault] = {2: "500", 5: "400", 7: "garbage", 9: "cut", 13: "failed"}
    with ToyServer(TOY, fault=kinds.get) as toy:
        run = loaded(
            tmp_path / "a", toy.url, arrivals="synchronous", requests=20, output_tokens=4, n="2"
        )
    errors = {"server": 1, "client": 1, "protocol": 2, "disconnected": 1}
    assert run.summary.errors == errors
    assert run.summary.completed == 15
    assert run.summary.usage_output_tokens == sum(one.tokens for one in toy.served if one.whole)
    refused: dict[int, Fault] = {0: "429", 1: "503", 4: "429"}
    with ToyServer(TOY, fault=refused.get) as toy:
        run = loaded(
            tmp_path / "b", toy.url, arrivals="synchronous", requests=6, output_tokens=4, retries=2
        )
    assert run.summary.errors == {}
    assert run.summary.retried == 2
    assert list(run.recording.requests["retries"]) == [2, 0, 1, 0, 0, 0]
    assert len(toy.served) == 9
