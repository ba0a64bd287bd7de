"""`srm weights` and `srm snapshot`: ask a running server what only its operator may.

The reply goes to standard output as it came. The key is one of SRM_API_KEYS, where that is set: the
one named `admin`, or else the first. Knows the admin routes by their paths alone.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import httpx
import msgspec

from srm.engine.config import check_utf8, find_model
from srm.engine.messages import Running
from srm.errors import UNDECODABLE, ConfigError, SRMError
from srm.logs import printable
from srm.progress import count_seconds
from srm.server.http.auth import OPERATOR_KEY
from srm.server.http.keys import key_to_send
from srm.settings import Command, build, load, read_settings

_URL = "http://127.0.0.1:8000"


class WeightsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm weights`."""

    path: str = ""
    """Model folder on the server's machine, named with or without the flag."""
    running: Running = "finish"
    """Treatment of running sequences: they continue with the new weights, are fed to them again,
    end with their tokens so far, are dropped with an error, or finish before the change."""
    url: str = _URL
    """Address of the server, or of its admin_port where it has one."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("path is missing: srm weights FOLDER")
        check_utf8("path", self.path)


class SnapshotConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm snapshot`."""

    url: str = _URL
    """Address of the server, or of its admin_port where it has one."""


def weights(argv: list[str]) -> int:
    """Have a server change its weights; returns when it has. Raises SRMError if it does not."""
    command = Command(
        "srm weights",
        "Have a running server change its weights, without a stop.",
        "srm weights runs/grpo --url http://127.0.0.1:8001",
        positional="path",
    )
    settings = read_settings((WeightsConfig,), argv, command)
    config = build(WeightsConfig, settings)
    # The server may be started elsewhere, but the paths of the machine are the same.
    body = {"path": str(find_model(Path(config.path)).absolute()), "running": config.running}
    return _post(config.url, "/v1/admin/weights", body)


def snapshot(argv: list[str]) -> int:
    """Have a server write a snapshot; returns when it is on disk. Raises SRMError if it is not."""
    command = Command(
        "srm snapshot", "Have a running server write how far its batches are to disk, now."
    )
    config = load(SnapshotConfig, argv, prog=command)
    return _post(config.url, "/v1/admin/snapshot", None)


def _post(url: str, path: str, body: dict[str, Any] | None) -> int:
    key = key_to_send(os.environ, OPERATOR_KEY)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        # As long as it takes: what runs may be waited for.
        with count_seconds(f"waiting for {url}"):
            reply = httpx.post(url.rstrip("/") + path, json=body, headers=headers, timeout=None)
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"url = {url!r}: {error}") from None
    except httpx.TransportError as error:
        raise SRMError(f"{url} does not answer: {error}") from None
    except httpx.HTTPError as error:
        raise SRMError(f"{url} answered with what cannot be read: {error}") from None
    reply.encoding = "utf-8"  # not what it says: that may be no encoding of text
    if reply.is_success:
        sys.stdout.write(printable(reply.text) + "\n")
        return 0
    try:
        why = reply.json()["error"]["message"]
    except (*UNDECODABLE, LookupError, TypeError):
        why = reply.text[:200]
    raise SRMError(f"{url} refused with {reply.status_code}: {why}")
