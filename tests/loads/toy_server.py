"""A toy server in OpenAI's style whose timing is exact by construction, to hold clients against.

Token i of a request leaves `ttft_s + i × itl_s` after its service began, whatever else runs; at
most `slots` requests are in service, the others wait in the order they came. It writes down what
it really did and when, on the monotonic clock that all processes of a machine share.
Knows no model.

By hand: `python -m tests.loads.toy_server --port 8123 --ttft-s 0.05 --itl-s 0.01 --slots 16`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Literal

from tests.loads import toy_http as wire
from tests.loads.toy import Toy

Fault = Literal[
    "429",
    "503",  # both with Retry-After
    "500",
    "400",
    "cut",  # the connection ends after half of the tokens, with no reply at all where not streamed
    "garbage",  # an event, or a whole body, that is no JSON
    "failed",  # 200, but half of the tokens later an event, or the body, says that it failed
    "silent",  # the request is read and never answered
]


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    """How it behaves."""

    ttft_s: float = 0.05
    itl_s: float = 0.01
    slots: int = 10**9
    retry_after_s: int = 1
    text: str = " a"
    """Of each token."""


@dataclasses.dataclass
class Served:
    """What really happened to one request; times of the monotonic clock, NaN: never."""

    number: int
    """From 0, in the order they came."""
    body: dict[str, Any]
    headers: dict[str, str]
    arrived: float
    started: float = float("nan")
    first: float = float("nan")
    """When its first token was written."""
    last: float = float("nan")
    tokens: int = 0
    """Written, of all samples."""
    fault: Fault | None = None
    whole: bool = False
    """The reply was written to its end."""


class ToyServer(Toy):
    """`served` is what it did."""

    def __init__(
        self,
        config: ToyConfig | None = None,
        fault: Callable[[int], Fault | None] = lambda _number: None,
        port: int = 0,
    ) -> None:
        """`fault` says what is wrong with the reply to the request of that number."""
        super().__init__(port)
        self.config = config or ToyConfig()
        self.served: list[Served] = []
        self.connections = 0
        """Opened so far."""
        self._fault = fault
        self._slots = asyncio.Semaphore(self.config.slots)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        while await self._request(reader, writer):
            pass

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection may be used again."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _version = head[0].split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        content = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            return await self._page(writer, path)
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return await wire.send(writer, 404, json.dumps({"error": {"message": path}}))
        body = json.loads(content)
        if "prompt" not in body and "messages" not in body:  # whoever asks whether there is a route
            return await wire.send(writer, 400, json.dumps(wire.FAILED))
        served = Served(len(self.served), body, headers, self._loop_time())
        served.fault = self._fault(served.number)
        self.served.append(served)
        if served.fault == "silent":
            await reader.read()  # until the client gives up
            return False
        if served.fault in ("429", "503", "500", "400"):
            again = {"Retry-After": str(self.config.retry_after_s)}
            status = int(served.fault)
            more = again if status in (429, 503) else {}
            return await wire.send(writer, status, json.dumps(wire.FAILED), more=more)
        async with self._slots:
            served.started = self._loop_time()
            return await self._answer(writer, path.endswith("chat/completions"), served)

    @staticmethod
    def _loop_time() -> float:
        return asyncio.get_running_loop().time()  # time.monotonic()

    async def _page(self, writer: asyncio.StreamWriter, path: str) -> bool:
        path = path.partition("?")[0]
        if path == "/v1/models":
            card = {"id": "toy", "object": "model", "owned_by": "tests"}
            return await wire.send(writer, 200, json.dumps({"object": "list", "data": [card]}))
        if path == "/metrics":
            return await wire.send(writer, 200, self.metrics(), "text/plain; version=0.0.4")
        if path == "/health":
            return await wire.send(writer, 200, "{}")
        return await wire.send(writer, 404, json.dumps({"error": {"message": path}}))

    def metrics(self) -> str:
        """Under vLLM's names."""
        begun = [one for one in self.served if one.started == one.started]
        values = {
            "vllm:num_requests_running": sum(not one.whole and not one.fault for one in begun),
            "vllm:num_requests_waiting": len(self.served) - len(begun)
            - sum(one.fault in ("429", "503", "500", "400", "silent") for one in self.served),
            "vllm:generation_tokens_total": sum(one.tokens for one in self.served),
            "vllm:request_success_total": sum(one.whole for one in self.served),
        }  # fmt: skip
        return "".join(f'{name}{{model_name="toy"}} {value}\n' for name, value in values.items())

    async def _answer(self, writer: asyncio.StreamWriter, chat: bool, served: Served) -> bool:
        body, fault = served.body, served.fault
        count, n = int(body.get("max_tokens") or 16), int(body.get("n") or 1)
        streamed = bool(body.get("stream"))
        written = count // 2 if fault in ("cut", "failed") else count
        if streamed:
            await wire.begin(writer)
            if chat:  # no token yet
                role = {"role": "assistant", "content": ""}
                await wire.event(writer, wire.part(chat, delta=role, indices=range(n)))
        async for place in self._tokens(served.started, written):
            served.tokens += n
            now = self._loop_time()
            served.first, served.last = (now if place == 0 else served.first), now
            if streamed and fault == "garbage":
                await wire.chunk(writer, b"data: {no JSON\n\n")
            elif streamed:
                text = {"content": self.config.text} if chat else self.config.text
                reason = "length" if place == count - 1 else None
                await wire.event(writer, wire.part(chat, text, range(n), reason))
        usage = wire.usage(body, count * n)
        if fault == "cut":
            writer.transport.abort()
            return False
        if streamed:
            await wire.end_stream(writer, body, usage, chat, failed=fault == "failed")
        elif fault:
            await wire.send(
                writer, 200, "no JSON" if fault == "garbage" else json.dumps(wire.FAILED)
            )
        else:
            whole = wire.part(chat, self.config.text * count, range(n), "length", whole=True)
            await wire.send(writer, 200, json.dumps({**whole, "usage": usage}))
        served.whole = not fault
        return True

    async def _tokens(self, started: float, count: int) -> AsyncIterator[int]:
        """0 … count - 1, each when it is due."""
        for place in range(count):
            due = started + self.config.ttft_s + place * self.config.itl_s
            delay = due - self._loop_time()
            if delay > 0:
                await asyncio.sleep(delay)
            yield place


def main() -> None:
    """Serve until it is interrupted."""
    parser = argparse.ArgumentParser(description="A toy server whose timing is exact.")
    parser.add_argument("--port", type=int, default=8123)
    for name, kind in (("ttft-s", float), ("itl-s", float), ("slots", int), ("text", str)):
        default = getattr(ToyConfig, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default)
    given = vars(parser.parse_args())
    toy = ToyServer(port=given.pop("port"), config=ToyConfig(**given))
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(toy.run())


if __name__ == "__main__":
    main()
