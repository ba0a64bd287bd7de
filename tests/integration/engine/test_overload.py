"""Too much to do, and for too long: who is refused, and what he is told."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from srm.engine.constraints.grammars import Grammars
from srm.errors import InvalidRequest, Overloaded, TimedOut
from tests.conftest import MakeEngine, MakeRequest
from tests.kit.engines.served_app import Visit, application
from tests.kit.engines.served_engine import Serve, collect, connected, until
from tests.kit.processes.held_engine import HeldEngine, held


def test_waiting_requests_are_bounded_in_bytes(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(num_slots=2, max_waiting_bytes=20_000)
    with pytest.raises(Overloaded, match="20000 bytes"):
        for number in range(100):
            engine.add(make_request(str(number), max_tokens=3))
    accepted = engine.scheduler.num_requests
    assert 2 <= accepted < 12
    assert 0 < engine.scheduler.waiting_bytes <= 20_000
    for number in range(accepted):
        engine.abort(str(number))
    assert engine.scheduler.waiting_bytes == 0
    engine.add(make_request("again", n=5, max_tokens=3))
    while engine.has_work:
        engine.step()
    assert engine.scheduler.waiting_bytes == 0

    engine.add(make_request("scored", max_tokens=0, prompt_logprobs=1))
    assert engine.scheduler.waiting_bytes > 0
    while engine.has_work:
        engine.step()
    assert engine.scheduler.waiting_bytes == engine.scheduler.num_waiting == 0


def test_one_request_that_waits_alone_always_has_room(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(max_waiting_bytes=1)
    engine.add(make_request("a", n=50))
    with pytest.raises(Overloaded):
        engine.add(make_request("b"))


async def test_what_takes_too_long_is_ended(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve(max_waiting=5_000, request_timeout_s=0.3)
    async with connected(endpoint, heartbeat_s=0.05) as client:
        with pytest.raises(TimedOut, match=r"0\.3 s"):
            await collect(client, make_request(n=5_000, max_tokens=60))
        assert len(await collect(client, make_request("b", max_tokens=2, durable=True))) == 1
        await until(lambda: served.engine.scheduler.num_requests == 0)


async def test_the_time_of_a_request_counts_while_its_constraint_is_compiled(
    serve: Serve, endpoint: str, make_request: MakeRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def hang(*_: object) -> None:
        goes_on.wait()
        raise InvalidRequest("it hung", "constraint")

    monkeypatch.setattr(Grammars, "build", hang)
    served = serve(request_timeout_s=0.3)
    async with connected(endpoint, heartbeat_s=0.05) as client:
        with pytest.raises(TimedOut, match=r"0\.3 s"):
            await collect(client, make_request("a", constraint="{}"))
        late = asyncio.ensure_future(
            collect(client, make_request("b", constraint="{}", durable=True))
        )
        assert len(await collect(client, make_request("c", max_tokens=2))) == 1
        goes_on.set()
        with pytest.raises(InvalidRequest, match="it hung"):
            await late
    assert not served.engine.scheduler.num_requests


async def test_a_request_that_takes_too_long_is_a_504_and_its_stream_an_error(
    serve: Serve, endpoint: str, tiny_folder: Path
) -> None:
    body = {"prompt": [5], "max_tokens": 60}
    # A stream must begin before it is over.
    served = serve(make_engine=HeldEngine, model=tiny_folder, request_timeout_s=2)
    async with application(endpoint, tiny_folder) as (app, _):
        with held(tiny_folder):
            late = Visit(app, body, [])
            status, error = await late.reply()
            assert status == 504 and b'"request_timeout"' in error
            assert (b"x-should-retry", b"false") in late.sent[0]["headers"]
            status, events = await Visit(app, body | {"stream": True}, []).reply()
            *_, last, done, rest = events.split(b"\n\n")
            assert status == 200 and b'"request_timeout"' in last
            assert (done, rest) == (b"data: [DONE]", b"")
        await until(lambda: not served.engine.scheduler.num_requests)
