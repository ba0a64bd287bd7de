"""A batch file of requests, sent through OpenAI's /v1/files and /v1/batches, and its results.

Holds no file in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from srm.errors import UNDECODABLE, ConfigError
from srm.files import open_file

_POLL_S = 0.25
_TIMEOUT_S = 60.0
UNDER_WAY = {"validating", "in_progress", "finalizing", "cancelling"}


class BatchOutput(msgspec.Struct):
    """Totals over the lines of output files."""

    lines: int = 0
    """Lines answered with 200, and with tokens as far as the server counts them."""
    failed: int = 0
    choices: int = 0
    prompt_tokens: int = 0
    """According to the lines' `usage`."""
    output_tokens: int = 0
    without_usage: int = 0
    """Lines without usage, whose tokens are unknown."""
    num_bytes: int = 0
    first_error: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[msgspec.Raw] | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw = msgspec.Raw()


class _Line(msgspec.Struct):
    response: _Response | None = None
    error: Any = None


def write_lines(path: Path, route: str, bodies: Iterable[dict[str, Any]]) -> None:
    """Write an input file for a `route` such as /v1/completions."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for count, body in enumerate(bodies, 1):
            line = {"custom_id": str(count), "method": "POST", "url": route, "body": body}
            file.write(encode(line) + b"\n")


class BatchClient:
    """The client of one server. Raises ConfigError if the server refuses or cannot be reached."""

    def __init__(
        self, url: str, api_key: str = "", transport: httpx.BaseTransport | None = None
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(
            base_url=url, timeout=_TIMEOUT_S, headers=headers, transport=transport
        )
        self._url = url

    def __enter__(self) -> BatchClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def upload(self, path: Path) -> str:
        """Upload the file and return its id."""
        with open_file(path) as file:
            form = {"file": (path.name, file, "application/jsonl")}
            return str(self._ask("POST", "/v1/files", files=form, data={"purpose": "batch"})["id"])

    def start(self, file_id: str, route: str) -> str:
        """Start a batch and return its id."""
        fields = {"input_file_id": file_id, "endpoint": route, "completion_window": "24h"}
        return str(self._ask("POST", "/v1/batches", json=fields)["id"])

    def wait(self, id: str, on_progress: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
        """Wait for the batch's end and return it; `on_progress` gets each polled state."""
        while True:
            batch = self._ask("GET", f"/v1/batches/{id}")
            on_progress(batch)
            if batch["status"] not in UNDER_WAY:
                return batch
            time.sleep(_POLL_S)

    def cancel(self, id: str) -> None:
        self._ask("POST", f"/v1/batches/{id}/cancel")

    def delete(self, file_id: str) -> None:
        self._ask("DELETE", f"/v1/files/{file_id}")

    def read(self, file_id: str, output: BatchOutput) -> None:
        """Add up the lines of an output or error file, as they come."""
        decode = msgspec.json.Decoder(_Line).decode
        path = f"/v1/files/{file_id}/content"
        try:
            with self._http.stream("GET", path) as reply:
                if reply.status_code != 200:
                    raise ConfigError(f"GET {self._url}{path}: {reply.status_code}")
                rest = b""
                for part in reply.iter_bytes():
                    output.num_bytes += len(part)
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        _count(line, decode(line), output)
                if rest.strip():
                    _count(rest, decode(rest), output)
        except (httpx.HTTPError, *UNDECODABLE) as error:
            raise ConfigError(f"GET {self._url}{path}: {error}") from None

    def _ask(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        try:
            reply = self._http.request(method, path, **given)
            entries: dict[str, Any] = reply.json() if reply.status_code == 200 else {}
        except (httpx.HTTPError, *UNDECODABLE) as error:
            raise ConfigError(f"{method} {self._url}{path}: {error}") from None
        if reply.status_code != 200:
            decoded = reply.content[:300].decode(errors="replace")
            raise ConfigError(f"{method} {self._url}{path}: {reply.status_code} {decoded}")
        return entries


def _count(raw: bytes, line: _Line, output: BatchOutput) -> None:
    body, response = _Body(), line.response
    if response is not None and response.status_code == 200:
        body = msgspec.json.decode(response.body, type=_Body)
    if not body.choices or (body.usage and body.usage.completion_tokens == 0):
        output.failed += 1
        output.first_error = output.first_error or raw.decode(errors="replace")[:300]
        return
    output.lines += 1
    output.choices += len(body.choices)
    if body.usage is None or body.usage.completion_tokens is None:
        output.without_usage += 1
    else:
        output.prompt_tokens += body.usage.prompt_tokens or 0
        output.output_tokens += body.usage.completion_tokens
