"""Streams over HTTP: readers that are slow or many, and completions that stop on their own."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serving import SERVER_FLAGS, Server

NEVER_READ_BYTES = 4_096
SLOTS = 4_096


@pytest.fixture(scope="module")
def instant_server(text_model: Path) -> Iterator[Server]:
    """With an engine that has every result at once."""
    flags = (f"--num-slots={SLOTS}", f"--max-step-rows={SLOTS}", "--max-step-tokens=9000")
    with Server(text_model, *flags, engine_module="bench.host.instant") as running:
        yield running


def connect(server: Server, **fields: Any) -> socket.socket:
    """A stream that nobody reads yet, over a connection that holds little."""
    found = re.fullmatch(r"http://(.+):(\d+)", server.url)
    assert found is not None
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, NEVER_READ_BYTES)
    connection.settimeout(600)
    connection.connect((found[1], int(found[2])))
    body = json.dumps({"prompt": [5], "ignore_eos": True, "stream": True, **fields}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    connection.sendall(head.encode() + b"connection: close\r\n\r\n" + body)
    return connection


def read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    while data := connection.recv(1 << 20):
        received += data
    connection.close()
    return bytes(received)


def until(condition: Any, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def api_memory(server: Server) -> int:
    """Bytes resident in the API process."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text()
    for pid in children.split():
        if b"api" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4_096
    raise AssertionError("no API process")


def test_a_slow_reader_holds_its_tokens_and_nobody_up(instant_server: Server) -> None:
    server, n, max_tokens = instant_server, 4_000, 120
    usage = {"stream_options": {"include_usage": True}}
    server.post(prompt=[5], n=n, max_tokens=3, ignore_eos=True)
    before = api_memory(server)
    decoded = server.metric("srm_engine_decode_tokens_total")
    slow = connect(server, n=n, max_tokens=max_tokens, **usage)
    until(lambda: server.metric("srm_engine_decode_tokens_total") >= decoded + n * max_tokens)
    until(lambda: server.metric("srm_engine_free_slots") == SLOTS)  # whether it reads or not
    for _ in range(3):
        reply = server.post(prompt=[7], max_tokens=5, ignore_eos=True)
        assert reply.json()["usage"]["completion_tokens"] == 5
    grown = api_memory(server) - before
    # As events of a token each, of 80 bytes and more, they would be 40 MB and more.
    assert grown < 16e6
    received = read_all(slow)
    assert received.count(b'"finish_reason":"length"') == n
    assert b'"completion_tokens":%d' % (n * max_tokens) in received
    assert received.rstrip().endswith(b"data: [DONE]\n\n\r\n0")


def test_many_streams_at_once_each_get_their_own(instant_server: Server) -> None:
    texts: dict[int, list[bytes]] = {}

    def read(index: int) -> None:
        connection = connect(instant_server, n=2, max_tokens=50 + index)
        texts[index] = re.findall(rb'"finish_reason":"(\w+)"', read_all(connection))

    threads = [threading.Thread(target=read, args=(index,)) for index in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {index: [b"length"] * 2 for index in range(30)}


def test_a_sample_that_hits_a_stop_string_frees_its_slot(text_model: Path) -> None:
    """Though nobody reads the stream, and its siblings go on."""
    with Server(text_model, *SERVER_FLAGS) as server:
        names = ("requests_total", "finished"), ("sequences_total", "stop")
        fields = {"n": 60, "max_tokens": 120, "seed": 3, "temperature": 1.5}
        free = server.post(prompt=[5], ignore_eos=True, **fields).json()
        texts = [choice["text"] for choice in free["choices"]]
        pairs = {text[i : i + 2] for text in texts for i in range(len(text) - 1)}
        counts = {pair: sum(pair in text for text in texts) for pair in pairs if pair.isascii()}
        stop = next(pair for pair, count in sorted(counts.items()) if 5 < count < 50)
        count = counts[stop]
        before = [server.metric(f"srm_engine_{name}", label) for name, label in names]
        decoded = server.metric("srm_engine_decode_tokens_total")
        slow = connect(server, stop=[stop], **fields)
        until(lambda: server.metric("srm_engine_requests_total", "finished") > before[0])
        after = [server.metric(f"srm_engine_{name}", label) for name, label in names]
        finished, stopped = (a - b for a, b in zip(after, before, strict=True))
        assert finished == 1
        assert 0 < stopped <= count  # some may have got to their last token first
        assert server.metric("srm_engine_decode_tokens_total") - decoded < 60 * 120
        received = read_all(slow)
        assert received.count(b'"stop_reason":%b' % json.dumps(stop).encode()) == count
