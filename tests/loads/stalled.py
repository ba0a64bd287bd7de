"""A server that stalls for a second in the midst of a run, and what theory says of that."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tests.loads.fault_proxy import FaultProxy
from tests.loads.run_loadtest import Loaded, loaded, simulated
from tests.loads.theory import Times, received
from tests.loads.toy_server import ToyConfig, ToyServer

TTFT_S, ITL_S, TOKENS = 0.0203, 0.0051, 5  # so that no two things happen at once
TOY = ToyConfig(ttft_s=TTFT_S, itl_s=ITL_S)
STALL_S, STALL_AT = 1.0, 60
RATE, STREAMS, SECONDS = 40, 4, 5.0


class Stalled(NamedTuple):
    """A run with a stall in it."""

    run: Loaded
    num_served: int
    """Requests, as the server counts them."""
    expected: Times
    """[requests, tokens]: when each token is received in theory, on the run's clock."""

    @property
    def planned(self) -> Times:
        return np.asarray(self.run.recording.requests["planned"], np.float64)

    @property
    def ttft(self) -> Times:
        """[requests], from the planned time; inf without a token."""
        events = self.run.recording.events
        firsts = np.full(len(self.planned), np.inf)
        np.minimum.at(firsts, events["request"], events["time"])
        return firsts - self.planned

    @property
    def expected_ttft(self) -> Times:
        """[requests]."""
        return self.expected[:, 0] - self.planned


def stalled(open_loop: bool) -> Stalled:
    """A constant rate, or streams that each wait for their reply: the same server, the same stall.

    The stall begins with the same request of both.
    """
    with ToyServer(TOY) as toy, FaultProxy(toy.url, stall_s=STALL_S, stall_at=STALL_AT) as proxy:
        run = loaded(proxy.url, **_load(open_loop))
    return _found(run, toy, proxy)


async def simulated_stall(open_loop: bool) -> Stalled:
    """The same in virtual time."""
    async with (
        ToyServer(TOY) as toy,
        FaultProxy(toy.url, stall_s=STALL_S, stall_at=STALL_AT) as proxy,
    ):
        run = await simulated(proxy.url, **_load(open_loop))
    return _found(run, toy, proxy)


def _load(open_loop: bool) -> dict[str, Any]:
    how: dict[str, Any] = (
        {"arrivals": "constant", "rate": RATE}
        if open_loop
        else {"arrivals": "concurrent", "concurrency": STREAMS}
    )
    common = {"duration_s": SECONDS, "output_tokens": str(TOKENS), "metrics_url": "none"}
    return how | common


def _found(run: Loaded, toy: ToyServer, proxy: FaultProxy) -> Stalled:
    assert proxy.stall is not None
    planned = run.started + run.recording.requests["planned"]
    due = received(planned, TOKENS, TTFT_S, ITL_S, proxy.stall) - run.started
    return Stalled(run, len(toy.served), due)
