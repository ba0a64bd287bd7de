"""Too much to do, and for too long: who is refused, and what he is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.errors import Overloaded, TimedOut
from tests.conftest import MakeEngine, MakeRequest
from tests.engines.held_engine import held
from tests.engines.served_engine import Serve, collect, connected, until
from tests.integration.test_serve import HELD_FLAGS, Asked
from tests.serving import Server


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


def test_one_request_that_waits_alone_always_has_room(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine(max_waiting_bytes=1)
    engine.add(make_request("a", n=50))
    with pytest.raises(Overloaded):
        engine.add(make_request("b"))


def test_what_is_to_be_scored_alone_is_counted_and_let_go(
    make_engine: MakeEngine, make_request: MakeRequest
) -> None:
    engine = make_engine()
    engine.add(make_request("a", max_tokens=0, prompt_logprobs=1))
    assert engine.scheduler.waiting_bytes > 0
    while engine.has_work:
        engine.step()
    assert engine.scheduler.waiting_bytes == engine.scheduler.num_waiting == 0


async def test_what_takes_too_long_is_ended(
    serve: Serve, endpoint: str, make_request: MakeRequest
) -> None:
    served = serve(max_waiting=5_000, request_timeout_s=0.3)
    async with connected(endpoint, heartbeat_s=0.05) as client:
        with pytest.raises(TimedOut, match=r"0\.3 s"):
            await collect(client, make_request(n=5_000, max_tokens=60))
        assert len(await collect(client, make_request("b", max_tokens=2, durable=True))) == 1
        await until(lambda: served.engine.scheduler.num_requests == 0)
        await until(
            lambda: (
                client.status is not None and not (client.status.running or client.status.waiting)
            )
        )


def test_a_full_queue_is_a_503_that_says_when(text_model: Path) -> None:
    with Server(text_model, *HELD_FLAGS, engine_module="tests.engines.held_engine") as running:
        with held(text_model):
            asked = Asked(running, n=3_000, max_tokens=2)
            refused = running.post(n=3_000)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "overloaded"
        assert 1 <= int(refused.headers["retry-after"]) <= 120
        assert "x-should-retry" not in refused.headers
        assert asked.answer().status_code == 200


def test_a_request_that_takes_too_long_is_a_504_and_its_stream_an_error(text_model: Path) -> None:
    a_letter = {"logit_bias": {"70": 100}}  # half a character would begin no stream
    long = {"max_tokens": 120, "ignore_eos": True, **a_letter}
    flags = (*HELD_FLAGS, "--request-timeout-s=2")  # a stream must begin before
    with (
        Server(text_model, *flags, engine_module="tests.engines.held_engine") as running,
        held(text_model),
    ):
        late = running.post(**long)
        assert late.status_code == 504
        assert late.json()["error"]["code"] == "request_timeout"
        assert late.headers["x-should-retry"] == "false"
        *_, error, done, _ = running.post(stream=True, **long).text.split("\n\n")
        assert '"request_timeout"' in error
        assert done == "data: [DONE]"
        running.wait_until_idle()
