"""deploy/nginx/srm.conf in a real nginx: streams, large files, pages and addresses go through."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.kit.loads.raw_server import DONE, END, HEAD, chunk, text_event
from tests.kit.serving import ROOT, Server, free_port

SAMPLE = ROOT / "deploy" / "nginx" / "srm.conf"
AROUND = """
daemon off;
master_process off;
pid {folder}/pid;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/srm.conf;
}}
"""
Before = Callable[..., str]
UPGRADES = (
    (
        'proxy_set_header Connection "";   # kept open to srm',
        'proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection "upgrade";',
    ),
    ("location /v1/admin/ {", "location /v1/tokenize {"),
)
"""The lines for WebSockets that nginx's documentation has, and a route to forbid."""


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[Before]:
    """nginx(PORT, *changes): the address of the sample, with these changes, in front of a server
    there; all end with the test."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("there is no nginx; tests/install.sh installs it as root on Debian")
    running: list[subprocess.Popen[bytes]] = []

    def start(port: int, *changes: tuple[str, str]) -> str:
        own, sample = free_port(), SAMPLE.read_text()
        here = ("listen 80;", f"listen 127.0.0.1:{own};"), (":8000;", f":{port};")
        for was, is_now in (*here, *changes):
            assert sample.count(was) == 1
            sample = sample.replace(was, is_now)
        (tmp_path / "srm.conf").write_text(sample)
        (tmp_path / "nginx.conf").write_text(AROUND.format(folder=tmp_path))
        command = [program, "-e", "stderr", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf")]
        running.append(subprocess.Popen(command))
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", own)).close()
            except OSError:
                assert running[-1].poll() is None, "nginx has ended"
                assert time.monotonic() < deadline
                time.sleep(0.02)
            else:
                return f"http://127.0.0.1:{own}"

    yield start
    for popen in running:
        popen.terminate()
        popen.wait(120)


async def test_events_come_when_they_are_sent_and_the_server_knows_from_whom(
    nginx: Before,
) -> None:
    has_come = asyncio.Event()
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(HEAD + chunk(text_event("first")))
        await has_come.wait()  # for ever, if the first is kept until there is more
        writer.write(chunk(text_event("second")) + chunk(DONE) + END)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as behind:
        url = await asyncio.to_thread(nginx, behind.sockets[0].getsockname()[1])
        got = b""
        headers = {"x-forwarded-for": "203.0.113.9"}
        async with (
            httpx.AsyncClient(timeout=120) as client,
            client.stream("POST", f"{url}/v1/completions", json={}, headers=headers) as reply,
        ):
            async for piece in reply.aiter_raw():
                got += piece
                if b"first" in got:
                    has_come.set()
    assert got.endswith(b"data: [DONE]\n\n") and b"second" in got
    head = heads[0].lower()
    assert b"\r\nx-forwarded-for: 203.0.113.9, 127.0.0.1\r\n" in head
    assert f"\r\nhost: {url.removeprefix('http://')}\r\n".encode() in head


def test_a_server_behind_it_takes_files_pages_and_no_operator(
    nginx: Before, server: Server
) -> None:
    url = nginx(int(server.url.rsplit(":", 1)[1]))
    with httpx.Client(base_url=url, timeout=60) as client:
        large = b"x" * 3_000_000  # nginx takes 1 MiB unless it is told otherwise
        upload = client.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a.txt", large)}
        )
        assert upload.status_code == 200, upload.text
        assert client.get(f"/v1/files/{upload.json()['id']}/content").content == large
        assert client.delete(f"/v1/files/{upload.json()['id']}").status_code == 200
        body = {"prompt": "the cat", "max_tokens": 2}
        for origin, status in ((url, 200), ("https://stranger.example", 403)):
            reply = client.post("/v1/completions", json=body, headers={"origin": origin})
            assert reply.status_code == status, reply.text
        assert client.post("/v1/completions", json={**body, "stream": True}).text.endswith(
            "data: [DONE]\n\n"
        )
        for path in ("/v1/admin/state", "//v1/admin/state", "/v1/%61dmin/state"):
            assert client.get(path).status_code in {403, 404}


@pytest.mark.parametrize("offer", ["websocket", "h2c"])
def test_the_lines_for_websockets_let_no_body_become_a_request(
    nginx: Before, server: Server, offer: str
) -> None:
    """The body of a request that offers an upgrade was run as one that nginx forbids."""
    url = nginx(int(server.url.rsplit(":", 1)[1]), *UPGRADES)
    forbidden = {"prompt": "the cat"}
    assert httpx.post(f"{url}/v1/tokenize", json=forbidden).status_code == 404
    body = json.dumps(forbidden).encode()
    smuggled = b"POST /v1/tokenize HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    smuggled += b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    head = (
        f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: {offer}\r\n"
    )
    before = server.metric("http_requests_total", "/v1/tokenize")
    for _ in range(12):
        with socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=120) as client:
            client.sendall(head.encode() + b"Content-Length: %d\r\n\r\n" % len(smuggled))
            time.sleep(0.004)  # in one piece with the head it was dropped
            client.sendall(smuggled)
            assert client.recv(12) == b"HTTP/1.1 200"
        reply = httpx.post(
            f"{url}/v1/completions",
            json={"prompt": "a"},
            headers={"connection": "Upgrade", "upgrade": offer},
        )
        assert reply.status_code == 200, reply.text
    assert server.metric("http_requests_total", "/v1/tokenize") == before
