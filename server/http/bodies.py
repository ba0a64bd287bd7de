"""Reads request bodies and writes JSON replies; limits bodies: how large, how slow, and how many
bytes of them at once.

The limits count what has arrived and not what was announced, so nobody can take room by announcing
much. A body counts until its request is answered, since it is kept that long. An uploaded file goes
to disk as it comes: it may be larger and takes no room here.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope

from srm.engine.errors import Overloaded
from srm.server.errors import BodyTooLarge, BodyTooSlow, WrongContentType
from srm.server.schema.json_parts import SMALL

T = TypeVar("T")
_large_bodies = ThreadPoolExecutor(1, thread_name_prefix="large bodies")
"""One thread, so that however many come at once the event loop shares the interpreter with one."""

FORMS = {"application/x-www-form-urlencoded", "multipart/form-data", "text/plain"}
"""Content types that a browser lets any page send to any server, without asking first."""


async def read_body(request: Request, limit: int) -> bytes:
    """Return the request's JSON body. Raises WrongContentType, and BodyTooLarge at once."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() in FORMS:
        raise WrongContentType(
            f"content-type must be application/json; got {given[:80]!r} (curl -d sends that unless "
            "there is -H 'Content-Type: application/json')",
            "content-type",
        )
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(f"the body is larger than {limit} bytes")
    return bytes(body)


async def parsed(parse: Callable[[bytes], T], body: bytes) -> T:
    """Return what `parse` makes of a body; of a large one in a thread, while others are answered.
    Raises what it raises."""
    if len(body) <= SMALL:
        return parse(body)
    return await asyncio.get_running_loop().run_in_executor(_large_bodies, parse, body)


def json_reply(reply: bytes | msgspec.Struct) -> Response:
    """Return the reply of this JSON, or of a struct's."""
    body = reply if isinstance(reply, bytes) else msgspec.json.encode(reply)
    return Response(body, media_type="application/json")


LEAST_BYTES_PER_S = 16 * 1024
"""Every so many bytes that arrive give back a second of a body's time limit, and never more than
was used of it: what has arrived buys no later silence."""

FORM_BYTES = 64 * 1024
"""Most bytes of an upload besides the file: the other fields, and what separates them."""
UPLOADS = "/v1/files"
"""Path where the body of a POST is a form with a file."""


def is_upload(scope: Scope) -> bool:
    return bool(scope["path"] == UPLOADS and scope["method"] == "POST")


class BodyLimits:
    """Limits the request bodies that one process holds."""

    def __init__(
        self,
        max_body_bytes: int,
        max_held_bytes: int,
        timeout_s: float,
        retry_after_s: Callable[[], int],
        max_file_bytes: int = 0,
    ) -> None:
        self.held_bytes = 0
        self.held_by: Counter[str] = Counter()
        """Bytes held for each key, by its name."""
        self._max_file_bytes = max_file_bytes
        self._max_body_bytes = max_body_bytes
        self._max_held_bytes = max_held_bytes
        self.timeout_s = timeout_s
        self._retry_after_s = retry_after_s

    def check_announced(
        self, content_length: str, is_upload: bool = False, owner: str = ""
    ) -> None:
        """Refuse a body by its content-length, before it is read, if it would be refused then.
        Raises BodyTooLarge and Overloaded."""
        num_bytes = int(content_length[:19]) if content_length.isdecimal() else 0
        if num_bytes > self.limit(is_upload):
            raise self.too_large(is_upload)
        if content_length not in {"", "0"} and not is_upload:
            self.check_room(owner)

    def limit(self, is_upload: bool) -> int:
        """Return the most bytes of a body; for an upload, of the file and the form around it."""
        return self._max_file_bytes + FORM_BYTES if is_upload else self._max_body_bytes

    def check_room(self, owner: str = "", own_bytes: int = 0) -> None:
        """Raise Overloaded if all hold too much, or one key more than half of it in other bodies
        than one of `own_bytes`: a key's first body always has its part. Without keys, `owner` is
        empty and there is no such part."""
        if self.held_bytes > self._max_held_bytes:
            raise Overloaded(
                f"requests hold {self.held_bytes} of at most {self._max_held_bytes} bytes",
                self._retry_after_s(),
            )

        held, part = self.held_by[owner], self._max_held_bytes // 2
        if owner and held > part and held > own_bytes:
            raise Overloaded(
                f"requests of this key hold {held} of at most {part} bytes", self._retry_after_s()
            )

    def too_large(self, is_upload: bool) -> BodyTooLarge:
        if is_upload:
            return BodyTooLarge(f"the file is larger than max_file_bytes = {self._max_file_bytes}")
        return BodyTooLarge(f"the body is larger than {self._max_body_bytes} bytes")


class CountedBody:
    """The `receive` of one request, with limits on size and time; it must be closed in the end."""

    def __init__(self, limits: BodyLimits, receive: Receive, is_upload: bool = False) -> None:
        self.num_bytes = 0
        self.is_upload = is_upload
        self.owner = ""
        """Name of the key that sends it; set before it is read."""
        self._limits = limits
        self._receive = receive
        self.left_s = limits.timeout_s
        """Seconds that may still be waited for its bytes."""
        self._is_whole = False

    async def __call__(self) -> Message:
        """Return the next message. Raises BodyTooSlow, BodyTooLarge, Overloaded until the last."""
        if self._is_whole:
            return await self._receive()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(self.left_s):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(f"only {self.num_bytes} bytes of the body came in time") from None
        if message["type"] == "http.request":
            self._is_whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            self.spend(loop.time() - began, size)
            self._count(size)
        return message

    def spend(self, waited_s: float, size: int) -> None:
        """Take the seconds that these bytes were waited for, and give back what they are worth."""
        left_s = self.left_s - waited_s + size / LEAST_BYTES_PER_S
        self.left_s = min(left_s, self._limits.timeout_s)

    def close(self) -> None:
        """Stop counting the body as held."""
        if not self.is_upload:
            self._hold(-self.num_bytes)
        self.num_bytes = 0

    def _count(self, size: int) -> None:
        self.num_bytes += size
        if not self.is_upload:
            self._hold(size)
        if self.num_bytes > self._limits.limit(self.is_upload):
            raise self._limits.too_large(self.is_upload)
        if not self.is_upload:
            self._limits.check_room(self.owner, self.num_bytes)

    def _hold(self, size: int) -> None:
        self._limits.held_bytes += size
        self._limits.held_by[self.owner] += size
        if not self._limits.held_by[self.owner]:
            del self._limits.held_by[self.owner]
