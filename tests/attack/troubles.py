"""What is done to a server beside asking it: one coroutine for each kind of trouble.

Each goes on until `done` is set, and then puts back what it turned, filled or stopped.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import httpx
import psutil

from tests.attack.damage import Clock, Disk
from tests.chaos.jobs import WHO, KilledServer

_DAY_S = 86_400
FROZEN = ("engine", "api", "jobs")
LARGE_BYTES = 24_000_000
"""Size of a body of many objects."""
OBJECTS = ("[]", "{}", "[[]]", '{"a":0}', "0", '""', "null", "1e9")
"""Values of which a large body has as many as fit."""
MAX_ERROR_BYTES = 16_000
LARGE_FIELDS = ("prompt", "messages", "metadata", "stop", "logit_bias", "nonsense", "cache_control")


@dataclass
class Troubles:
    """A server and all that may be done to it."""

    server: KilledServer
    rng: random.Random
    disk: Disk
    """Disk of what the server stores."""
    temp: Disk
    """Disk of its temporary files."""
    clock: Clock
    port: int
    admin: httpx.AsyncClient
    """Client of the operator's port."""
    folder: str
    """Weights that may be put to use."""
    fault: Callable[[str], None]
    """Told what the server did wrong."""
    done: Counter[str] = field(default_factory=Counter)

    async def kill(self, done: asyncio.Event) -> None:
        """Kill a process every three seconds or so."""
        while not done.is_set():
            await asyncio.sleep(self.rng.expovariate(1 / 3))
            who = self.rng.choice(WHO)
            self.done[f"kills of {who}"] += await asyncio.to_thread(self.server.kill, who)

    async def fill_disk(self, done: asyncio.Event) -> None:
        """Fill the disk of what is stored, and empty it."""
        await self._fill(done, self.disk, "times that the disk was full")

    async def fill_temp(self, done: asyncio.Event) -> None:
        """Fill the disk of temporary files, and empty it; a process is killed meanwhile."""
        await self._fill(done, self.temp, "times that the temp folder was full", kills=True)

    async def turn_clock(self, done: asyncio.Event) -> None:
        """Set the wall clock of all processes, to and fro."""
        while not done.is_set():
            self.clock.turn(self.rng.choice((-90, -1, 1, 90)) * _DAY_S)
            self.done["jumps of the clock"] += 1
            await asyncio.sleep(self.rng.expovariate(1 / 3))
        self.clock.turn(0)

    async def freeze(self, done: asyncio.Event) -> None:
        """Stop a process and never let it go on: whoever watches it has to notice."""
        while not done.is_set():
            await asyncio.sleep(self.rng.expovariate(1 / 6))
            who = self.rng.choice(FROZEN)
            if (result := self.server.find(who, self.rng)) is not None:
                with suppress(psutil.NoSuchProcess):
                    result.suspend()
                    self.done[f"{who} frozen"] += 1

    async def leave(self, done: asyncio.Event) -> None:
        """Ask for streams of many samples, and leave each after some milliseconds."""
        fields = {"n": 200, "max_tokens": 50, "ignore_eos": True, "stream": True}
        while not done.is_set():
            body = json.dumps({"prompt": "the cat", **fields}).encode()
            leavers = [
                self._send_and_leave("/v1/completions", body, self.rng.uniform(0.005, 0.12))
                for _ in range(5)
            ]
            await asyncio.gather(*leavers)
            self.done["streams left"] += len(leavers)
            await asyncio.sleep(self.rng.expovariate(2))

    async def send_large(self, done: asyncio.Event) -> None:
        """Send bodies of very many objects."""
        while not done.is_set():
            value = self.rng.choice(OBJECTS)
            items = ",".join([value] * (LARGE_BYTES // (len(value) + 1)))
            name = self.rng.choice(LARGE_FIELDS)
            body = f'{{"prompt": "the cat", "{name}": [{items}]}}'.encode()
            path = self.rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize"))
            with suppress(httpx.TransportError):
                reply = await self.admin.post(
                    path, content=body, headers={"content-type": "application/json"}
                )
                self.done[f"large bodies answered {reply.status_code}"] += 1
                if reply.is_error and len(reply.content) > MAX_ERROR_BYTES:
                    self.fault(f"{path}: an error of {len(reply.content)} bytes")
            await asyncio.sleep(self.rng.expovariate(1))

    async def change_weights(self, done: asyncio.Event) -> None:
        """Put weights to use while a process dies, in any phase of the change."""
        while not done.is_set():
            running = self.rng.choice(("finish", "drop", "continue", "refeed"))
            asking = asyncio.create_task(self._ask_weights(running))
            await asyncio.sleep(self.rng.expovariate(20))
            who = self.rng.choice(("engine", "engine", "api"))
            if (result := self.server.find(who, self.rng)) is not None:
                with suppress(psutil.NoSuchProcess):
                    result.send_signal(self.rng.choice((signal.SIGKILL, signal.SIGSTOP)))
                    self.done["changes of weights hit by a death"] += 1
            await asking
            await asyncio.sleep(self.rng.expovariate(1 / 2))

    async def _ask_weights(self, running: str) -> None:
        body = {"path": self.folder, "running": running}
        with suppress(httpx.TransportError):
            reply = await self.admin.post("/v1/admin/weights", json=body)
            self.done[f"changes of weights answered {reply.status_code}"] += 1

    async def _fill(self, done: asyncio.Event, disk: Disk, what: str, kills: bool = False) -> None:
        while not done.is_set():
            await asyncio.sleep(self.rng.expovariate(1 / 2))
            with _full(disk):
                self.done[what] += 1
                if kills:
                    who = self.rng.choice(FROZEN)
                    self.done[f"kills of {who}"] += await asyncio.to_thread(self.server.kill, who)
                await asyncio.sleep(self.rng.expovariate(1 / 2))

    async def _send_and_leave(self, path: str, body: bytes, patience_s: float) -> None:
        key = self.admin.headers["authorization"]
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: {key}\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(head.encode() + body)
            await asyncio.sleep(patience_s)
            writer.transport.abort()


@contextmanager
def _full(disk: Disk) -> Iterator[None]:
    disk.fill()
    try:
        yield
    finally:
        disk.free()
