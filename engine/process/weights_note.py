"""The note of the weights in use, and their copies beside it: what an engine begins with.

Keeps: whatever becomes of a folder, an engine that is started again has the weights that were in
use, to the bit, or says that it cannot; all engines of a server begin with the same.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from srm.engine.kept_model import (
    FIRST,
    WEIGHTS,
    check_room,
    copies_of,
    copy_model,
    locked,
    remove,
    store_error,
    try_lock,
    unclaimed,
)
from srm.engine.weights.checkpoint import StoredModel, read_stored
from srm.engine.weights.delta import made_whole
from srm.engine.weights.tensor_file import DELTA_OF, read_metadata
from srm.engine.weights.weights import Weights
from srm.engine.wiring import EngineWiring
from srm.errors import UNDECODABLE, CheckpointError, EngineUnavailable, cut
from srm.files import read_file, sealed, unsealed

logger = logging.getLogger(__name__)

LoadFolder = Callable[[Path], Weights]  # reads a model folder; raises CheckpointError

_Loaded = TypeVar("_Loaded", Weights, StoredModel)

_LOCK, _SECOND = "lock", "note"


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights in use, with which an engine begins."""

    path: str
    fingerprint: str
    weights_version: int
    change: str
    """Id of the message that asked for them, and the name of their copy."""
    label: str = ""
    """What their trainer calls them; empty: it gave no name."""


def read_note(path: Path) -> Note | None:
    """Read the note, or its second copy where it is lost or damaged; None before an engine has
    begun. Raises CheckpointError if neither can be read."""
    has_begun = not unclaimed(path).exists()  # asked first: whoever begins writes the note before
    reasons = []
    for place in (path, second := copies_of(path) / _SECOND):
        try:
            note = _decoded(read_file(place))
        except FileNotFoundError:
            reasons.append(f"{place} is not there")
        except (OSError, *UNDECODABLE) as error:
            has_begun = True
            reasons.append(f"{place}: {error}")
        else:
            if place == second:
                logger.warning("%s is read instead: %s", second, reasons[0])
            return note
    if not has_begun:
        return None
    raise CheckpointError(
        "nothing says which weights were in use before this process: "
        f"{'; '.join(reasons)}; give the model to serve, and start anew"
    )


def encoded(note: Note) -> bytes:
    """Return what a file that is the note says."""
    return sealed(msgspec.json.encode(note))


def put_to_use(prepared: Path, path: Path) -> None:
    """Have a file that is prepared be the note. Raises OSError."""
    (copies_of(path) / _SECOND).unlink(missing_ok=True)  # or it could say what was before
    prepared.replace(path)
    _keep_twice(path)


def _decoded(data: bytes) -> Note:
    return msgspec.json.decode(unsealed(data), type=Note)


def _keep_twice(path: Path) -> None:
    """Copy the note to its second place, as it is by then, whoever else writes it meanwhile."""
    second, beside = copies_of(path) / _SECOND, Path(f"{path}.{uuid.uuid4().hex}")
    before = b""
    try:
        while (data := read_file(path)) != before:
            _decoded(data)
            unclaimed(path).unlink(missing_ok=True)
            second.parent.mkdir(mode=0o700, exist_ok=True)
            beside.write_bytes(data)
            beside.replace(second)
            before = data
    except (OSError, *UNDECODABLE) as error:
        logger.warning("%s is not kept a second time: %s", path, error)
        with suppress(OSError):
            beside.unlink()


def first_weights(config: EngineWiring, load: LoadFolder) -> tuple[Weights, Note]:
    """Load the weights that an engine begins with: those of the note, or else those of the model
    that it is told to serve, which it notes. Return them and what the note says.

    Raises CheckpointError, also where the note is lost or damaged twice, and where neither its copy
    nor its folder has the weights any more.
    """
    if not config.weights_note:
        return (weights := load(config.model)), _first_note(config, weights)
    path = Path(config.weights_note)
    while True:
        if (note := read_note(path)) is None:
            weights = load(config.model)
            note = _claimed(path, _first_note(config, weights))
            if (note.fingerprint, note.weights_version) == (weights.fingerprint, 1):
                _keep_twice(path)
                return weights, note
        try:
            weights = _load_noted(note, path, load)
            _keep_twice(path)
            return weights, note
        except CheckpointError:
            if read_note(path) == note:  # else it was its copy that has gone, for newer weights
                raise


def started_folder(config: EngineWiring) -> Path:
    """Return the folder of the model that the server was started with: its copy, if it was kept."""
    first = copies_of(config.weights_note) / FIRST
    return first if config.weights_note and first.is_dir() else config.model


def _first_note(config: EngineWiring, weights: Weights) -> Note:
    return Note(str(config.model), weights.fingerprint, 1, FIRST)


def _claimed(path: Path, note: Note) -> Note:
    """Write the note unless another engine has done so before; return the one that is there."""
    beside = Path(f"{path}.{uuid.uuid4().hex}")
    try:
        beside.write_bytes(encoded(note))
        os.link(beside, path)
    except FileExistsError:
        return read_note(path) or note
    except OSError as error:
        logger.warning("%s cannot be written: %s", path, error.strerror)
    finally:
        remove(beside)
    return note


def _load_noted(note: Note, path: Path, load: Callable[[Path], _Loaded]) -> _Loaded:
    reasons = []
    for folder in (copies_of(path) / note.change, Path(note.path)):
        if not folder.is_dir():
            reasons.append(f"{folder} is not there")
            continue
        try:
            weights = load(folder)
        except CheckpointError as error:
            reasons.append(error.message)
            continue
        if weights.fingerprint == note.fingerprint:
            logger.info("weights version %d from %s", note.weights_version, folder)
            return weights
        reasons.append(f"they were {note.fingerprint}, and {folder} has {weights.fingerprint} now")
    raise CheckpointError(
        f"weights version {note.weights_version}, which was put to use, cannot be loaded "
        f"again: {'; '.join(reasons)}"
    )


class Copying:
    """One change's copy of its folder, which stays while the note names it.

    An engine with a change under way shares a lock, so that nobody removes what it may still put to
    use; the last one to end its change removes all that the note does not name.
    """

    def __init__(self, note: str) -> None:
        """Without a note nothing is copied: no engine begins with these weights again."""
        self._note = Path(note) if note else None
        self._is_wanted = True
        self._file = -1
        self._busy = threading.Lock()

    def copy(self, folder: Path, change: str, within: Path | None = None) -> Path:
        """Return the copy, made here or by another engine. Blocks; raises as `copy_model` does."""
        if self._note is None:
            return folder
        copies = copies_of(self._note)
        with self._busy:
            if not self._is_wanted:  # `end` has been called: it would let go of no lock
                raise EngineUnavailable("the weights are not wanted any more")
            try:
                copies.mkdir(mode=0o700, exist_ok=True)
                with locked(copies / _LOCK, lambda: self._is_wanted, fcntl.LOCK_SH) as file:
                    self._file = os.dup(file)  # the same lock, until this is closed too
            except OSError as error:
                raise store_error(f"cannot write {copies}", error) from None
            complete = partial(self._complete, folder, self._note)
            copy_model(folder, copies / change, lambda: self._is_wanted, complete, within)
        return copies / change

    @staticmethod
    def _complete(folder: Path, path: Path, copied: Path) -> None:
        """Make the copy of a delta whole, with the copy of the weights in use. Raises
        CheckpointError, also for a delta of others; OSError."""
        file = copied / WEIGHTS
        if (base := read_metadata(file).get(DELTA_OF)) is None:
            return
        note = read_note(path)
        if note is None or note.fingerprint != base:
            in_use = "not known" if note is None else note.fingerprint
            raise CheckpointError(
                f"{folder / WEIGHTS} is a delta of weights {cut(base, 64)!r}, and those in use are "
                f"{in_use}: send a delta of these, or a whole model"
            )
        try:
            stored = _load_noted(note, path, read_stored)
        except CheckpointError as error:
            raise CheckpointError(f"{error.message}: send a whole model") from None
        try:
            content = made_whole(file, stored.tensors)
        except CheckpointError as error:
            raise CheckpointError(error.message.replace(str(copied), str(folder))) from None
        check_room(copied, len(content))
        file.write_bytes(content)

    def end(self) -> None:
        """Note that the change has been made or dropped. Does not wait."""
        self._is_wanted = False
        if self._note is not None:
            threading.Thread(target=self._tidy, args=(self._note,), daemon=True).start()

    def _tidy(self, path: Path) -> None:
        with self._busy:
            if self._file < 0:
                return
            try:
                if try_lock(self._file) and (note := read_note(path)) is not None:
                    for other in copies_of(path).iterdir():
                        if other.name not in {_LOCK, _SECOND, FIRST, note.change}:
                            remove(other)
            except (OSError, CheckpointError) as error:
                logger.warning("%s is not tidied: %s", copies_of(path), error)
            finally:
                os.close(self._file)
                self._file = -1
