"""A toy server of completions whose timing is exact by construction, to hold clients against.

Token i of a request leaves `ttft_s + i × itl_s` after its service began, whatever else runs; at
most `slots` requests are in service, the others wait in the order they came. It writes down what
it really did and when, on the monotonic clock that all processes of a machine share.
Knows no model.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import time
from collections.abc import Callable
from typing import Any, Literal

from tests.kit.loads.raw_server import DONE, END, HEAD, Peer, chunk, event, make_reply
from tests.kit.loads.toy import Toy

Fault = Literal[
    "429",
    "503",  # both with Retry-After
    "500",
    "400",
    "cut",  # the connection ends after half of the tokens
    "garbage",  # events that are no JSON
    "failed",  # half of the tokens later an event says that it failed
    "silent",  # the request is read and never answered
]
TEXT = " a"
"""Of each token."""
FAILED = {"error": {"message": "as was asked for", "type": "api_error", "code": "toy"}}
PAGES: dict[str, Any] = {
    "/v1/models": {"object": "list", "data": [{"id": "toy", "object": "model"}]},
    "/health": {},
}


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    """How it behaves."""

    ttft_s: float = 0.05
    itl_s: float = 0.01
    slots: int = 10**9


@dataclasses.dataclass
class Served:
    """What really happened to one request; times of the monotonic clock, NaN: never."""

    body: dict[str, Any]
    fault: Fault | None
    arrived: float
    started: float = math.nan
    first: float = math.nan
    """When its first token was written."""
    last: float = math.nan
    tokens: int = 0
    """Written, of all samples."""
    whole: bool = False
    """The reply was written to its end."""


class ToyServer(Toy):
    """`served` is what it did, in the order in which requests came."""

    def __init__(
        self,
        config: ToyConfig | None = None,
        fault: Callable[[int], Fault | None] = lambda _number: None,
        cache: set[str] | None = None,
    ) -> None:
        """`fault` says what is wrong with the reply to the request of that number, from 0.

        The first token of a prompt in `cache`, to which all are added, takes as long as any other.
        """
        super().__init__()
        self.config = config or ToyConfig()
        self.served: list[Served] = []
        self._fault = fault
        self._cache = cache
        self._slots = asyncio.Semaphore(self.config.slots)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = Peer(reader, writer)
        while (content := await peer.request()) is not None:
            method, path, _ = peer.head.split(" ", 2)
            if method == "GET":
                await peer.send(_json(PAGES.get(path, FAILED), 200 if path in PAGES else 404))
            elif path != "/v1/completions":
                await peer.send(_json(FAILED, 404))
            elif "prompt" not in (body := json.loads(content)):
                await peer.send(_json(FAILED, 400))  # whoever asks whether there is a route
            else:
                await self._asked(peer, body)

    async def _asked(self, peer: Peer, body: dict[str, Any]) -> None:
        served = Served(body, self._fault(len(self.served)), time.monotonic())
        self.served.append(served)
        if served.fault == "silent":
            await peer.request()  # until the client gives up
        elif served.fault is not None and served.fault.isdigit():
            again = ["retry-after: 1"] if served.fault in {"429", "503"} else []
            await peer.send(_json(FAILED, int(served.fault), *again))
        else:
            async with self._slots:
                served.started = time.monotonic()
                await self._answer(peer, served)

    async def _answer(self, peer: Peer, served: Served) -> None:
        body, fault = served.body, served.fault
        count, n, streamed = body.get("max_tokens") or 16, body.get("n") or 1, body.get("stream")
        is_cached = self._cache is not None and str(body["prompt"]) in self._cache
        if self._cache is not None:
            self._cache.add(str(body["prompt"]))
        ttft_s = self.config.itl_s if is_cached else self.config.ttft_s
        if streamed:
            await peer.send(HEAD)
        for place in range(count // 2 if fault in {"cut", "failed"} else count):
            due = served.started + ttft_s + place * self.config.itl_s
            await asyncio.sleep(max(due - time.monotonic(), 0))
            served.tokens += n
            served.last = time.monotonic()
            served.first = served.last if place == 0 else served.first
            if streamed:
                part = _part(TEXT, n, "length" if place == count - 1 else None)
                await peer.send(chunk(b"data: {\n\n" if fault == "garbage" else event(**part)))
        if fault == "cut":
            peer.abort()
            return
        usage = {"usage": _usage(body, count * n)}
        if is_cached:
            cached = {"cached_tokens": usage["usage"]["prompt_tokens"]}
            usage["usage"]["prompt_tokens_details"] = cached
        if streamed:
            has_usage = (body.get("stream_options") or {}).get("include_usage")
            ends = [event(**_part("", 0), **usage)] if has_usage else []
            last = [event(**FAILED)] if fault == "failed" else [*ends, DONE]
            await peer.send(b"".join(map(chunk, last)) + END)
        else:
            await peer.send(_json(_part(TEXT * count, n, "length") | usage))
        served.whole = not fault


def _json(content: dict[str, Any], status: int = 200, *headers: str) -> bytes:
    body = json.dumps(content).encode()
    return make_reply(body, status, "content-type: application/json", *headers)


def _part(text: str, n: int, reason: str | None = None) -> dict[str, Any]:
    """An event of a stream, or a whole reply, with the same for all samples."""
    choices = [{"index": index, "text": text, "finish_reason": reason} for index in range(n)]
    about = {"id": "1", "object": "text_completion", "created": 1, "model": "toy"}
    return about | {"choices": choices}


def _usage(body: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Of a reply with so many tokens. Words of prompts that are text count as tokens."""
    prompt = body["prompt"]
    count = len(prompt.split() if isinstance(prompt, str) else prompt)
    return {"prompt_tokens": count, "completion_tokens": tokens, "total_tokens": count + tokens}
