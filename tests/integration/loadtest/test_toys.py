"""The toy server says what OpenAI's routes say, and is as faulty as it is told to be.

That its timing and that of the proxy are exact is held to theory in test_coordinated_omission.py.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.loads.toy_server import Fault, ToyConfig, ToyServer

_QUICK = ToyConfig(ttft_s=0.02, itl_s=0.005)
_USAGE = {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}


def ask(url: str, chat: bool = False, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "one two"}]
    prompt: dict[str, Any] = {"messages": messages} if chat else {"prompt": [5, 6, 7]}
    route = "chat/completions" if chat else "completions"
    return httpx.post(f"{url}/v1/{route}", json={"max_tokens": 4, **prompt, **fields}, timeout=120)


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_replies_whole_and_streamed() -> None:
    with ToyServer(_QUICK) as toy:
        reply, chat = ask(toy.url, n=2).json(), ask(toy.url, chat=True).json()
        options = {"include_usage": True}
        streamed = events(ask(toy.url, stream=True, stream_options=options, n=2))
        chat_streamed = events(ask(toy.url, chat=True, stream=True))
    assert [choice["text"] for choice in reply["choices"]] == [" a a a a"] * 2
    assert reply["usage"] == streamed[-1]["usage"] == _USAGE
    assert chat["choices"][0]["message"] == {"role": "assistant", "content": " a a a a"}
    assert chat["usage"]["prompt_tokens"] == 2
    assert [len(event["choices"]) for event in streamed] == [2, 2, 2, 2, 0]
    assert chat_streamed[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [one["choices"][0]["delta"].get("content") for one in chat_streamed[1:]] == [" a"] * 4
    assert [one.tokens for one in toy.served] == [8, 4, 8, 4]
    for one in toy.served:
        assert one.whole and one.first - one.started >= 0.02
        assert one.last - one.started >= 0.02 + 3 * 0.005


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
    assert [(one.fault, one.whole) for one in toy.served] == [(None, True), (fault, False)]
