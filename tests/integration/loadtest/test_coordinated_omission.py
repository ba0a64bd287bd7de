"""What a server does to its users is what the harness says, to the microsecond of theory.

The server stalls for a second in the midst of a run. Whoever would have come meanwhile has to wait
for what is left of it. An open loop counts them all. A closed loop has each of its streams wait
once, and sends nothing more until then: it omits those who would have come.

All of it happens in virtual time, so it is the same on any machine, however busy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.kit.loads.fault_proxy import FaultProxy
from tests.kit.loads.run_loadtest import Loaded, simulated
from tests.kit.loads.stalled import (
    RATE,
    SECONDS,
    STALL_AT,
    STALL_S,
    STREAMS,
    TOKENS,
    TOY,
    simulated_stall,
)
from tests.kit.loads.theory import queued
from tests.kit.loads.toy_server import Fault, ToyConfig, ToyServer
from tests.kit.loads.virtual import virtually

EXACT_S = 1e-6
SILENT: dict[str, Any] = {"fault": lambda _number: "silent"}


def against(toy: ToyServer, trouble: dict[str, Any] | None = None, **settings: Any) -> Loaded:
    """With trouble, behind a proxy that makes it."""

    async def running() -> Loaded:
        async with toy, FaultProxy(toy.url, **trouble or {}) as proxy:
            return await simulated(proxy.url if trouble else toy.url, **settings)

    return virtually(running())


def test_a_stall_is_in_the_percentiles_of_an_open_loop_as_theory_has_it() -> None:
    result = virtually(simulated_stall(open_loop=True))
    requests, summary = result.run.recording.requests, result.run.summary
    assert len(requests) == result.num_served == summary.planned == SECONDS * RATE
    waits = result.expected_ttft
    assert np.mean(waits > STALL_S / 2) == pytest.approx(0.1, abs=0.01)  # half a stall's arrivals
    assert result.ttft == pytest.approx(waits, abs=EXACT_S)
    assert requests["ended"] == pytest.approx(result.expected[:, -1], abs=EXACT_S)
    # Percentiles come from a histogram, whose bins are a share of the value wide.
    assert summary.ttft.p99 == pytest.approx(np.percentile(waits, 99), rel=0.01)
    assert summary.ttft.p999 == pytest.approx(np.percentile(waits, 99.9), rel=0.01)
    assert summary.ttft.mean == pytest.approx(waits.mean(), rel=0.001)
    gaps = np.diff(result.expected, axis=1)
    assert summary.gap.max == pytest.approx(gaps.max(), abs=EXACT_S)
    assert summary.itl.mean == pytest.approx(gaps.mean(), rel=0.001)


def test_a_closed_loop_has_each_of_its_streams_wait_once() -> None:
    result = virtually(simulated_stall(open_loop=False))
    requests = result.run.recording.requests
    whole = requests["ended"] - requests["planned"]
    assert len(requests) == result.num_served > STALL_AT
    assert np.sum(whole > STALL_S * 0.9) == STREAMS
    assert np.sum((whole > STALL_S * 0.3) & (whole < STALL_S * 0.9)) == 0
    assert result.ttft == pytest.approx(result.expected_ttft, abs=EXACT_S)
    assert result.run.summary.ttft.p50 == pytest.approx(TOY.ttft_s, rel=0.01)


def test_a_delay_is_in_ttft_and_not_between_tokens() -> None:
    load: dict[str, Any] = {"requests": 20, "concurrency": 2, "output_tokens": str(TOKENS)}
    without, delayed = (
        against(ToyServer(TOY), {"delay_s": delay_s}, **load).summary for delay_s in (0.0, 0.2)
    )
    for name, more in (("ttft", 0.2), ("e2e", 0.2), ("itl", 0.0)):
        grown = getattr(delayed, name).mean - getattr(without, name).mean
        assert grown == pytest.approx(more, abs=EXACT_S)


def test_a_queue_that_grows_is_what_theory_says() -> None:
    """Twice as many requests a second as the slots can serve: each waits longer than the last."""
    slots, ttft_s, itl_s = 3, 0.05, 0.01
    service_s = ttft_s + itl_s * (TOKENS - 1)
    toy = ToyServer(ToyConfig(ttft_s=ttft_s, itl_s=itl_s, slots=slots))
    load: dict[str, Any] = {"arrivals": "poisson", "rate": 2 * slots / service_s, "duration_s": 20}
    run = against(toy, **load, output_tokens=str(TOKENS))
    planned = run.recording.requests["planned"]
    expected = queued(list(planned), slots, service_s) + ttft_s
    assert len(planned) == len(toy.served) > 1_000
    assert run.first == pytest.approx(expected, abs=EXACT_S)
    assert run.summary.ttft.max == pytest.approx((expected - planned).max(), abs=EXACT_S)
    assert run.summary.ttft.max > 9


def test_errors_retries_and_tokens_are_those_of_the_server() -> None:
    kinds: dict[int, Fault] = {2: "500", 5: "400", 7: "garbage", 9: "cut", 13: "failed"}
    toy = ToyServer(TOY, fault=kinds.get)
    load: dict[str, Any] = {"arrivals": "synchronous", "output_tokens": "4"}
    run = against(toy, **load, requests=20, n="2")
    assert run.summary.errors == {"server": 1, "client": 1, "protocol": 2, "disconnected": 1}
    assert run.summary.completed == 15
    requests = run.recording.requests
    usage_output_tokens = requests["usage_output_tokens"]
    assert usage_output_tokens[usage_output_tokens >= 0].sum() == sum(
        served.tokens for served in toy.served if served.whole
    )
    assert requests["index"].tolist() == list(range(20))
    assert (requests["planned"][1:] >= requests["ended"][:-1]).all(), "one at a time"

    cut_at = frozenset({3, 11, 12})
    load = {"requests": 30, "concurrency": 3, "output_tokens": "20"}
    run = against(ToyServer(TOY), {"cut_at": cut_at}, **load)
    assert (run.summary.completed, run.summary.errors) == (27, {"disconnected": 3})


def test_requests_under_way_are_cut_after_the_grace() -> None:
    run = against(ToyServer(**SILENT), concurrency=3, duration_s=100.0, grace_s=50.0)
    assert run.summary.errors == {"cut": 3}
    assert run.recording.requests["ended"] == pytest.approx([150.0] * 3)
    assert run.recording.about.stopped_by == "duration"
