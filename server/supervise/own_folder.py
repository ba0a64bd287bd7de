"""A folder that one running server has to itself in the data folder, which servers may share.

It goes with the server; that of a server which was killed is removed when the next one starts.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from srm.engine.kept_model import FIRST, hold_model, remove, try_lock
from srm.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)

COPIES = "weights"
"""Name of the folder of copies of the weights in use."""
_PARENT, _LOCK = "running", "lock"


@contextmanager
def own_folder(data: Path) -> Iterator[Path]:
    """Yield a new folder in `data`, or in the temp folder where none can be made.

    Raises ConfigError where there is no temp folder either.
    """
    try:
        folder, file = _made(data.absolute() / _PARENT)
    except OSError as error:
        log.warning("%s: no folder can be made there: %s", data, error.strerror)
        with _temporary() as instead:
            yield instead
        return
    try:
        yield folder
    finally:
        remove(folder)
        os.close(file)


@contextmanager
def _temporary() -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(prefix="srm-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"no folder can be made in the temp folder: {error.strerror}; TMPDIR names another one"
        ) from None
    with made as name:
        yield Path(name)


def keep_first(model: Path, copies: Path) -> Path | None:
    """Keep the model that a server begins with among the copies; return where, or None where that
    cannot be: a process that is started again then reads the folder as it is by then."""
    place = copies / FIRST
    try:
        copies.mkdir(mode=0o700)
        hold_model(model, place)
    except (OSError, CheckpointError) as error:
        log.warning("%s is not kept: %s", model, getattr(error, "strerror", None) or error)
        remove(place)
        return None
    return place


def _made(parent: Path) -> tuple[Path, int]:
    """Make a folder and lock it until the returned file is closed. Raises OSError."""
    for folder in (parent.parent, parent):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for other in parent.iterdir():
        _remove_dead(other)
    while True:
        folder = Path(tempfile.mkdtemp(dir=parent))
        try:
            file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # somebody who starts now took it for a dead one's
            continue
        if try_lock(file) and os.fstat(file).st_nlink:
            return folder, file
        os.close(file)


def _remove_dead(folder: Path) -> None:
    try:
        file = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        with suppress(OSError):
            folder.rmdir()  # of one that was killed before it had locked it
        return
    try:
        if try_lock(file):
            remove(folder)
    finally:
        os.close(file)
