"""Bodies on their way in: how large, how slow, and how many bytes of them all at once.

Counts what has arrived and not what was announced, so nobody can take room by announcing much.
A body counts until its request is answered, since so long it is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import Message, Receive

from engine.errors import BodyTooLarge, BodyTooSlow, Overloaded

LEAST_BYTES_PER_S = 16 * 1024
"""Each of so many bytes that has arrived gives the rest of a body another second."""


class Intake:
    """What one process holds of bodies."""

    def __init__(
        self,
        max_body_bytes: int,
        max_held_bytes: int,
        timeout_s: float,
        retry_after_s: Callable[[], int],
    ) -> None:
        self.held_bytes = 0
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        self._timeout_s = timeout_s
        self._retry_after_s = retry_after_s

    def check_announced(self, content_length: str) -> None:
        """Refuse before anything is read what would be refused then."""
        if content_length.isdecimal() and int(content_length[:19]) > self._max_body_bytes:
            raise self._too_large()
        if content_length not in {"", "0"}:
            self._check_room()

    def _check_room(self) -> None:
        if self.held_bytes > self._max_held_bytes:
            raise Overloaded(
                f"requests hold {self.held_bytes} of at most {self._max_held_bytes} bytes",
                self._retry_after_s(),
            )

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is larger than {self._max_body_bytes} bytes")

    def body(self, receive: Receive) -> Body:
        """One request's body; to be closed when the request is answered."""
        return Body(self, receive)

    def count(self, body: Body, size: int) -> None:
        """More of a body has arrived. Raises BodyTooLarge and Overloaded."""
        self.held_bytes += size
        body.num_bytes += size
        if body.num_bytes > self._max_body_bytes:
            raise self._too_large()
        self._check_room()

    def time_left_s(self, body: Body, elapsed_s: float) -> float:
        return self._timeout_s + body.num_bytes / LEAST_BYTES_PER_S - elapsed_s


class Body:
    """The `receive` of one request, watched."""

    def __init__(self, intake: Intake, receive: Receive) -> None:
        self.num_bytes = 0
        self._intake = intake
        self._receive = receive
        self._began = asyncio.get_running_loop().time()
        self._is_whole = False

    async def __call__(self) -> Message:
        """The next message. Raises BodyTooSlow, BodyTooLarge and Overloaded until the last."""
        if self._is_whole:
            return await self._receive()
        elapsed_s = asyncio.get_running_loop().time() - self._began
        try:
            async with asyncio.timeout(self._intake.time_left_s(self, elapsed_s)):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(f"only {self.num_bytes} bytes of the body came in time") from None
        if message["type"] == "http.request":
            self._is_whole = not message.get("more_body", False)
            self._intake.count(self, len(message.get("body", b"")))
        return message

    def close(self) -> None:
        """The body is kept no longer."""
        self._intake.held_bytes -= self.num_bytes
        self.num_bytes = 0
