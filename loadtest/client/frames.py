"""Messages between a run and its client processes over pipes: a length, then msgpack."""

from __future__ import annotations

import asyncio
import os
import time

import msgspec
import numpy as np

from srm.loadtest.client.target import Target
from srm.loadtest.recording import RowBuffer
from srm.loadtest.scenario import Scenario, as_path

_LENGTH = 8
_BOUNDS = np.geomspace(1e-4, 1e3, 281)
"""Bucket bounds in seconds; a bucket is 6 % wide."""


class Setup(msgspec.Struct, tag=True):
    """The first message to a client process: what it is to do."""

    scenario: Scenario
    target: Target
    worker: int
    workers: int


class Go(msgspec.Struct, tag=True):
    """All client processes are ready: begin."""

    started: float
    """The time.monotonic() of second 0; processes of a machine share this clock."""


class Stop(msgspec.Struct, tag=True):
    """End early. The end of the pipe means the same, since then nobody waits for the result."""


class Ready(msgspec.Struct, tag=True):
    """A client process has made its first requests and can begin."""


class FrameTimes(msgspec.Struct, frozen=True):
    """Times of one client process."""

    first_bytes: tuple[int, ...] = (0,) * (len(_BOUNDS) + 1)
    """[buckets] Ended requests by time from the planned time to the reply's first byte."""
    lateness_s: float = 0.0
    """The worst time from planned to sent, of requests that ended since the last call."""
    cpu_share: float = 0.0
    """The share of one core that the process used since the last call."""


class Counts(msgspec.Struct):
    """Progress of one client process, or of all together."""

    planned: int = 0
    """Requests that should have begun by now; in a closed loop, that have begun."""
    sent: int = 0
    in_flight: int = 0
    completed: int = 0
    failed: int = 0
    output_tokens: int = 0
    last_error: str = ""
    """Kind and message of a recent failure; empty: none."""


class FrameCounts(Counts, tag=True):
    """Progress of a client process."""

    times: FrameTimes = FrameTimes()


class Failed(msgspec.Struct, tag=True):
    """A client process cannot go on."""

    message: str
    is_outside: bool
    """Whether the cause is a caller, a file or this machine; else it is a bug."""


class Result(msgspec.Struct, tag=True):
    """Everything a client process recorded: rows of recording.REQUEST, EVENT and CLIENT."""

    requests: bytes
    events: bytes
    clients: bytes
    reasons: dict[str, str]
    """As in recording.About."""


ToWorker = Setup | Go | Stop
FromWorker = Ready | FrameCounts | Failed | Result

_from_worker = msgspec.msgpack.Decoder(FromWorker, dec_hook=as_path)
_to_worker = msgspec.msgpack.Decoder(ToWorker, dec_hook=as_path)


def encode(message: ToWorker | FromWorker) -> bytes:
    body = msgspec.msgpack.encode(message, enc_hook=os.fspath)
    return len(body).to_bytes(_LENGTH, "little") + body


def write(fd: int, message: FromWorker) -> None:
    """Write a message from a client process; blocks until the pipe has taken all of it."""
    left = memoryview(encode(message))
    while left:
        left = left[os.write(fd, left) :]


def read(fd: int) -> ToWorker | None:
    """Wait, in a client process, for the next message; None at the end of the pipe."""
    head = _read_exactly(fd, _LENGTH)
    body = _read_exactly(fd, int.from_bytes(head, "little")) if head else b""
    return _to_worker.decode(body) if body else None


async def receive(stream: asyncio.StreamReader) -> FromWorker | None:
    """Wait, in the run, for a client process's next message; None at the end of the pipe."""
    try:
        head = await stream.readexactly(_LENGTH)
        body = await stream.readexactly(int.from_bytes(head, "little"))
    except asyncio.IncompleteReadError:
        return None
    heard: FromWorker = _from_worker.decode(body)
    return heard


def _read_exactly(fd: int, count: int) -> bytes:
    """Read `count` bytes; return empty bytes if the pipe ends before."""
    parts = []
    while count:
        part = os.read(fd, count)
        if not part:
            return b""
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class LiveStats:
    """Live statistics of one process, updated when asked for."""

    def __init__(self, requests: RowBuffer) -> None:
        """`requests` are rows of recording.REQUEST, which grow."""
        self._requests = requests
        self._seen = 0
        self._first_bytes = np.zeros(len(_BOUNDS) + 1, np.int64)
        self._reported_at, self._cpu_s = time.monotonic(), time.process_time()

    def times(self) -> FrameTimes:
        rows = self._requests.since(self._seen)
        self._seen += len(rows)
        taken = rows["first_byte"] - rows["planned"]
        places = np.searchsorted(_BOUNDS, taken[~np.isnan(taken)])
        self._first_bytes += np.bincount(places, minlength=len(self._first_bytes))
        late = rows["sent"] - rows["planned"]
        reported, self._reported_at = self._reported_at, time.monotonic()
        cpu_s, self._cpu_s = self._cpu_s, time.process_time()
        return FrameTimes(
            tuple(self._first_bytes.tolist()),
            float(late[~np.isnan(late)].max(initial=0.0)),
            (self._cpu_s - cpu_s) / max(self._reported_at - reported, 1e-9),
        )


def first_byte_percentiles(times: list[FrameTimes]) -> tuple[float, float]:
    """Return p50 and p99 over all processes, in seconds; NaN if nothing has ended."""
    total = np.cumsum(np.sum([duration.first_bytes for duration in times], axis=0))
    if not total[-1]:
        return float("nan"), float("nan")
    p50, p99 = np.append(_BOUNDS, np.inf)[np.searchsorted(total, np.array([0.5, 0.99]) * total[-1])]
    return float(p50), float(p99)
