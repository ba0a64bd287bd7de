"""A server that stalls for a second in the midst of a run, and what theory says of that."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.kit.loads.fault_proxy import FaultProxy
from tests.kit.loads.run_loadtest import Loaded, simulated
from tests.kit.loads.theory import Times, received
from tests.kit.loads.toy_server import ToyConfig, ToyServer

TTFT_S, ITL_S, TOKENS = 0.0203, 0.0051, 5  # so that no two things happen at once
TOY = ToyConfig(ttft_s=TTFT_S, itl_s=ITL_S)
STALL_S, STALL_AT = 1.0, 60
RATE, STREAMS, SECONDS = 40, 4, 5.0
_COMMON = {"duration_s": SECONDS, "output_tokens": str(TOKENS), "metrics_url": "none"}
LOADS: dict[bool, dict[str, Any]] = {
    True: {"arrivals": "constant", "rate": RATE} | _COMMON,
    False: {"arrivals": "concurrent", "concurrency": STREAMS} | _COMMON,
}
"""By whether the loop is open: a constant rate, or streams that each wait for their reply."""


class Stalled(NamedTuple):
    """A run with a stall in it, and what theory expects of it, on the run's clock."""

    run: Loaded
    num_served: int
    """Requests, as the server counts them."""
    planned: Times
    ttft: Times
    """[requests], from the planned time; inf without a token."""
    expected: Times
    """[requests, tokens]: when each token is received."""
    expected_ttft: Times


async def simulated_stall(open_loop: bool) -> Stalled:
    """In virtual time; the stall begins with the same request of both loops."""
    async with (
        ToyServer(TOY) as toy,
        FaultProxy(toy.url, stall_s=STALL_S, stall_at=STALL_AT) as proxy,
    ):
        run = await simulated(proxy.url, **LOADS[open_loop])
    assert proxy.stall is not None
    planned = run.recording.requests["planned"]
    due = received(run.started + planned, TOKENS, TTFT_S, ITL_S, proxy.stall) - run.started
    return Stalled(run, len(toy.served), planned, run.first - planned, due, due[:, 0] - planned)
