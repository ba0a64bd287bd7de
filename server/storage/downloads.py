"""A file as a reply, whole or as a byte range, so that a download can be resumed.

The file is open before the reply begins: one that is deleted meanwhile is still sent whole.
"""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import Future, ThreadPoolExecutor
from http import HTTPStatus
from typing import BinaryIO
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from srm.server.http.request_middleware import IS_HEAD

CHUNK_BYTES = 256 * 1024
"""Bytes read at once."""
_RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")


class Download(Response):
    """Sends an open file, and closes it."""

    media_type = "application/octet-stream"

    def __init__(
        self, file: BinaryIO, num_bytes: int, tag: str, filename: str, threads: ThreadPoolExecutor
    ) -> None:
        """`tag` differs for different bytes."""
        super().__init__(
            headers={
                "accept-ranges": "bytes",
                "etag": f'"{tag}"',
                "content-disposition": f"attachment; filename*=utf-8''{quote(filename, safe='')}",
                "x-content-type-options": "nosniff",
            }
        )
        self._file = file
        self._num_bytes = num_bytes
        self._threads = threads
        self._last: Future[bytes] | None = None
        """The read that a thread does, or did last."""

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            begin, end = self.parse_range(Headers(scope=scope))
            self.headers["content-length"] = str(end - begin)
            is_part = (begin, end) != (0, self._num_bytes)
            if is_part:
                self.headers["content-range"] = f"bytes {begin}-{end - 1}/{self._num_bytes}"
            status = HTTPStatus.PARTIAL_CONTENT if is_part else HTTPStatus.OK
            start = {"type": "http.response.start", "status": status, "headers": self.raw_headers}
            await send(start)
            while begin < end and not scope.get(IS_HEAD):
                data = await self._read(begin, min(CHUNK_BYTES, end - begin))
                if not data:
                    raise RuntimeError("the file has become shorter")  # the connection breaks
                begin += len(data)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            self.close()

    def close(self) -> None:
        """Close the file once no thread reads it."""
        if self._last is None:
            self._file.close()
        else:
            self._last.add_done_callback(lambda _: self._file.close())

    async def _read(self, at: int, num_bytes: int) -> bytes:
        def read() -> bytes:
            self._file.seek(at)
            return self._file.read(num_bytes)

        self._last = self._threads.submit(read)
        return await asyncio.wrap_future(self._last)

    def parse_range(self, headers: Headers) -> tuple[int, int]:
        """Return the first byte to send and the one after the last.

        That is the whole file unless one range of this very file is asked for. Raises HTTPException
        for a range that the file does not have.
        """
        match = _RANGE.fullmatch(headers.get("range", "").strip().replace(" ", ""))
        if match is None or not any(match.groups()):
            return 0, self._num_bytes
        if headers.get("if-range", self.headers["etag"]) != self.headers["etag"]:
            return 0, self._num_bytes
        first, last = match.groups()
        if first:
            begin = _number(first)
            end = min(_number(last) + 1, self._num_bytes) if last else self._num_bytes
            if last and _number(last) < begin:  # no range at all, and so as if it were not there
                return 0, self._num_bytes
        else:
            begin, end = max(self._num_bytes - _number(last), 0), self._num_bytes
        if begin >= end:
            raise HTTPException(
                HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
                f"range must lie in the file's {self._num_bytes} bytes",
                {"content-range": f"bytes */{self._num_bytes}"},
            )
        return begin, end


def _number(digits: str) -> int:
    """Parse any number of digits, which `int` does not: 19 of them are beyond every file."""
    return int(digits.lstrip("0")[:19] or 0)
