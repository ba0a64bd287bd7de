from __future__ import annotations

import asyncio
import contextlib
import math
import os
import resource
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from loadtest.client.client import Client
from loadtest.client.request_attempt import RequestAttempt, retry_after
from loadtest.client.target import Target
from loadtest.recording import ERRORS
from loadtest.scenario import Scenario
from loadtest.workload.workload import RequestPlan
from tests.loads.raw_server import (
    DONE,
    HEAD,
    Handler,
    Peer,
    RawServer,
    answering,
    chunk,
    event,
    raw_server,
    stream,
    text_event,
    whole,
)

TEXT = text_event("a")
USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2})
EVENTS = (TEXT, text_event("b"), USAGE, DONE)
GOOD = stream(*EVENTS)
REFUSED = whole(b"full", 503, "retry-after: 0")


class Sender:
    """A client whose requests can be waited for."""

    def __init__(self, port: int, **settings: Any) -> None:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: "
        target = Target("127.0.0.1", port, "", head, "m", "")
        self._ended: dict[int, asyncio.Future[str]] = {}
        self.fatal: list[ConfigError] = []
        self.started = time.monotonic()
        scenario = Scenario(**{"timeout_s": 30.0} | settings)
        self.client = Client(target, scenario, 0, self.started, self._on_end, self.fatal.append)

    def send(self, index: int, planned: float | None = None) -> Awaitable[str]:
        """Its kind of error, when it has ended."""
        self._ended[index] = asyncio.get_running_loop().create_future()
        now = time.monotonic() - self.started
        asked = RequestPlan(b"{}", 1, 3, 4)
        self.client.send(index, now if planned is None else planned, asked)
        return self._ended[index]

    def _on_end(self, exchange: RequestAttempt, kind: str) -> None:
        self._ended[exchange.index].set_result(kind)

    def row(self, index: int) -> Any:
        rows = self.client.requests.array()
        (row,) = rows[rows["index"] == index]
        return row

    @property
    def events(self) -> Any:
        return self.client.events.array()


@asynccontextmanager
async def sending(handler: Handler, **rules: Any) -> AsyncIterator[tuple[Sender, RawServer]]:
    """Afterwards nothing may be left of the client."""
    async with raw_server(handler) as server:
        sender = Sender(server.port, **rules)
        yield sender, server
        await sender.client.close()
        assert sender.client.in_flight == 0
        async with asyncio.timeout(120):
            while server.open:
                await asyncio.sleep(0.01)


def closing_after(data: bytes) -> Handler:
    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(data)
        peer.close()

    return handle


async def silent(peer: Peer) -> None:
    while await peer.request() is not None:
        pass


async def test_a_good_reply_is_recorded() -> None:
    reply = GOOD.replace(b"\r\n", b"\r\nX-Queue-Time: 250\r\n", 1)
    async with sending(answering(reply)) as (sender, _):
        assert await sender.send(7) == "none"
        row, events = sender.row(7), sender.events
    assert (row["status"], row["n"], row["prompt_tokens"], row["max_tokens"]) == (200, 1, 3, 4)
    assert (row["usage_prompt_tokens"], row["usage_output_tokens"]) == (3, 2)
    assert row["output_tokens"] == -1  # events did not say
    assert row["planned"] <= row["sent"] <= row["first_byte"] <= row["ended"]
    assert row["num_bytes"] == sum(map(len, EVENTS))
    assert row["queue_s"] == 0.25
    assert events["request"].tolist() == [7, 7]
    assert events["tokens"].tolist() == [1, 1]
    assert row["first_byte"] <= events["time"][0] <= events["time"][1] <= row["ended"]


@pytest.mark.parametrize(
    ("handler", "kind", "status", "tokens"),
    [
        (closing_after(b""), "disconnected", 0, 0),
        (closing_after(HEAD + chunk(TEXT)), "disconnected", 200, 1),
        (answering(whole(b"slow down", 429)), "rejected", 429, 0),
        (answering(whole(b"full", 503)), "rejected", 503, 0),
        (answering(whole(b"what?", 400)), "client", 400, 0),
        (answering(whole(b"", 404)), "client", 404, 0),
        (answering(whole(b"oh", 500)), "server", 500, 0),
        (answering(whole(b"oh", 504)), "server", 504, 0),
        (answering(whole(b"elsewhere", 302)), "protocol", 302, 0),
        (answering(b"220 smtp.example\r\n"), "protocol", 0, 0),
        (answering(stream(TEXT)), "protocol", 200, 1),
        (answering(stream(b"data: {\n\n", DONE)), "protocol", 200, 0),
        (answering(stream(TEXT, event(error="x"), DONE)), "protocol", 200, 1),
        (answering(whole(b"{}")), "protocol", 200, 0),
        (answering(whole(b"")), "protocol", 200, 0),
    ],
)
async def test_each_kind_of_error_and_tokens_before_it(
    handler: Handler, kind: str, status: int, tokens: int
) -> None:
    async with sending(handler) as (sender, _):
        assert await sender.send(0) == kind
        row = sender.row(0)
        assert (ERRORS[row["error"]], row["status"]) == (kind, status)
        assert not math.isnan(row["sent"])
        assert sender.client.last_error.startswith(f"{kind}: ")
        assert len(sender.events) == tokens


async def test_nothing_listens() -> None:
    async with sending(silent) as (sender, server):
        pass
    sender = Sender(server.port)
    assert await sender.send(0) == "connect"
    assert math.isnan(sender.row(0)["sent"])
    await sender.client.close()


async def test_requests_time_out_by_their_planned_time_each_and_are_cut() -> None:
    async with sending(silent, timeout_s=60) as (sender, server):
        first, *others = sender.send(0, planned=-60.0), sender.send(1), sender.send(2)
        assert await first == "timeout"
        row = sender.row(0)
        assert row["ended"] - row["planned"] >= 60
        assert math.isnan(row["first_byte"]) and math.isnan(row["queue_s"])
        assert sender.client.in_flight == 2
        while server.connections < 2:
            await asyncio.sleep(0)
        sender.client.cut()
        assert await asyncio.gather(*others) == ["cut"] * 2


async def stale(peer: Peer) -> None:
    """Answers one request, and closes when it has read another."""
    await peer.request()
    await peer.send(GOOD)
    await peer.request()
    peer.close()


async def hopeless(peer: Peer) -> None:
    """Does so on its first connection; any other it closes when it has read a request."""
    if peer.number == 0:
        await stale(peer)
    await peer.request()
    peer.close()


@pytest.mark.parametrize(
    ("handler", "kinds", "connections"),
    [
        (answering(GOOD), ["none"] * 20, 1),
        (answering(whole(b"no", 500), GOOD), ["server", "none"], 1),
        (answering(whole(b"no", 400, "connection: close")), ["client"] * 3, 3),
        (stale, ["none"] * 2, 2),
        (closing_after(GOOD), ["none"] * 3, 3),
        (hopeless, ["none", "disconnected"], 2),  # sent again once, and no more
    ],
    ids=["reused", "after a refusal", "closed by header", "stale", "closed while idle", "closing"],
)
async def test_connections_are_used_again_where_they_can_be(
    handler: Handler, kinds: list[str], connections: int
) -> None:
    async with sending(handler) as (sender, server):
        for index, kind in enumerate(kinds):
            assert await sender.send(index) == kind
            assert sender.row(index)["retries"] == 0
            while connections == 3 and any(one.is_reusable for one in sender.client._idle):
                await asyncio.sleep(0)
        assert server.connections == connections


async def test_as_many_connections_as_requests_at_once() -> None:
    async with sending(answering(GOOD)) as (sender, server):
        for turn in range(3):
            ended = [sender.send(10 * turn + index) for index in range(10)]
            assert set(await asyncio.gather(*ended)) == {"none"}
        assert server.connections == 10


async def test_a_refused_request_is_sent_again_so_often() -> None:
    async with sending(answering(REFUSED, REFUSED, GOOD, REFUSED), retries=2) as (sender, _):
        assert await sender.send(0, planned=-1.0) == "none"
        row = sender.row(0)
        assert (row["retries"], row["status"], row["planned"]) == (2, 200, -1.0)
        assert row["num_bytes"] == sum(map(len, EVENTS))
        assert await sender.send(1) == "rejected"
        assert sender.row(1)["retries"] == 2


async def test_what_waits_for_its_retry_times_out_and_is_cut() -> None:
    later = answering(whole(b"full", 429, "retry-after: 60"))
    async with sending(later, retries=1, timeout_s=0.05) as (sender, _):
        assert await sender.send(0) == "timeout"
        assert sender.row(0)["status"] == 429
    async with sending(later, retries=1) as (sender, _):
        ended = sender.send(0)
        while not sender.client._idle:
            await asyncio.sleep(0)
        sender.client.cut()
        assert await ended == "cut"


@pytest.mark.parametrize(
    ("value", "low", "high"),
    [
        (b"7", 7, 7),
        (b"0.5", 0.5, 0.5),
        (b"-3", 0, 0),
        (b"", 1, 1),
        (b"soon", 1, 1),
        (b"nan", 1, 1),
        (b"Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
        (b"Fri, 01 Jan 2100 00:00:00 GMT", 1e6, math.inf),
    ],
)
def test_retry_after(value: bytes, low: float, high: float) -> None:
    assert low <= retry_after(value) <= high


async def test_whole_replies_have_one_event_for_each_choice() -> None:
    body = b'{"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}], "usage": '
    body += b'{"prompt_tokens": 3, "completion_tokens": 5}}'
    async with sending(answering(whole(body)), stream=False) as (sender, _):
        assert await sender.send(0) == "none"
        assert sender.events[["choice", "tokens"]].tolist() == [(0, 3), (1, 2)]
        assert (sender.events["time"] == sender.row(0)["ended"]).all()


async def test_text_is_kept_to_be_counted_where_tokens_are_not_told() -> None:
    told = stream(text_event("a", token_ids=[1]), DONE)
    async with sending(answering(GOOD, told), tokenizer=Path("any")) as (sender, _):
        await sender.send(0)
        await sender.send(1)
        assert sender.client.texts == {0: ["ab"]}
        assert sender.row(1)["output_tokens"] == 1


async def test_a_machine_without_files_left_is_no_error_of_the_server() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    async with sending(answering(GOOD)) as (sender, _):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            ended = sender.send(0)
            while not sender.fatal:
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in taken:
                os.close(fd)
        (error,) = sender.fatal
        assert "RLIMIT_NOFILE" in error.message
        sender.client.cut()
        assert await ended == "cut"
