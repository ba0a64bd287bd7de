"""A server that stalls for a second in the midst of a run, and what theory says of that."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.fault_proxy import FaultProxy
from tests.loaded import Loaded, loaded
from tests.theory import Times, received
from tests.toy_server import ToyConfig, ToyServer

TTFT_S, ITL_S, TOKENS = 0.02, 0.005, 5
TOY = ToyConfig(ttft_s=TTFT_S, itl_s=ITL_S)
STALL_S, STALL_AT = 1.0, 150
RATE, STREAMS, SECONDS = 100, 4, 5.0


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


def stalled(folder: Path, open_loop: bool) -> Stalled:
    """A constant rate, or streams that each wait for their reply: the same server, the same stall.

    The stall begins with the same request of both.
    """
    how: dict[str, object] = (
        {"arrivals": "constant", "rate": RATE}
        if open_loop
        else {"arrivals": "concurrent", "concurrency": STREAMS}
    )
    with ToyServer(TOY) as toy, FaultProxy(toy.url, stall_s=STALL_S, stall_at=STALL_AT) as proxy:
        run = loaded(
            folder,
            proxy.url,
            **how,
            duration_s=SECONDS,
            output_tokens=TOKENS,
            metrics_url="none",
        )
    assert proxy.stall is not None
    planned = run.monotonic(0.0) + run.recording.requests["planned"]
    due = received(planned, TOKENS, TTFT_S, ITL_S, proxy.stall) - run.monotonic(0.0)
    return Stalled(run, len(toy.served), due)
