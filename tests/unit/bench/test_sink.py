"""The client in C: what it counts of replies, and what it does not take for a reply."""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from research.bench.host.serving import Serving
from research.bench.server import sink as bench
from research.bench.server.sink import SinkConfig, compiled, drain, markdown
from srm.errors import ConfigError
from srm.loadtest.records import settings_of

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data:data: {"choices":[{"text":"\\ndata: data:"}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n'


def reply(num_events: int, num_tokens: int) -> bytes:
    return HEAD + b"2a\r\n" + EVENT * num_events + LAST % num_tokens


@contextmanager
def answering(replies: Sequence[bytes], closes: bool = True) -> Iterator[Serving]:
    """A server that gives each connection the next of these replies, byte by byte."""
    threads: list[threading.Thread] = []

    def answer(connection: socket.socket, data: bytes) -> None:
        received = b""
        while not (length := re.search(rb"content-length: (\d+)\r\n\r\n", received)) or (
            len(received) < length.end() + int(length[1])
        ):
            received += connection.recv(1 << 16)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(len(data)):
            if at == len(data) - 12:  # within the last event, which is then read in two parts
                time.sleep(0.1)
            connection.sendall(data[at : at + 1])
        if not closes:
            connection.recv(1)
        connection.close()

    def accept() -> None:
        for data in replies:
            thread = threading.Thread(target=answer, args=(listener.accept()[0], data))
            thread.start()
            threads.append(thread)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        yield Serving(0, *listener.getsockname())
        for thread in (accepting, *threads):
            thread.join(60)


@pytest.fixture(scope="module")
def sink() -> Iterator[Path]:
    with compiled() as program:
        yield program


@pytest.mark.parametrize("sinks", [1, 3, 9])
def test_all_replies_are_read_and_counted(sink: Path, sinks: int) -> None:
    replies = [reply(num_events, 10 + num_events) for num_events in (0, 1, 7, 400, 3)]
    with answering(replies) as server:
        total = drain(sink, server, len(replies), sinks, max_tokens=4)
    assert total["bytes"] == sum(map(len, replies))
    assert total["events"] == 411 + 2 * len(replies)
    assert total["tokens"] == 411 + 10 * len(replies)
    assert 0 < total["first_s"] <= total["seconds"] * sinks


END_IN_TEXT = (
    reply(3, 3)
    .partition(b"data: [DONE]")[0]
    .replace(b'"completion_tokens"', b'"text":"data: [DONE]","completion_tokens"')
)


@pytest.mark.parametrize(
    "broken",
    [
        reply(3, 3).replace(b"200 OK", b"503 No"),
        reply(3, 3).partition(b"data: [DONE]")[0],
        END_IN_TEXT,
        reply(3, 3).replace(b"completion_tokens", b"tokens"),
        b"",
    ],
    ids=["a refusal", "no end", "an end in a text", "no usage", "nothing"],
)
def test_a_reply_that_is_not_whole_is_an_error(sink: Path, broken: bytes) -> None:
    with (
        answering([reply(3, 3), broken]) as server,
        pytest.raises(ConfigError, match="not all of 2 replies were whole"),
    ):
        drain(sink, server, 2, 1)


def test_a_server_that_falls_silent_is_an_error(
    sink: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "SILENT_S", 0.2)
    with (
        answering([reply(3, 3)], closes=False) as server,
        pytest.raises(ConfigError, match="1 replies: nothing came"),
    ):
        drain(sink, server, 1, 1)


def test_nobody_who_listens_is_an_error(sink: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
    with pytest.raises(ConfigError, match="cannot connect"):
        drain(sink, Serving(0, *place), 1, 1)


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(ConfigError, match="there is no cc"), compiled():
        pass


def test_the_table_has_costs_by_token() -> None:
    burst = {"tokens": 1_000, "seconds": 2.0, "cpu_s": 0.001, "api_cpu_s": 0.02}
    sent = {"bytes": 30_000, "events": 500}
    cases = [
        {"requests": 64, "n": 1, "by": "sink", "raw": [burst | sent, burst | sent]},
        {"requests": 64, "n": 1, "by": "loadtest", "raw": [burst]},
    ]
    lines = markdown({"settings": settings_of(SinkConfig()), "cases": cases})
    assert lines[-2:] == [
        "| 64 × 1 | sink | 500 | 20.00 | 1.00 | 30 | 2.00 |",
        "| 64 × 1 | loadtest | 500 | 20.00 | 1.00 | – | – |",
    ]
