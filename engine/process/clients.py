"""Clients: the socket that API and jobs processes talk to, and which of them are there.

A client that says nothing is gone, or too busy to speak. Its process answers the heartbeat of its
connection in a thread of the library's, which needs neither its interpreter nor its event loop: so
a busy client keeps its requests, and whoever started it sees to it that it does not stay so. One
that has ended or is frozen loses its connection.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator

import zmq

from srm.errors import ConfigError

logger = logging.getLogger(__name__)

LINGER_MS = 1_000  # milliseconds that the last messages may take to leave a closing socket
_LOOK_EVERY_S = 1.0
"""Seconds between two looks whether a silent client is still connected."""


class Clients:
    """The clients of one engine. Belongs to one thread."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        """`timeout_s`: seconds of silence after which it is looked whether a client is there.
        Raises ConfigError for an endpoint that cannot be bound."""
        self.timeout_s = timeout_s
        self._heard: dict[bytes, float] = {}  # when each client last said something
        self._silent: set[bytes] = set()
        self._numbers: dict[bytes, int] = {}
        self._by_number: dict[int, bytes] = {}
        self._num_numbers = 0  # ever given out
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = LINGER_MS
        # A ROUTER drops what exceeds its high-water mark. Nothing may be lost, so there is none:
        # a client that reads too slowly is bounded by its requests, a dead one by its timeout.
        self.socket.sndhwm = 0
        self.socket.router_mandatory = True  # it is an error to send to one that is gone
        # A frozen process has lost its connection by the first look, at three quarters of the time.
        self.socket.heartbeat_ivl = interval = max(1, int(250 * timeout_s))
        self.socket.heartbeat_timeout = 2 * interval
        if endpoint.startswith("ipc://"):  # another user's process is not heard
            self.socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot listen on endpoint {endpoint}: {error}") from None

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._heard))

    def receive(self) -> tuple[bytes, bytes] | None:
        """Return the next message and who sent it; None if there is none now."""
        try:
            client, *frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self._heard[client] = time.monotonic()
        self._silent.discard(client)
        return client, b"".join(frames)

    def send(self, client: bytes, message: bytes) -> bool:
        """Send a message; return whether the client is there."""
        try:
            self.socket.send_multipart([client, message])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def number(self, client: bytes) -> int:
        """Return the number that stands for a client; it is used for no other one."""
        if client not in self._numbers:
            self._numbers[client] = self._num_numbers
            self._by_number[self._num_numbers] = client
            self._num_numbers += 1
        return self._numbers[client]

    def of_number(self, number: int) -> bytes:
        """Return the client of a number."""
        return self._by_number[number]

    def gone(self, ask: Callable[[bytes], bool]) -> list[bytes]:
        """Return the silent clients that are not connected any more. `ask` sends a client something
        and returns whether it is there."""
        oldest = time.monotonic() - self.timeout_s
        lost = []
        for client in [client for client, heard in self._heard.items() if heard < oldest]:
            if not ask(client):
                lost.append(client)
                continue
            self._heard[client] = oldest + _LOOK_EVERY_S  # it is looked again then
            if client not in self._silent:
                self._silent.add(client)
                logger.warning(
                    "a client has said nothing for %g s; its process is there: its requests go on",
                    self.timeout_s,
                )
        return lost

    def forget(self, client: bytes) -> None:
        """Forget a client that is gone, and its number."""
        del self._heard[client]
        self._silent.discard(client)
        self._by_number.pop(self._numbers.pop(client, -1), None)

    def close(self) -> None:
        """Close the socket once the last messages have left, or LINGER_MS after."""
        self._context.destroy(linger=LINGER_MS)
