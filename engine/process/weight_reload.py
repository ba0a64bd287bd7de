"""Other weights while serving: loaded and bound beside the steps, put to use between two of them.

Keeps: one change at a time; whatever is wrong with a folder is found before anything stops, and the
old weights go on; the note tells the engine's successor what was put to use, and nothing else.

Of several engines, the first to write the note has decided for all: one that has the same change
staged makes it, and one that has not starts again with it. What is staged and not decided belongs
to the client that asked, and ends with it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from srm.engine import metrics
from srm.engine.config import ModelConfig, read_model_config
from srm.engine.messages import AboutWeights, Done, HoldWeights, LoadWeights, Status
from srm.engine.process.engine import BoundWeights, Engine
from srm.engine.process.weights_note import Copying, LoadFolder, Note, SharedNote
from srm.engine.weights.weights import Weights
from srm.errors import (
    CheckpointError,
    EngineUnavailable,
    InvalidRequest,
    NotFound,
    SRMError,
    StepFailed,
    StoreError,
    SwapInProgress,
)

logger = logging.getLogger(__name__)

LEASE_S = 10.0
"""Seconds after the last word of the client that wants a staged change at which it is dropped."""
WATCH_S = 60.0
"""Seconds between two lines of the log that say for how long nothing has started."""


class WeightReload:
    """Changes of an engine's weights, one at a time."""

    def __init__(self, engine: Engine, load: LoadFolder, note: SharedNote, copies: str) -> None:
        """`note`: what a restarted engine reads. `copies`: the folder of copies of the weights in
        use, which it loads; empty: there are none."""
        self._engine = engine
        self._load = load
        self._note, self._copies = note, copies
        self._copying = Copying(note, copies)
        self._message: LoadWeights | None = None
        self._loading: Future[BoundWeights] | None = None
        self._binding, self._is_closed = threading.Lock(), False
        self._asked = 0.0
        self.is_prepared = False
        """Whether the change can be made; one that is staged is not, before it is committed."""
        self._is_reported = self._is_committed = False
        self.lease_s = LEASE_S
        """Seconds after which a staged change is dropped if its client has not said `hold`."""
        self._wanted_at = 0.0  # by the last word of the client
        self._held_at: float | None = None  # since when nothing starts
        self._say_at = 0.0  # when to log that next
        self._done = Done("")  # the last change that was made
        self._note_seen = 0  # number of the note that was last read

    @property
    def current(self) -> LoadWeights | None:
        """The change that is under way."""
        return self._message

    @property
    def held_s(self) -> float:
        """Seconds for which nothing has started because of a change; 0 where things start."""
        return 0.0 if self._held_at is None else time.monotonic() - self._held_at

    def add_status(self, status: Status) -> Status:
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
        self._copying, self._loading = Copying(self._note, self._copies), Future()
        # A thread of its own, which nobody waits for: a folder may be on a disk that hangs.
        threading.Thread(
            target=self._run,
            args=(message, self._copying, self._loading),
            name="load weights",
            daemon=True,
        ).start()

    def hold(self, message_id: str) -> None:
        """Note that a client still wants the change of this id."""
        if self._message is not None and self._message.id == message_id:
            self._wanted_at = time.monotonic()

    def commit(self, message_id: str) -> None:
        """Have the staged change of this id made. Raises EngineUnavailable where there is none."""
        if self._message is None or self._message.id != message_id or not self.is_prepared:
            raise EngineUnavailable("there are no weights of this id to put to use")
        self._is_committed = True

    def take_staged(self) -> Done | None:
        """Return what tells the client that a staged change can be made, once."""
        if not self.is_prepared or self._is_reported or self._message is None:
            return None
        self._is_reported = True
        return Done(self._message.id, {"weights_version": self._engine.weights_version + 1})

    def check_wanted(self, has_owner: bool, is_draining: bool) -> None:
        """Drop a change that nobody is to wait for any more, and raise EngineUnavailable with the
        reason. One that is not staged is made though its client is gone."""
        assert self._message is not None
        is_late = time.monotonic() >= self._wanted_at + self.lease_s
        if is_draining:
            why = "the engine is draining and keeps its weights"
        elif self._message.is_staged and (is_late or not has_owner):
            why = "the process that changes them has gone, or not all engines can"
        else:
            return
        logger.warning("weights from %s are not put to use: %s", self._message.path, why)
        self._end("refused")
        raise EngineUnavailable(why)

    def is_due(self) -> bool:
        """Whether `make` is to be called, now that a step is over; of what is staged, not before it
        is committed, here or by another engine.

        Raises an error, and drops the change, if the folder is unusable; StepFailed as `check_note`
        does.
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
        number = self._note.number
        if number == self._note_seen or (self._message and not self.is_prepared):
            return None
        self._note_seen = number
        return self._note.read()

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

    def make(self, end_running: Callable[[], object] | None = None) -> Done:
        """Put the loaded weights to use; the engine must be settled. `end_running` is called where
        they are wanted with running = abort. Raises SRMError, and drops the change, where the
        runner cannot use them."""
        assert self._message is not None and self._loading is not None
        message, weights, started = self._message, self._loading.result(), time.monotonic()
        try:
            self._engine.load_weights(
                weights,
                message.label,
                refeeds=message.running == "refeed",
                end_running=end_running if message.running == "abort" else None,
            )
        except SRMError as error:
            logger.exception("weights from %s are not put to use", message.path)
            self._end("refused")
            self._note_seen = 0  # others may use them: then this engine is to start again
            raise SRMError(f"path = {message.path!r}: {error.message}") from None
        version = self._engine.weights_version
        note = Note(message.path, weights.fingerprint, version, message.id, message.label)
        self._note.write(note)
        now = time.monotonic()
        detail: dict[str, str | int | float] = {
            "weights_version": version,
            "fingerprint": weights.fingerprint,
            "seconds": round(now - self._asked, 6),
            "pause_seconds": round(now - started, 6),
        }
        metrics.WEIGHT_SWAP_SECONDS.observe(now - started)
        logger.info("weights version %d from %s", version, message.path)
        self._end("done")
        self._done = Done(message.id, detail)
        return self._done

    def close(self) -> None:
        """Drop what is being loaded. Waits for what is just being bound: a process that ends while
        a thread of Python's is inside the device's library may abort."""
        self._is_closed = True
        if self._message is not None:
            self._end("refused")
        with self._binding:
            pass

    def _run(self, message: LoadWeights, copying: Copying, loading: Future[BoundWeights]) -> None:
        folder = Path(message.path)
        try:
            within = Path(message.within or message.path)
            copy = partial(copying.copy, change=message.id, within=within)
            weights = load_weights(self._load, folder, self._engine.model, copy, within)
            loading.set_result(self._bind(weights, message.path, loading))
        except SRMError as error:
            loading.set_exception(error)
        finally:
            if not loading.done():
                loading.set_exception(StepFailed("what loads weights broke"))

    def _bind(self, weights: Weights, path: str, loading: Future[BoundWeights]) -> BoundWeights:
        try:
            with self._binding:
                if self._is_closed or self._loading is not loading:  # memory for none but the next
                    raise EngineUnavailable("the change was given up")
                return self._engine.bind_weights(weights)
        except EngineUnavailable:
            raise
        except Exception as error:  # as where memory has no room for both: the old ones go on
            logger.exception("the weights in %s cannot be bound", path)
            raise SRMError(f"the weights in {path!r} cannot be bound: {error!r}") from None

    def _end(self, result: str) -> None:
        metrics.WEIGHT_SWAPS.labels(result).inc()
        self._engine.scheduler.is_held, self._held_at = False, None
        self._message = self._loading = None
        self._copying.end()
        self.is_prepared = self._is_reported = self._is_committed = False


def load_weights(
    load: LoadFolder,
    folder: Path,
    served: ModelConfig,
    copy: Callable[[Path], Path] = lambda folder: folder,
    within: Path | None = None,
) -> Weights:
    """Load the weights in a folder, which must have the configuration that is served, from what
    `copy` makes of it. Its links may not lead out of `within`. Raises NotFound and InvalidRequest,
    of `path`, and what `copy` does."""
    if not folder.is_absolute():
        raise InvalidRequest(f"path must be absolute, got {str(folder)!r}", "path")
    if not folder.is_dir():
        raise NotFound(f"path = {str(folder)!r}: there is no such folder", "path")
    try:
        config, _ = read_model_config(folder, within)
        _check_same(folder, config, served)  # before all the rest is read
        copied = copy(folder)
        try:
            weights = load(copied)
        except CheckpointError as error:
            raise CheckpointError(error.message.replace(str(copied), str(folder))) from None
    except CheckpointError as error:
        raise InvalidRequest(f"path = {str(folder)!r}: {error.message}", "path") from None
    except (InvalidRequest, StoreError, EngineUnavailable):
        raise
    except Exception as error:  # whatever it is, those who are served have no part in it
        logger.exception("%s cannot be loaded", folder)
        raise InvalidRequest(
            f"path = {str(folder)!r} cannot be loaded: {error!r}", "path"
        ) from None
    _check_same(folder, weights.config, served)
    return replace(weights, config=served)


def _check_same(folder: Path, config: ModelConfig, served: ModelConfig) -> None:
    for name in ModelConfig.__struct_fields__:
        theirs, ours = getattr(config, name), getattr(served, name)
        if name == "eos_token_id" and {*config.end_ids} <= {*served.end_ids}:
            continue  # texts end as they did: trainers write no generation_config.json
        if theirs != ours:
            raise InvalidRequest(
                f"path = {str(folder)!r}: {name} = {theirs!r} in its config.json, and the model "
                f"that is served has {ours!r}; weights are changed for those of the same "
                "architecture only",
                "path",
            )
