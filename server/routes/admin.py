"""The operator's routes: other weights, a snapshot, what is in use. `server.http.auth` guards them.

A folder of weights must have the tokenizer and chat template that the API processes have loaded,
which is checked here. The weights themselves are the engine's business.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Annotated, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from srm.engine.client.client import EngineClient
from srm.engine.messages import Done, Running
from srm.errors import CheckpointError, InvalidRequest, SwapInProgress
from srm.server.config import ServerConfig
from srm.server.http.responses import add_operations
from srm.server.schema.openapi import BodySchema, Operation, Router
from srm.server.schema.validation import Fields, checked, given_fields, require, show
from srm.server.text.tokenizer_files import chat_template, special_tokens
from srm.tokenizer_file import read_tokenizer

MAX_BODY_BYTES = 64 * 1024
_CHOICES = ", ".join(f'"{arg}"' for arg in get_args(Running))


_Reply = TypeVar("_Reply", bound=msgspec.Struct)


class WeightsRequest(Fields, frozen=True, kw_only=True):
    """Body of POST /v1/admin/weights, checked."""

    path: Annotated[str, Meta(min_length=1, max_length=4096, description="a folder's path")]
    """Model folder on the server's machine."""
    running: Annotated[Running, Meta(description=f"one of {_CHOICES}")] = "finish"
    """What running sequences do."""


class WeightsReply(msgspec.Struct, kw_only=True):
    """The weights are in use."""

    path: str
    """The path as it was read: absolute, with links followed."""
    running: str
    weights_version: int
    """1 is what the server began with."""
    fingerprint: str
    """Fingerprint of config and weights: the `system_fingerprint` of replies."""
    seconds: float
    """Seconds from the request to the first step with these weights."""
    pause_seconds: float
    """Part of `seconds` in which no step was made."""


class SnapshotReply(msgspec.Struct, kw_only=True):
    """The progress of batches' requests is on disk."""

    path: str | None = None
    """The file; null where no sequence of a batch had begun, and nothing was written. Of several
    engines the first one's that wrote one: the others' are in `engine-1`, … of `snapshot_dir`."""
    requests: int
    sequences: int
    bytes: int
    seconds: float
    read_s: float
    """Part of `seconds` in which states were read and no step was made."""
    write_s: float
    """Part of `seconds` in which the file was written, while steps were made."""


class OneEngine(msgspec.Struct, kw_only=True):
    """An engine's last report of its state, at most a second old."""

    state: str
    """`ready` or `draining`."""
    weights_version: int
    fingerprint: str
    num_slots: int
    running: int
    """Sequences that hold a slot."""
    waiting: int
    """Sequences accepted and not yet started."""
    steps: int
    changing: str
    """Folder of the weights that a change is under way to; empty: none is."""
    held_s: float
    """Seconds for which nothing has started because of it; 0 where things start."""


class EngineState(OneEngine, kw_only=True):
    """The engine's last report of its state, at most a second old."""

    engines: list[OneEngine | None] | UnsetType = UNSET
    """State of each engine, where there are several; null for one that cannot be reached. The other
    fields are then sums, but `weights_version` and `fingerprint` are those of the newest
    weights."""


OPERATIONS = (
    Operation("POST", "/v1/admin/weights", "Go on with other weights of the same architecture.",
              WeightsReply, body=BodySchema(WeightsRequest), errors=(403, 404, 409, 507)),
    Operation("POST", "/v1/admin/snapshot",
              "Write how far the requests of batches are to disk, now.",
              SnapshotReply, errors=(403, 404)),
    Operation("GET", "/v1/admin/state", "What the engine runs, and with which weights.",
              EngineState, errors=(403, 404)),
)  # fmt: skip


class Admin:
    """Answers the operator."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        """Remembers what the API processes have loaded from the model's folder."""
        self._client = client
        self._weights_dir = config.weights_dir
        self._served = _text_of(config.model, bool(config.chat_template))
        self._has_own_template = bool(config.chat_template)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights folder")
        self._reading: tuple[str, Future[Path]] | None = None

    async def load_weights(self, body: bytes) -> WeightsReply:
        """Raises the SRMError to answer with; then nothing has changed."""
        given = given_fields(body, WeightsRequest, {})
        require(given, "path", "a model folder on the server's machine")
        return await self.change(checked(WeightsRequest, given, {}, {}))

    async def change_as(self, path: str, running: Running, label: str) -> int:
        """The same for a trainer, who may call these weights something: their version."""
        reply = await self.change(WeightsRequest(path=path, running=running), label)
        return reply.weights_version

    async def change(self, request: WeightsRequest, label: str = "") -> WeightsReply:
        """Put the weights of a folder to use. Raises as `load_weights`."""
        if self._reading is not None and not self._reading[1].done():
            # Its disk may be dead: who waited behind it would wait for ever.
            raise SwapInProgress(
                f"path = {show(request.path)}: another change's path = {show(self._reading[0])} is "
                "still being read; one is read at a time"
            )
        reading = self._thread.submit(self.check_folder, request.path)
        self._reading = request.path, reading
        folder = await asyncio.wrap_future(reading)
        within = str(self._within(folder).resolve())
        done = await self._client.load_weights(str(folder), request.running, label, within)
        return _reply(WeightsReply, done, path=str(folder), running=request.running)

    async def snapshot(self) -> SnapshotReply:
        """Raises SnapshotError if it cannot be written, and EngineUnavailable."""
        return _reply(SnapshotReply, await self._client.snapshot())

    def state(self) -> EngineState:
        """Return the engine's state. Raises EngineUnavailable while it does not answer."""
        state = msgspec.convert(self._client.require_status(), EngineState, from_attributes=True)
        if len(self._client.engines) > 1:
            each = [engine.status for engine in self._client.engines]
            state.engines = msgspec.convert(each, list[OneEngine | None], from_attributes=True)
        return state

    def check_folder(self, path: str) -> Path:
        """Return the folder, if it may be used and has the served model's text files."""
        folder = resolved(path, self._weights_dir)
        try:
            text = _text_of(folder, self._has_own_template, self._within(folder))
        except (CheckpointError, OSError) as error:
            raise InvalidRequest(f"path = {show(path)}: {error}", "path") from None
        for name, value in text.items():
            if value and value != self._served.get(name, value):
                raise InvalidRequest(
                    f"path = {show(path)}: its {name} is not the one of the model that is served; "
                    "text would be read otherwise than it is written",
                    "path",
                )
        return folder

    def _within(self, folder: Path) -> Path:
        """Return the folder that links in `folder` may not lead outside of."""
        return Path(self._weights_dir).expanduser() if self._weights_dir else folder


def resolved(path: str, allowed: str) -> Path:
    """The folder that a path leads to, links followed; in the folder `allowed`, unless that is
    empty. A path that is not absolute begins there. Raises InvalidRequest."""
    if not allowed and not Path(path).is_absolute():
        raise InvalidRequest(f"path must be absolute; got {show(path)}", "path")
    try:
        root = Path(allowed).expanduser().resolve()
        folder = (root / path).resolve()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, circular links
        raise InvalidRequest(f"path = {show(path)} is no path: {error}", "path") from None
    if allowed and not folder.is_relative_to(root):
        raise InvalidRequest(f"path must lead into weights_dir; got {show(path)}", "path")
    return folder


def _text_of(folder: Path, has_own_template: bool, within: Path | None = None) -> dict[str, str]:
    """Return what API processes read from the folder, by its name in errors; empty if it is absent.

    A server that was given a chat template of its own ignores the folder's. Trainers write a
    tokenizer anew, with other spaces and their padding, and name special tokens that it had before.
    """
    tokenizer = folder / "tokenizer.json"
    text = read_tokenizer(tokenizer, within=within).to_str() if tokenizer.exists() else ""
    return special_tokens(folder, within) | {
        "tokenizer.json": sha256(text.encode()).hexdigest() if text else "",
        "chat template": "" if has_own_template else chat_template(folder, within=within) or "",
    }


def _reply(kind: type[_Reply], done: Done, **more: str) -> _Reply:
    return msgspec.convert({**done.detail, **more}, kind)


def add_routes(router: Router, admin: Admin) -> None:
    """Add the routes of this module."""
    actions = (admin.load_weights, admin.snapshot, admin.state)
    add_operations(router, OPERATIONS, actions, MAX_BODY_BYTES)
