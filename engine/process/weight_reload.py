"""Other weights while serving: loaded beside the steps, put to use between two of them.

Keeps: one change at a time; whatever is wrong with a folder is found before anything stops, and the
old weights go on; the note tells the engine's successor what was put to use, and nothing else.
"""

from __future__ import annotations

import logging
import os
import time
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
from engine.messages import Done, LoadWeights
from engine.process.engine import Engine
from engine.weights.tensor_file import read_file
from engine.weights.weights import Weights

logger = logging.getLogger(__name__)

LoadFolder = Callable[[Path], Weights]  # reads a model folder; raises CheckpointError


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights in use after a change, with which a restarted engine begins."""

    path: str
    fingerprint: str
    weights_version: int


class Swaps:
    """Changes of an engine's weights, one at a time."""

    def __init__(self, engine: Engine, load: LoadFolder, note: str) -> None:
        """`note`: the file that a restarted engine reads; if empty, it begins as this one did."""
        self._engine = engine
        self._load = load
        self._note = note
        self._prepared = Path(f"{note}.{os.getpid()}")
        self._loader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load weights")
        self._message: LoadWeights | None = None
        self._loading: Future[Weights] | None = None
        self._asked = 0.0
        self.is_prepared = False
        """Whether the change can be made; one that is staged is not, before it is committed."""
        self._is_committed = False
        self._note_seen = 0  # when the note was last written, in nanoseconds

    @property
    def current(self) -> LoadWeights | None:
        """The change that is under way."""
        return self._message

    def begin(self, message: LoadWeights) -> None:
        """Start to load. Raises the RequestError that says why not."""
        if self._message is not None:
            metrics.WEIGHT_SWAPS.labels("refused").inc()
            raise SwapInProgress(
                f"the weights are being changed for those in {self._message.path!r}: ask again "
                "when they are"
            )
        self._message, self._asked = message, time.monotonic()
        logger.info("loading weights from %s", message.path)
        self._loading = self._loader.submit(
            load_weights, self._load, Path(message.path), self._engine.model
        )

    def commit(self, message_id: str) -> None:
        """Have the staged change of this id made. Raises EngineUnavailable where there is none."""
        if self._message is None or self._message.id != message_id or not self.is_prepared:
            raise EngineUnavailable("there are no weights of this id to put to use")
        self._is_committed = True

    def is_due(self) -> bool:
        """Whether `make` is to be called, now that a step is over; of what is staged, not before it
        is committed.

        Raises an error, and drops the change, if the folder is unusable or the note cannot be
        written.
        """
        if self._loading is None or not self._loading.done():
            return False
        assert self._message is not None
        if error := self._loading.exception():
            self._end("refused")
            raise error
        if self._message.running == "finish":
            self._engine.scheduler.is_held = True
            if not self._engine.scheduler.is_quiet:
                return False
        if not self.is_prepared:
            self._prepare(self._message, self._loading.result())
            self.is_prepared = True
        return self._is_committed or not self._message.is_staged

    def drop(self) -> None:
        """Forget a staged change, since another engine cannot make it."""
        logger.warning("other weights are not put to use: not all engines can")
        self._end("refused")
        if self._note:
            self._prepared.unlink(missing_ok=True)

    def check_note(self) -> None:
        """Raise StepFailed if the engines beside this one use newer weights, as when it started
        while they changed: its successor begins with these."""
        path = Path(self._note)
        if self._message is not None or not self._note or not path.exists():
            return
        if (written := path.stat().st_mtime_ns) == self._note_seen:
            return
        self._note_seen = written
        try:
            note = msgspec.json.decode(path.read_bytes(), type=Note)
        except UNDECODABLE:
            return  # whoever starts next says so
        if note.weights_version > self._engine.weights_version:
            raise StepFailed(
                f"the other engines use weights version {note.weights_version}, and this one has "
                f"{self._engine.weights_version}: it starts again"
            )

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
        return Done(message.id, detail)

    def close(self) -> None:
        """Wait for what is being loaded, and drop it."""
        self._loader.shutdown()

    def _prepare(self, message: LoadWeights, weights: Weights) -> None:
        """Write the note to a file beside its place: a failure comes before anything is changed."""
        note = Note(message.path, weights.fingerprint, self._engine.weights_version + 1)
        try:
            if self._note:
                self._prepared.write_bytes(msgspec.json.encode(note))
        except OSError as error:
            self._end("refused")
            raise SRMError(f"cannot write {self._prepared}: {error.strerror}") from None

    def _end(self, result: str) -> None:
        metrics.WEIGHT_SWAPS.labels(result).inc()
        self._engine.scheduler.is_held = False
        self._message = self._loading = None
        self.is_prepared = self._is_committed = False


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
