"""The socket of an engine."""

from __future__ import annotations

import os
import socket
from contextlib import closing

import pytest
import zmq

from srm.engine.process.clients import Clients
from srm.server.supervise.launch import new_endpoint

NOBODY = 65_534


def greeting_to(user: int, endpoint: str) -> int:
    """The bytes that a process of this user hears first from a socket; 0: it is refused."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        os.setuid(user)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(endpoint.replace("ipc://@", "\0"))
            os._exit(len(connection.recv(100)))
    except ConnectionError:
        os._exit(0)
    finally:
        os._exit(255)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_users_process_is_not_heard() -> None:
    with closing(Clients(endpoint := new_endpoint(), timeout_s=60)):
        assert 0 < greeting_to(os.geteuid(), endpoint) < 255
        assert greeting_to(NOBODY, endpoint) == 0


def test_a_client_is_answered_over_a_socket_without_a_file() -> None:
    with (
        closing(Clients(endpoint := new_endpoint(), timeout_s=60)) as engine,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as client,
    ):
        client.connect(endpoint)
        client.send(b"hello")
        assert engine.socket.poll(120_000)
        received = engine.receive()
        assert received is not None and received[1] == b"hello"
        assert engine.send(received[0], b"welcome")
        assert client.poll(120_000) and client.recv() == b"welcome"
