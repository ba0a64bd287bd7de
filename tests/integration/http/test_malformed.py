"""Malformed bodies and requests are refused in our shape; offers change nothing.

Who offers one is answered as without: curl, and Java's own client.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

import pytest

from srm.server.http.auth import OPERATOR_FOLDER, TRAINER_PATHS
from srm.server.routes.app import OPERATIONS
from tests.kit.bodies import garbage
from tests.kit.serving import ROOT, Server

VALID = {"prompt": "the cat", "messages": [{"role": "user", "content": "hi"}], "tokens": [5]}
"""Of these fields a route takes those it has; two tokens are soon made."""
ROUTES = {
    operation.path: sorted({*operation.body.kind.__struct_fields__, *operation.body.neutral})
    for operation in OPERATIONS
    if operation.body
}


def valid_body(names: list[str]) -> dict[str, Any]:
    short = {"max_tokens": 2} if "max_tokens" in names else {}
    return {name: value for name, value in VALID.items() if name in names} | short


def post(connection: HTTPConnection, path: str, body: bytes) -> HTTPResponse:
    """The reply; over a new connection if the server had closed this one, which was idle."""
    try:
        connection.request("POST", path, body)
        return connection.getresponse()
    except ConnectionError:
        connection.close()
        connection.request("POST", path, body)
        return connection.getresponse()


def send_and_read(address: tuple[str, int], sent: bytes) -> bytes:
    """All that comes back until the server closes; it may close before it has read all."""
    with socket.create_connection(address, timeout=120) as connection:
        try:
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65_536), b""))
        except TimeoutError:
            raise
        except OSError:
            return b""


@contextmanager
def nothing_amiss(server: Server) -> Iterator[None]:
    """Afterwards nothing is, and nothing was said to be."""
    begin = len(server.lines)
    yield
    server.wait_until_idle()
    assert server.get("/ready").status_code == 200
    assert server.post(max_tokens=2).status_code == 200
    trouble = ("Traceback", "failed", "restart")
    assert not [line for line in server.lines[begin:] if any(word in line for word in trouble)]


@pytest.mark.parametrize("num_bodies", [800, pytest.param(95_000, marks=pytest.mark.slow)])
def test_malformed_bodies_are_refused(server: Server, num_bodies: int) -> None:
    rng = random.Random(1)
    statuses: Counter[int] = Counter()
    address = urlsplit(server.url).netloc
    with nothing_amiss(server), closing(HTTPConnection(address, timeout=120)) as connection:
        for _ in range(num_bodies):
            path = rng.choice(list(ROUTES))
            names = [*ROUTES[path], "nonsense"]
            draw = rng.choice(garbage.BODIES)
            body = draw(rng, valid_body(names), names)
            reply = post(connection, path, body)
            answer = reply.read()
            statuses[reply.status] += 1
            case = (path, draw.__name__, body[:500], answer[:500])
            assert reply.status in {200, 400, 403, 404, 413}, case
            # without keys they are for the admin port
            is_operators = path.startswith(OPERATOR_FOLDER) or path in TRAINER_PATHS
            assert (reply.status == 403) == is_operators, case
            assert reply.headers["x-request-id"], case
            if reply.status != 200:
                error = json.loads(answer)["error"]
                assert set(error) == {"message", "type", "param", "code"} and error["message"], case
    assert statuses[400] > num_bodies // 2


@pytest.mark.parametrize("num_requests", [200, pytest.param(5_000, marks=pytest.mark.slow)])
def test_malformed_requests_are_refused(server: Server, num_requests: int) -> None:
    rng = random.Random(2)
    answered: Counter[int] = Counter()
    address = urlsplit(server.url)
    assert address.hostname and address.port
    with nothing_amiss(server):
        for _ in range(num_requests):
            path = rng.choice(list(ROUTES))
            is_stream = {"stream": rng.random() < 0.5} if "stream" in ROUTES[path] else {}
            body = json.dumps(valid_body(ROUTES[path]) | is_stream).encode()
            sent = garbage.requests(rng, path, body)
            answer = send_and_read((address.hostname, address.port), sent)
            statuses = re.findall(rb"^HTTP/1.1 (\d+)", answer, re.MULTILINE)
            answered.update(map(int, statuses))
            assert all(int(status) < 500 for status in statuses), (sent[:500], answer[:500])
    assert answered[200] and answered[400]


POSTED = {
    re.sub(r"\{\w+\}", "none", operation.path): json.dumps(
        valid_body(ROUTES.get(operation.path, []))
    ).encode()
    for operation in OPERATIONS
    if operation.method == "POST"
}
"""Path and body: each is answered by the route itself, whether well or not."""
Answer = tuple[int, object]


def answer(status: int, text: str) -> Answer:
    """Return the part that two replies to a request share: an error, or the names of fields."""
    fields = json.loads(text or "{}")
    known = fields[0] if isinstance(fields, list) else fields  # of prompts that are rendered
    return status, known.get("error") or sorted(known)


def plain(server: Server) -> dict[str, Answer]:
    """Return the reply of each path to a client that offers nothing."""
    headers = {"content-type": "application/json"}
    entries = {}
    for path, body in POSTED.items():
        reply = server.http.post(path, content=body, headers=headers)
        entries[path] = answer(reply.status_code, reply.text)
    assert len(entries) > 10 and entries["/v1/completions"][0] == 200
    return entries


@pytest.mark.parametrize("ways", [["--http2"], ["--http2", "-H", "transfer-encoding: chunked"]])
def test_curl_is_answered_as_without_its_offer(server: Server, ways: list[str]) -> None:
    program = shutil.which("curl")
    if program is None or b"HTTP2" not in subprocess.check_output([program, "--version"]):
        pytest.skip("there is no curl that knows HTTP/2")
    for path, wanted in plain(server).items():
        command = [program, "-sS", *ways, "-H", "content-type: application/json", "-d", "@-"]
        command += ["-w", "\n%{http_code}", server.url + path]
        got = subprocess.check_output(command, input=POSTED[path], timeout=120)
        text, _, status = got.decode().rpartition("\n")
        assert answer(int(status), text) == wanted, path


def test_javas_client_is_answered_as_any_other(server: Server) -> None:
    program = shutil.which("java")
    if program is None:
        pytest.skip("there is no java")
    lines = b"".join(b"%b %b\n" % (path.encode(), body) for path, body in POSTED.items())
    source = ROOT / "tests" / "clients" / "programs" / "Post.java"
    ran = subprocess.run(
        [program, source, server.url], input=lines, capture_output=True, timeout=300, check=False
    )
    if b"source" in ran.stderr and b"jdk.compiler" in ran.stderr:
        pytest.skip("there is a java that compiles nothing")
    assert ran.returncode == 0, ran.stderr.decode()
    results = [line.split(" ", 1) for line in ran.stdout.decode().splitlines()]
    got = [answer(int(status), text) for status, text in results]
    assert got == [number for number in plain(server).values() for _ in range(2)]
