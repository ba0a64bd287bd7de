"""States where readers are slow, writers leave, the disk is full, and time is over."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from srm.server.storage.states import StateStore
from tests.attack.damage import Disk
from tests.kit.serving import (
    SERVER_FLAGS,
    Server,
    children,
    complete,
    error_of,
    read_all,
    wait_until,
)

STATES = "/v1/states"
MIB = 1024**2


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def attacked(text_model: Path, data: Path) -> Iterator[Server]:
    flags = (*SERVER_FLAGS, "--max-state-bytes=0", f"--data-dir={data}")
    with Server(text_model, *flags) as running:
        yield running


def make(server: Server, **fields: Any) -> str:
    reply = server.http.post(STATES, json={"prompt": "the cat sat", **fields})
    assert reply.status_code == 200, reply.text
    id: str = reply.json()["id"]
    return id


def content(server: Server, id: str) -> httpx.Response:
    return server.get(f"{STATES}/{id}/content")


def connected(server: Server) -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.settimeout(600)
    connection.connect((address.hostname, address.port))
    return connection


def test_a_slow_reader_gets_a_state_that_was_deleted_meanwhile(attacked: Server) -> None:
    id = make(attacked, prompt=[5] * 127)
    file = content(attacked, id).content
    path = f"{STATES}/{id}/content"
    connections = [connected(attacked) for _ in range(50)]
    for connection in connections:
        asked = f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        connection.sendall(asked.encode())
    for connection in connections:
        connection.recv(1)  # it is answered, and not read
    complete(attacked, max_tokens=3)
    assert attacked.http.delete(f"{STATES}/{id}").json()["deleted"]
    for connection in connections:
        assert read_all(connection).endswith(b"\r\n\r\n" + file)
    assert content(attacked, id).status_code == 404


def test_a_put_that_is_cut_off_anywhere_is_whole_or_not_there(attacked: Server, data: Path) -> None:
    id = make(attacked)
    file = content(attacked, id).content
    attacked.http.delete(f"{STATES}/{id}")
    path = f"{STATES}/{id}/content"
    head = f"PUT {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(file)}\r\n\r\n".encode()
    for length in range(0, len(file), 97):
        with connected(attacked) as connection:
            connection.sendall(head + file[:length])
        assert content(attacked, id).status_code == 404
    with connected(attacked) as connection:
        connection.sendall(head + file)  # and leaves without a look at the reply
    wait_until(lambda: content(attacked, id).status_code == 200)
    assert content(attacked, id).content == file
    assert attacked.http.delete(f"{STATES}/{id}").json()["deleted"]
    with closing(StateStore(data)) as store:
        assert store.bytes_of("") == 0


def rows(data: Path) -> int:
    with closing(sqlite3.connect(data / "states.sqlite3")) as connection:
        (number,) = connection.execute("SELECT count(*) FROM states").fetchone()
    return int(number)


def test_the_jobs_process_deletes_what_has_expired(attacked: Server, data: Path) -> None:
    long, short = make(attacked), make(attacked, ttl_s=1)
    wait_until(lambda: content(attacked, short).status_code == 404)
    assert rows(data) == 2  # nobody has put or deleted one since
    os.kill(children(attacked)["jobs"], signal.SIGKILL)  # a new one looks at once
    wait_until(lambda: rows(data) == 1)
    assert content(attacked, long).status_code == 200
    attacked.http.delete(f"{STATES}/{long}")


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of one's own needs root")
def test_a_full_disk_keeps_what_there_is_and_lets_delete(text_model: Path, tmp_path: Path) -> None:
    with closing(Disk(tmp_path / "disk", 24)) as disk:
        data = disk.folder / "data"
        flags = (*SERVER_FLAGS, "--max-state-bytes=0", f"--data-dir={data}")
        with Server(text_model, *flags) as server:
            ids = [make(server) for _ in range(20)]
            files = {id: content(server, id).content for id in ids}
            with (disk.folder / "part").open("wb") as part:  # fewer bytes than states leave
                os.posix_fallocate(part.fileno(), 0, shutil.disk_usage(disk.folder).free - 8 * MIB)
            assert_full(server, files)
            for id in ids[:10]:
                assert server.http.delete(f"{STATES}/{id}").json()["deleted"]
                del files[id]
            disk.fill()  # to the last byte
            assert_full(server, files)
            server.wait_until_idle()
        disk.fill()  # what it gave back when it ended
        with Server(text_model, *flags) as server:
            assert content(server, ids[10]).status_code in {200, 507}  # to begin takes some bytes
            disk.free()
            (disk.folder / "part").unlink()
            reply = complete(server, save_state=True, n=3, max_tokens=3)
            files |= {
                choice["state"]: content(server, choice["state"]).content
                for choice in reply["choices"]
            }
            listed = {state["id"] for state in server.get(f"{STATES}?limit=99").json()["data"]}
            assert listed == files.keys()
            for id, file in files.items():
                assert content(server, id).content == file
        assert "Traceback" not in "".join(server.lines)


def assert_full(server: Server, files: dict[str, bytes]) -> None:
    """No state is made, and each that is there is as it was."""
    for reply in (
        server.http.post(STATES, json={"prompt": "the cat"}),
        server.post(save_state=True, n=3, max_tokens=3),
        server.http.put(f"{STATES}/state_{'0' * 32}/content", content=next(iter(files.values()))),
    ):
        assert "is left on the disk" in error_of(reply, 507)["message"]
    for id, file in files.items():
        assert content(server, id).content == file
