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

from srm.errors import ConfigError
from srm.loadtest.client.client import Client
from srm.loadtest.client.request_attempt import RequestAttempt, retry_after
from srm.loadtest.client.target import Target
from srm.loadtest.recording import ERRORS
from srm.loadtest.scenario import Scenario
from srm.loadtest.workload.workload import RequestPlan
from tests.kit.loads.raw_server import (
    DONE,
    HEAD,
    Handler,
    Peer,
    RawServer,
    answering,
    chunk,
    event,
    make_reply,
    raw_server,
    stream,
    text_event,
)

TEXT = text_event("a")
USAGE = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 2})
NOTHING = event(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 0})
EVENTS = (TEXT, text_event("b"), USAGE, DONE)
GOOD = stream(*EVENTS)
REFUSED = make_reply(b"full", 503, "retry-after: 0")


class WaitingClient:
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

    def _on_end(self, attempt: RequestAttempt, kind: str) -> None:
        self._ended[attempt.index].set_result(kind)

    def row(self, index: int) -> Any:
        rows = self.client.requests.array()
        (row,) = rows[rows["index"] == index]
        return row

    @property
    def events(self) -> Any:
        return self.client.events.array()


@asynccontextmanager
async def sending(handler: Handler, **rules: Any) -> AsyncIterator[tuple[WaitingClient, RawServer]]:
    """Afterwards nothing may be left of the client."""
    async with raw_server(handler) as server:
        client = WaitingClient(server.port, **rules)
        yield client, server
        await client.client.close()
        assert client.client.in_flight == 0
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
    async with sending(answering(reply)) as (client, _):
        assert await client.send(7) == "none"
        row, events = client.row(7), client.events
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
        (answering(make_reply(b"slow down", 429)), "rejected", 429, 0),
        (answering(make_reply(b"full", 503)), "rejected", 503, 0),
        (answering(make_reply(b"what?", 400)), "client", 400, 0),
        (answering(make_reply(b"", 404)), "client", 404, 0),
        (answering(make_reply(b"oh", 500)), "server", 500, 0),
        (answering(make_reply(b"oh", 504)), "server", 504, 0),
        (answering(make_reply(b"elsewhere", 302)), "protocol", 302, 0),
        (answering(b"220 smtp.example\r\n"), "protocol", 0, 0),
        (answering(stream(TEXT)), "protocol", 200, 1),
        (answering(stream(b"data: {\n\n", DONE)), "protocol", 200, 0),
        (answering(stream(TEXT, event(error="x"), DONE)), "protocol", 200, 1),
        (answering(make_reply(b"{}")), "protocol", 200, 0),
        (answering(make_reply(b"")), "protocol", 200, 0),
        (answering(stream(DONE)), "empty", 200, 0),
        (answering(stream(USAGE, DONE)), "empty", 200, 0),
        (answering(stream(text_event(""), NOTHING, DONE)), "empty", 200, 0),
    ],
)
async def test_each_kind_of_error_and_tokens_before_it(
    handler: Handler, kind: str, status: int, tokens: int
) -> None:
    async with sending(handler) as (client, _):
        assert await client.send(0) == kind
        row = client.row(0)
        assert (ERRORS[row["error"]], row["status"]) == (kind, status)
        assert not math.isnan(row["sent"])
        assert client.client.last_error.startswith(f"{kind}: ")
        assert client.client.reasons == {kind: client.client.last_error.removeprefix(f"{kind}: ")}
        assert len(client.events) == tokens


async def test_a_reply_whose_tokens_have_no_text_is_complete() -> None:
    async with sending(answering(stream(text_event(""), USAGE, DONE))) as (client, _):
        assert await client.send(0) == "none"


async def test_the_first_reason_of_a_kind_is_kept_in_one_line() -> None:
    async with sending(answering(make_reply(b'{\n "error": "\x1b[31mno"\n}', 400))) as (client, _):
        assert await client.send(0) == "client"
        assert client.client.reasons == {"client": '400: {  "error": " [31mno" }'}


async def test_nothing_listens() -> None:
    async with sending(silent) as (client, server):
        pass
    client = WaitingClient(server.port)
    assert await client.send(0) == "connect"
    assert math.isnan(client.row(0)["sent"])
    await client.client.close()


async def test_requests_time_out_by_their_planned_time_each_and_are_cut() -> None:
    async with sending(silent, timeout_s=60) as (client, server):
        first, *others = client.send(0, planned=-60.0), client.send(1), client.send(2)
        assert await first == "timeout"
        row = client.row(0)
        assert row["ended"] - row["planned"] >= 60
        assert math.isnan(row["first_byte"]) and math.isnan(row["queue_s"])
        assert client.client.in_flight == 2
        while server.connections < 2:
            await asyncio.sleep(0)
        client.client.cut()
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
        (answering(make_reply(b"no", 500), GOOD), ["server", "none"], 1),
        (answering(make_reply(b"no", 400, "connection: close")), ["client"] * 3, 3),
        (stale, ["none"] * 2, 2),
        (closing_after(GOOD), ["none"] * 3, 3),
        (hopeless, ["none", "disconnected"], 2),  # sent again once, and no more
    ],
    ids=["reused", "after a refusal", "closed by header", "stale", "closed while idle", "closing"],
)
async def test_connections_are_used_again_where_they_can_be(
    handler: Handler, kinds: list[str], connections: int
) -> None:
    async with sending(handler) as (client, server):
        for index, kind in enumerate(kinds):
            assert await client.send(index) == kind
            assert client.row(index)["retries"] == 0
            while connections == 3 and any(prefix.is_reusable for prefix in client.client.idle):
                await asyncio.sleep(0)
        assert server.connections == connections


async def test_as_many_connections_as_requests_at_once() -> None:
    async with sending(answering(GOOD)) as (client, server):
        for turn in range(3):
            ended = [client.send(10 * turn + index) for index in range(10)]
            assert set(await asyncio.gather(*ended)) == {"none"}
        assert server.connections == 10


async def test_a_refused_request_is_sent_again_so_often() -> None:
    async with sending(answering(REFUSED, REFUSED, GOOD, REFUSED), retries=2) as (client, _):
        assert await client.send(0, planned=-1.0) == "none"
        row = client.row(0)
        assert (row["retries"], row["status"], row["planned"]) == (2, 200, -1.0)
        assert row["num_bytes"] == sum(map(len, EVENTS))
        assert await client.send(1) == "rejected"
        assert client.row(1)["retries"] == 2


async def test_what_waits_for_its_retry_times_out_and_is_cut() -> None:
    later = answering(make_reply(b"full", 429, "retry-after: 60"))
    async with sending(later, retries=1, timeout_s=0.05) as (client, _):
        assert await client.send(0) == "timeout"
        assert client.row(0)["status"] == 429
    async with sending(later, retries=1) as (client, _):
        ended = client.send(0)
        while not client.client.idle:
            await asyncio.sleep(0)
        client.client.cut()
        assert await ended == "cut"


def test_retry_after() -> None:
    values = {b"7": 7, b"0.5": 0.5, b"-3": 0, b"": 1, b"soon": 1, b"nan": 1}
    assert {value: retry_after(value) for value in values} == values
    assert retry_after(b"Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert 1e6 <= retry_after(b"Fri, 01 Jan 2100 00:00:00 GMT") < math.inf


async def test_whole_replies_have_one_event_for_each_choice() -> None:
    body = b'{"choices": [{"index": 0, "text": "a"}, {"index": 1, "text": "b"}], "usage": '
    body += b'{"prompt_tokens": 3, "completion_tokens": 5}}'
    async with sending(answering(make_reply(body)), stream=False) as (client, _):
        assert await client.send(0) == "none"
        assert client.events[["choice", "tokens"]].tolist() == [(0, 3), (1, 2)]
        assert (client.events["time"] == client.row(0)["ended"]).all()


async def test_text_is_kept_to_be_counted_where_tokens_are_not_told() -> None:
    reported = stream(text_event("a", token_ids=[1]), DONE)
    async with sending(answering(GOOD, reported), tokenizer=Path("any")) as (client, _):
        await client.send(0)
        await client.send(1)
        assert client.client.texts == {0: ["ab"]}
        assert client.row(1)["output_tokens"] == 1


async def test_a_machine_without_files_left_is_no_error_of_the_server() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    async with sending(answering(GOOD)) as (client, _):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            ended = client.send(0)
            while not client.fatal:
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            for fd in taken:
                os.close(fd)
        (error,) = client.fatal
        assert "RLIMIT_NOFILE" in error.message
        client.client.cut()
        assert await ended == "cut"
