"""Other weights while serving: loaded beside the steps, put to use between two of them.

Keeps: one change at a time; whatever is wrong with a folder is found before anything stops, and the
old weights go on; the note tells the engine's successor what was put to use, and nothing else.

Of several engines, the first to write the note has decided for all: one that has the same change
staged makes it, and one that has not starts again with it. What is staged and not decided belongs
to the client that asked, and ends with it.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from engine import metrics
from engine.config import EngineConfig, ModelConfig, parse_model_config
from engine.errors import (
    UNDECODABLE,
    CheckpointError,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    SRMError,
    StepFailed,
    SwapInProgress,
)
from engine.messages import AboutWeights, Done, HoldWeights, LoadWeights, Status
from engine.process.engine import Engine
from engine.weights.tensor_file import read_file
from engine.weights.weights import Weights

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""Seconds after the last word of the client that wants a staged change at which it is dropped."""
WATCH_S = 60.0
"""Seconds between two lines of the log that say for how long nothing has started."""

LoadFolder = Callable[[Path], Weights]  # reads a model folder; raises CheckpointError


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights in use after a change, with which a restarted engine begins."""

    path: str
    fingerprint: str
    weights_version: int
    change: str
    """Id of the message that asked for them."""


class Swaps:
    """Changes of an engine's weights, one at a time."""

    def __init__(self, engine: Engine, load: LoadFolder, note: str) -> None:
        """`note`: the file that a restarted engine reads; if empty, it begins as this one did."""
        self._engine = engine
        self._load = load
        self._note = note
        self._prepared = Path(f"{note}.{uuid.uuid4().hex}")
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load weights")
        self._message: LoadWeights | None = None
        self._loading: Future[Weights] | None = None
        self._asked = 0.0
        self.is_prepared = False
        """Whether the change can be made; one that is staged is not, before it is committed."""
        self._is_told = self._is_committed = False
        self.lease_s = LEASE_S
        """Seconds after which a staged change is dropped if its client has not said `hold`."""
        self._held_until = 0.0  # by the last word of the client
        self._held_at: float | None = None  # since when nothing starts
        self._say_at = 0.0  # when to log that next
        self._done = Done("")  # the last change that was made
        self._note_seen = (0, 0)  # file and time of the note that was last read

    @property
    def current(self) -> LoadWeights | None:
        """The change that is under way."""
        return self._message

    @property
    def held_s(self) -> float:
        """Seconds for which nothing has started because of a change; 0 where things start."""
        return 0.0 if self._held_at is None else time.monotonic() - self._held_at

    def told_in(self, status: Status) -> Status:
        """Return the engine's status with what there is to say of a change."""
        metrics.HELD_SECONDS.set(self.held_s)
        path = "" if self._message is None else self._message.path
        return msgspec.structs.replace(status, changing=path, held_s=self.held_s)

    def receive(self, message: AboutWeights) -> Done | None:
        """Take in a client's message; return the answer if there is one already. Raises the
        RequestError or EngineUnavailable to refuse it with."""
        if isinstance(message, LoadWeights):
            self.begin(message)
        elif isinstance(message, HoldWeights):
            self.hold(message.id)
        elif self._done.id == message.id:  # another engine's note has said so before
            return self._done
        else:
            self.commit(message.id)
        return None

    def begin(self, message: LoadWeights) -> None:
        """Start to load. Raises the RequestError that says why not."""
        if self._message is not None:
            metrics.WEIGHT_SWAPS.labels("refused").inc()
            raise SwapInProgress(
                f"the weights are being changed for those in {self._message.path!r}: ask again "
                "when they are"
            )
        self._message, self._asked = message, time.monotonic()
        self.hold(message.id)
        logger.info("loading weights from %s", message.path)
        self._loading = self._loader.submit(
            load_weights, self._load, Path(message.path), self._engine.model
        )

    def hold(self, message_id: str) -> None:
        """Note that a client still wants the change of this id."""
        if self._message is not None and self._message.id == message_id:
            self._held_until = time.monotonic() + self.lease_s

    def commit(self, message_id: str) -> None:
        """Have the staged change of this id made. Raises EngineUnavailable where there is none."""
        if self._message is None or self._message.id != message_id or not self.is_prepared:
            raise EngineUnavailable("there are no weights of this id to put to use")
        self._is_committed = True

    def take_staged(self) -> Done | None:
        """Return what tells the client that a staged change can be made, once."""
        if not self.is_prepared or self._is_told or self._message is None:
            return None
        self._is_told = True
        return Done(self._message.id, {"weights_version": self._engine.weights_version + 1})

    def check_wanted(self, has_owner: bool, is_draining: bool) -> None:
        """Drop a change that nobody is to wait for any more, and raise EngineUnavailable with the
        reason. One that is not staged is made though its client is gone."""
        assert self._message is not None
        is_late = time.monotonic() >= self._held_until
        if is_draining:
            why = "the engine is draining and keeps its weights"
        elif self._message.is_staged and (is_late or not has_owner):
            why = "the process that changes them has gone, or not all engines can"
        else:
            return
        logger.warning("weights from %s are not put to use: %s", self._message.path, why)
        self._end("refused")
        self._prepared.unlink(missing_ok=True)
        raise EngineUnavailable(why)

    def is_due(self) -> bool:
        """Whether `make` is to be called, now that a step is over; of what is staged, not before it
        is committed, here or by another engine.

        Raises an error, and drops the change, if the folder is unusable or the note cannot be
        written; StepFailed as `check_note` does.
        """
        if self._loading is None or not self._loading.done():
            return False
        assert self._message is not None
        if error := self._loading.exception():
            self._end("refused")
            raise error
        if self._message.running == "finish":
            self._hold_back()
            if not self._engine.scheduler.is_quiet:
                return False
        if not self.is_prepared:
            self._prepare(self._message, self._loading.result())
            self.is_prepared = True
        self.check_note()
        return self._is_committed or not self._message.is_staged

    def check_note(self) -> None:
        """Look whether the engines beside this one use newer weights: those that are staged here
        are put to use here too; for others, as when this engine started while they changed, it
        raises StepFailed, and its successor begins with these."""
        note = self._new_note()
        if note is None or note.weights_version <= self._engine.weights_version:
            return
        if self._message is None or self._message.id != note.change:
            raise StepFailed(
                f"the other engines use weights version {note.weights_version}, and this one has "
                f"{self._engine.weights_version}: it starts again"
            )
        self._is_committed = self.is_prepared

    def _new_note(self) -> Note | None:
        """Return the note if it is another one than when this was last called."""
        path = Path(self._note)
        if not self._note or not path.exists() or (self._message and not self.is_prepared):
            return None
        found = path.stat()
        if self._note_seen == (seen := (found.st_ino, found.st_mtime_ns)):
            return None
        self._note_seen = seen
        try:
            return msgspec.json.decode(path.read_bytes(), type=Note)
        except UNDECODABLE:
            return None  # whoever starts next says so

    def _hold_back(self) -> None:
        """Let nothing start until the change is made or dropped, and say so while it lasts."""
        now = time.monotonic()
        if self._held_at is None:
            self._engine.scheduler.is_held = True
            self._held_at, self._say_at = now, now + WATCH_S
        elif now >= self._say_at:
            self._say_at = now + WATCH_S
            running = self._engine.status().running
            what = f"{running} sequences to end" if running else "the other engines"
            logger.warning("nothing has started for %.0f s: %s are waited for", self.held_s, what)

    def make(self) -> Done:
        """Put the loaded weights to use; the engine must be settled."""
        assert self._message is not None and self._loading is not None
        message, weights, started = self._message, self._loading.result(), time.monotonic()
        self._engine.load_weights(weights)
        if self._note:
            self._prepared.replace(self._note)
        now = time.monotonic()
        detail: dict[str, str | int | float] = {
            "weights_version": self._engine.weights_version,
            "fingerprint": weights.fingerprint,
            "seconds": round(now - self._asked, 6),
            "pause_seconds": round(now - started, 6),
        }
        metrics.WEIGHT_SWAP_SECONDS.observe(now - started)
        logger.info("weights version %d from %s", self._engine.weights_version, message.path)
        self._end("done")
        self._done = Done(message.id, detail)
        return self._done

    def close(self) -> None:
        """Wait for what is being loaded, and drop it."""
        self._loader.shutdown()

    def _prepare(self, message: LoadWeights, weights: Weights) -> None:
        """Write the note to a file beside its place: a failure comes before anything is changed."""
        version = self._engine.weights_version + 1
        note = Note(message.path, weights.fingerprint, version, message.id)
        try:
            if self._note:
                self._prepared.write_bytes(msgspec.json.encode(note))
        except OSError as error:
            self._end("refused")
            raise SRMError(f"cannot write {self._prepared}: {error.strerror}") from None

    def _end(self, result: str) -> None:
        metrics.WEIGHT_SWAPS.labels(result).inc()
        self._engine.scheduler.is_held, self._held_at = False, None
        self._message = self._loading = None
        self.is_prepared = self._is_told = self._is_committed = False


def load_weights(load: LoadFolder, folder: Path, served: ModelConfig) -> Weights:
    """Load the weights in a folder, which must have the configuration that is served. Raises
    NotFound and InvalidRequest, of `path`."""
    if not folder.is_absolute():
        raise InvalidRequest(f"path must be absolute, got {str(folder)!r}", "path")
    if not folder.is_dir():
        raise NotFound(f"path = {str(folder)!r}: there is no such folder", "path")
    try:
        config_path = folder / "config.json"
        config = parse_model_config(config_path, read_file(config_path))
        _check_same(folder, config, served)  # before all the rest is read
        weights = load(folder)
    except CheckpointError as error:
        raise InvalidRequest(f"path = {str(folder)!r}: {error.message}", "path") from None
    except InvalidRequest:
        raise
    except Exception as error:  # whatever it is, those who are served have no part in it
        logger.exception("%s cannot be loaded", folder)
        raise InvalidRequest(
            f"path = {str(folder)!r} cannot be loaded: {error!r}", "path"
        ) from None
    _check_same(folder, weights.config, served)
    return weights


def _check_same(folder: Path, config: ModelConfig, served: ModelConfig) -> None:
    for name in ModelConfig.__struct_fields__:
        theirs, ours = getattr(config, name), getattr(served, name)
        if theirs != ours:
            raise InvalidRequest(
                f"path = {str(folder)!r}: {name} = {theirs!r} in its config.json, and the model "
                f"that is served has {ours!r}; weights are changed for those of the same "
                "architecture only",
                "path",
            )


def first_weights(config: EngineConfig, load: LoadFolder) -> tuple[Weights, int]:
    """Load the weights that an engine begins with, and their version: those of the model it is told
    to serve, or those that its predecessor changed to.

    Raises CheckpointError, also where the note is damaged or the latter's folder has changed.
    """
    path = Path(config.weights_note)
    if not config.weights_note or not path.exists():
        return load(config.model), 1
    try:
        note = msgspec.json.decode(path.read_bytes(), type=Note)
    except UNDECODABLE as error:
        raise CheckpointError(
            f"{path} should say which weights were in use before this process: {error}; give the "
            "model to serve, and start anew"
        ) from None
    what = f"weights version {note.weights_version}, in use before this process,"
    try:
        weights = load(Path(note.path))
    except CheckpointError as error:
        raise CheckpointError(f"{what} cannot be loaded again: {error.message}") from None
    if weights.fingerprint != note.fingerprint:
        raise CheckpointError(
            f"{what} were {note.fingerprint} in {note.path}, which has {weights.fingerprint} now"
        )
    logger.info("going on with weights version %d from %s", note.weights_version, note.path)
    return weights, note.weights_version
