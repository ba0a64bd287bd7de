"""The note of the weights in use, and their copies beside it: what an engine begins with.

Keeps: whatever becomes of a folder, an engine that is started again has the weights that were in
use, to the bit, or says that it cannot; all engines of a server begin with the same.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from srm.engine.kept_model import (
    FIRST,
    WEIGHTS,
    check_room,
    copy_model,
    locked,
    remove,
    store_error,
    try_lock,
)
from srm.engine.weights.checkpoint import StoredModel, read_stored
from srm.engine.weights.delta import made_whole
from srm.engine.weights.tensor_file import DELTA_OF, read_metadata
from srm.engine.weights.weights import Weights
from srm.engine.wiring import EngineWiring
from srm.errors import CheckpointError, EngineUnavailable, cut

logger = logging.getLogger(__name__)

LoadFolder = Callable[[Path], Weights]  # reads a model folder; raises CheckpointError

_Loaded = TypeVar("_Loaded", Weights, StoredModel)

_LOCK = "lock"
_PLACE, _HALF = 8, 65_536
"""Bytes of the number of notes, and of each of two notes: the last and the one before."""


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The weights in use, with which an engine begins."""

    path: str
    fingerprint: str
    weights_version: int
    change: str
    """Id of the message that asked for them, and the name of their copy."""
    label: str = ""
    """What their trainer calls them; empty: it gave no name."""


class SharedNote:
    """The note, in memory that all engines of a server share and that outlives each of them."""

    def __init__(self, fd: int = -1) -> None:
        """`fd`: a file in memory that all engines have open; -1: this one is alone."""
        memory = os.memfd_create("srm-weights") if fd < 0 else fd
        self._fd = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_CLOEXEC)  # a lock of its own
        os.ftruncate(self._fd, _PLACE + 2 * _HALF)  # the first engine finds it empty

    @property
    def number(self) -> int:
        """How many notes have been written, ever."""
        return int.from_bytes(os.pread(self._fd, _PLACE, 0), "little")

    def read(self) -> Note | None:
        """Return the last note; None before an engine has begun."""
        while number := self.number:
            data = os.pread(self._fd, _HALF, _PLACE + number % 2 * _HALF)
            if self.number == number:  # else its place may have been written again
                return msgspec.json.decode(data.rstrip(b"\0"), type=Note)
        return None

    def write(self, note: Note) -> None:
        """Have this be the note. Whoever reads meanwhile, or is killed, leaves it whole."""
        with self._locked():
            self._write(note)

    def claim(self, note: Note) -> Note:
        """Have this be the first note, unless another engine has begun before; return the note."""
        with self._locked():
            if (first := self.read()) is None:
                self._write(first := note)
        return first

    def _write(self, note: Note) -> None:
        number = self.number + 1
        data = msgspec.json.encode(note)
        assert len(data) < _HALF, "paths and labels are bounded"
        os.pwrite(self._fd, data.ljust(_HALF, b"\0"), _PLACE + number % 2 * _HALF)
        os.pwrite(self._fd, number.to_bytes(_PLACE, "little"), 0)  # last

    @contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._fd, fcntl.LOCK_EX)  # free once the process has ended
        try:
            yield
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)


def first_weights(config: EngineWiring, load: LoadFolder) -> tuple[Weights, Note]:
    """Load the weights that an engine begins with: those of the note, or else those of the model
    that it is told to serve, which it notes. Return them and what the note says.

    Raises CheckpointError, also where neither its copy nor its folder has the weights any more.
    """
    shared = SharedNote(config.weights_note_fd)
    while True:
        if (note := shared.read()) is None:
            weights = load(config.model)
            note = shared.claim(Note(str(config.model), weights.fingerprint, 1, FIRST))
            if (note.fingerprint, note.weights_version) == (weights.fingerprint, 1):
                return weights, note
        try:
            return _load_noted(note, config.weights_copies, load), note
        except CheckpointError:
            if shared.read() == note:  # else it was its copy that has gone, for newer weights
                raise


def started_folder(config: EngineWiring) -> Path:
    """Return the folder of the model that the server was started with: its copy, if it was kept."""
    first = Path(config.weights_copies) / FIRST
    return first if config.weights_copies and first.is_dir() else config.model


def _load_noted(note: Note, copies: str, load: Callable[[Path], _Loaded]) -> _Loaded:
    reasons = []
    for folder in (*([Path(copies, note.change)] if copies else []), Path(note.path)):
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

    def __init__(self, note: SharedNote, copies: str) -> None:
        """`copies`: the folder of all copies; if empty, nothing is copied."""
        self._note = note
        self._copies = Path(copies) if copies else None
        self._is_wanted = True
        self._file = -1
        self._busy = threading.Lock()

    def copy(self, folder: Path, change: str, within: Path | None = None) -> Path:
        """Return the copy, made here or by another engine. Blocks; raises as `copy_model` does."""
        if (copies := self._copies) is None:
            return folder
        with self._busy:
            if not self._is_wanted:  # `end` has been called: it would let go of no lock
                raise EngineUnavailable("the weights are not wanted any more")
            try:
                copies.mkdir(mode=0o700, exist_ok=True)
                with locked(copies / _LOCK, lambda: self._is_wanted, fcntl.LOCK_SH) as file:
                    self._file = os.dup(file)  # the same lock, until this is closed too
            except OSError as error:
                raise store_error(f"cannot write {copies}", error) from None
            complete = partial(self._complete, folder, copies)
            copy_model(folder, copies / change, lambda: self._is_wanted, complete, within)
        return copies / change

    def _complete(self, folder: Path, copies: Path, copied: Path) -> None:
        """Make the copy of a delta whole, with the copy of the weights in use. Raises
        CheckpointError, also for a delta of others; OSError."""
        file = copied / WEIGHTS
        if (base := read_metadata(file).get(DELTA_OF)) is None:
            return
        note = self._note.read()
        if note is None or note.fingerprint != base:
            in_use = "not known" if note is None else note.fingerprint
            raise CheckpointError(
                f"{folder / WEIGHTS} is a delta of weights {cut(base, 64)!r}, and those in use are "
                f"{in_use}: send a delta of these, or a whole model"
            )
        try:
            stored = _load_noted(note, str(copies), read_stored)
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
        if self._copies is not None:
            threading.Thread(target=self._tidy, args=(self._copies,), daemon=True).start()

    def _tidy(self, copies: Path) -> None:
        with self._busy:
            if self._file < 0:
                return
            try:
                if try_lock(self._file) and (note := self._note.read()) is not None:
                    for other in copies.iterdir():
                        if other.name not in {_LOCK, FIRST, note.change}:
                            remove(other)
            except OSError as error:
                logger.warning("%s is not tidied: %s", copies, error)
            finally:
                os.close(self._file)
                self._file = -1
