"""Clients that offer another protocol are answered in this one: bytes, curl, and Java's own."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from http.client import HTTPResponse
from urllib.parse import urlsplit

import pytest

from srm.server.routes.app import OPERATIONS
from tests.integration.http.test_malformed import ROUTES, valid_body
from tests.kit.serving import ROOT, Server

OFFER = (
    b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    b"Upgrade: h2c\r\n"
)
POSTED = {
    operation.path.replace("{batch_id}", "none"): json.dumps(
        valid_body(ROUTES.get(operation.path, []))
    ).encode()
    for operation in OPERATIONS
    if operation.method == "POST"
}
"""Path and body: each is answered by the route itself, whether well or not."""
Answer = tuple[int, object]


def answer(status: int, text: str) -> Answer:
    """What two replies to the same request have in common: an error, or the names of the fields."""
    fields = json.loads(text or "{}")
    known = fields[0] if isinstance(fields, list) else fields  # of prompts that are rendered
    return status, known.get("error") or sorted(known)


def plain(server: Server) -> dict[str, Answer]:
    """What each path answers to a client without an offer."""
    headers = {"content-type": "application/json"}
    entries = {}
    for path, body in POSTED.items():
        reply = server.http.post(path, content=body, headers=headers)
        entries[path] = answer(reply.status_code, reply.text)
    assert len(entries) > 10 and entries["/v1/completions"][0] == 200
    return entries


def framed(body: bytes, is_in_chunks: bool) -> bytes:
    if is_in_chunks:
        return b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize("is_in_chunks", [False, True])
def test_every_route_has_the_body_of_a_request_that_offers_an_upgrade(
    server: Server, is_in_chunks: bool
) -> None:
    """`the body is empty`, it said: to Java's client, curl --http2 and all that share their way."""
    address = urlsplit(server.url)
    wanted = plain(server)
    with socket.create_connection((address.hostname, address.port), timeout=120) as connection:
        for path, body in POSTED.items():
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n".encode()
            typed = b"Content-Type: application/json\r\n"
            connection.sendall(head + typed + OFFER + framed(body, is_in_chunks))
            reply = HTTPResponse(connection, method="POST")
            reply.begin()
            assert answer(reply.status, reply.read().decode()) == wanted[path], path


@pytest.mark.parametrize("ways", [["--http2"], ["--http2", "-H", "transfer-encoding: chunked"]])
def test_curl_with_an_offer_of_http_2_is_answered_as_without(
    server: Server, ways: list[str]
) -> None:
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
