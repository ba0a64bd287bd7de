"""The socket of an engine, whose file a sweeper of temp folders may take."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from srm.engine.process import clients
from srm.engine.process.clients import Clients


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made
        made.destroy(linger=0)


def connected(context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send(b"hello")
    return socket


def receive(engine: Clients) -> tuple[bytes, bytes]:
    assert engine.socket.poll(120_000)
    received = engine.receive()
    assert received is not None
    return received


def test_a_socket_whose_folder_was_removed_is_reached_by_new_clients_and_loses_no_old_one(
    context: zmq.Context[zmq.Socket[bytes]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An API process that was started afterwards had no engine for ever."""
    monkeypatch.setattr(clients, "_LOOK_EVERY_S", 0.0)
    folder = tmp_path / "private"
    folder.mkdir()
    with closing(Clients(endpoint := f"ipc://{folder}/engine", timeout_s=60)) as engine:
        old = connected(context, endpoint)
        name, _ = receive(engine)
        shutil.rmtree(folder)
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                engine.listen_again()
        assert caplog.text.count("cannot be made again") == 1
        folder.mkdir()
        for _ in range(2):
            engine.listen_again()
        assert caplog.text.count("was removed: made again") == 1
        new = connected(context, endpoint)
        other, _ = receive(engine)
        for socket, client in ((old, name), (new, other)):
            assert engine.send(client, client)
            assert socket.poll(120_000) and socket.recv() == client
