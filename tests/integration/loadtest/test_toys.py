"""The toy server and the fault proxy do what they say; the proof of the harness rests on it."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from typing import Any

import httpx
import pytest

from tests.loads.fault_proxy import FaultProxy
from tests.loads.toy_server import Fault, ToyConfig, ToyServer

_QUICK = ToyConfig(ttft_s=0.02, itl_s=0.005)


def ask(url: str, route: str = "completions", **fields: Any) -> httpx.Response:
    prompt: dict[str, Any] = (
        {"messages": [{"role": "user", "content": "one two"}]}
        if route == "chat/completions"
        else {"prompt": [5, 6, 7]}
    )
    body = {"model": "toy", "max_tokens": 4, **prompt, **fields}
    return httpx.post(f"{url}/v1/{route}", json=body, timeout=120)


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_whole_replies() -> None:
    with ToyServer(_QUICK) as toy:
        reply = ask(toy.url, n=2).json()
        chat = ask(toy.url, "chat/completions").json()
    assert [choice["text"] for choice in reply["choices"]] == [" a a a a"] * 2
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": " a a a a"}
    assert chat["usage"]["prompt_tokens"] == 2
    assert [one.tokens for one in toy.served] == [8, 4]


def test_streams_and_when_tokens_left() -> None:
    with ToyServer(_QUICK) as toy:
        options = {"include_usage": True}
        reply = events(ask(toy.url, stream=True, stream_options=options, n=2))
        chat = events(ask(toy.url, "chat/completions", stream=True))
    assert [len(event["choices"]) for event in reply] == [2, 2, 2, 2, 0]
    assert reply[-1]["usage"]["completion_tokens"] == 8
    assert chat[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["choices"][0]["delta"].get("content") for event in chat[1:]] == [" a"] * 4
    for one in toy.served:
        assert one.whole
        assert one.first - one.started >= 0.02
        assert one.last - one.started >= 0.02 + 3 * 0.005


def test_slots_are_given_in_the_order_of_arrival() -> None:
    with ToyServer(ToyConfig(ttft_s=0.02, itl_s=0.01, slots=2)) as toy:
        threads = [threading.Thread(target=ask, args=(toy.url,)) for _ in range(6)]
        for number, thread in enumerate(threads):
            thread.start()
            while len(toy.served) <= number:
                time.sleep(0.001)
        assert "vllm:num_requests_waiting" in httpx.get(f"{toy.url}/metrics").text
        for thread in threads:
            thread.join()
        done = toy.served
    assert all(one.started <= later.started for one, later in pairwise(done))
    for one in done:
        in_service = [other for other in done if other.started <= one.started < other.last]
        assert len(in_service) <= 2


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("fault", ["429", "503", "500", "400", "cut", "garbage", "failed"])
def test_faults(fault: Fault, streamed: bool) -> None:
    with ToyServer(_QUICK, fault=lambda number: fault if number == 1 else None) as toy:
        assert ask(toy.url, stream=streamed).status_code == 200
        if fault == "cut":
            with pytest.raises(httpx.TransportError):
                ask(toy.url, stream=streamed)
        else:
            reply = ask(toy.url, stream=streamed)
            assert reply.status_code == (int(fault) if fault.isdigit() else 200)
            assert (reply.headers.get("retry-after") == "1") == (fault in ("429", "503"))
            with pytest.raises((ValueError, KeyError, AssertionError)):
                found = events(reply) if streamed else [reply.json()]
                assert [event["choices"] for event in found]
        assert [one.fault for one in toy.served] == [None, fault]
        assert [one.whole for one in toy.served] == [True, False]


def test_a_silent_server_and_a_client_that_gives_up() -> None:
    with ToyServer(_QUICK, fault=lambda _number: "silent") as toy, pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{toy.url}/v1/completions", json={"prompt": "a"}, timeout=0.2)


def test_the_proxy_delays_stalls_and_cuts() -> None:
    with (
        ToyServer(_QUICK) as toy,
        FaultProxy(
            toy.url,
            delay_s=0.05,
            stall_s=0.3,
            stall_at=2,
            cut_at=frozenset({3}),
            cut_after_bytes=200,
        ) as proxy,
    ):
        times = [time.monotonic()]
        for _ in range(2):
            assert ask(proxy.url, stream=True).status_code == 200
            times.append(time.monotonic())
        with pytest.raises(httpx.RemoteProtocolError):
            ask(proxy.url, stream=True)
        assert ask(proxy.url, stream=True).status_code == 200
    assert toy.served[0].arrived - times[0] >= 0.05
    assert proxy.stall is not None
    assert times[1] <= proxy.stall.begin <= proxy.stall.end - 0.3
    assert toy.served[1].arrived >= proxy.stall.end
    assert (proxy.requests, proxy.cuts) == (4, 1)
