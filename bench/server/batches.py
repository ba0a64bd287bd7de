"""A client's view of a batch, for benchmarks: uploaded, started, waited for, read.

Holds no file in memory.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.errors import ConfigError

_POLL_S = 0.1
_RUNNING = {"validating", "in_progress", "finalizing", "cancelling"}


def write_lines(path: Path, count: int, max_tokens: int, **body: Any) -> None:
    """Write an input file of short lines, each a completion of exactly `max_tokens` tokens."""
    encode = msgspec.json.Encoder().encode
    with path.open("wb") as file:
        for number in range(count):
            line = {
                "custom_id": f"line {number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "prompt": f"{number} + {number % 97} =",
                    "max_tokens": max_tokens,
                    "ignore_eos": True,
                    **body,
                },
            }
            file.write(encode(line) + b"\n")


class BatchClient:
    """The client of one server. Raises ConfigError if the server refuses a request."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=3600)

    def __enter__(self) -> BatchClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def start(self, path: Path) -> str:
        """Upload a file and start it as a batch; return its id."""
        with path.open("rb") as file:
            upload = {"file": ("in.jsonl", file, "application/jsonl")}
            source = self._ask("POST", "/v1/files", files=upload, data={"purpose": "batch"})
        fields = {
            "input_file_id": source["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        }
        return str(self._ask("POST", "/v1/batches", json=fields)["id"])

    def get(self, id: str) -> dict[str, Any]:
        return self._ask("GET", f"/v1/batches/{id}")

    def wait(self, id: str) -> dict[str, Any]:
        """Wait for the batch's end and return it."""
        while (batch := self.get(id))["status"] in _RUNNING:
            time.sleep(_POLL_S)
        return batch

    def cancel(self, id: str) -> None:
        self._ask("POST", f"/v1/batches/{id}/cancel")

    def download(self, file_id: str) -> tuple[int, int]:
        """Download a file without keeping it; return its number of lines and bytes."""
        lines = size = 0
        with self._http.stream("GET", f"/v1/files/{file_id}/content") as reply:
            for part in reply.iter_bytes():
                lines += part.count(b"\n")
                size += len(part)
        return lines, size

    def _ask(self, method: str, path: str, **given: Any) -> dict[str, Any]:
        reply = self._http.request(method, path, **given)
        if reply.status_code != 200:
            raise ConfigError(f"{method} {path}: {reply.status_code} {reply.text}")
        found: dict[str, Any] = reply.json()
        return found
