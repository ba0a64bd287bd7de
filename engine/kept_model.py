"""Copies of a model's folder, which stay as they are whatever becomes of the folder.

A copy is whole or it is not there: it is made beside its place and then renamed. A reflink shares
the bytes until one of the two is written; a hard link would share what is written in place.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import msgspec

from srm.errors import (
    UNDECODABLE,
    CheckpointError,
    EngineUnavailable,
    StoreError,
    StoreFull,
)
from srm.files import SMALL_BYTES, open_file, read_file

FIRST = "first"
"""Name of the copy of the model that the server was started with, which `srm serve` makes."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_FILES = 10_000
"""Most files of a model's folder."""
SPARE_BYTES = 64 * 1024**2
"""Bytes that a copy leaves free on the disk, where results of batches are written too."""
_CHUNK = 16 * 1024**2
_POLL_S = 0.02
_FICLONE = 0x40049409

IsWanted = Callable[[], bool]


class ShardIndex(msgspec.Struct):
    """The index of weights that are in several files: each tensor's file."""

    weight_map: dict[str, str]


def copy_model(
    folder: Path,
    place: Path,
    is_wanted: IsWanted,
    complete: Callable[[Path], object] = lambda _partial: None,
    within: Path | None = None,
) -> None:
    """Copy a model's files, unless `place` is there: of several processes one makes it. `complete`
    is called with the copy before it is at its place, and may change and refuse it. Links may lead
    anywhere, or `within` a folder.

    Raises CheckpointError if the folder cannot be read, StoreFull and StoreError if the copy cannot
    be written, EngineUnavailable once it `is_wanted` no more; then nothing is left.
    """
    partial = place.with_name(f"{place.name}.partial")
    try:
        with locked(place.with_name(f"{place.name}.lock"), is_wanted):
            if place.exists():
                return
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            try:
                partial.mkdir()
                for name in model_files(folder):
                    with _opened(folder, name, within) as reading:
                        _copy(reading, partial / name, is_wanted)
                complete(partial)
                partial.rename(place)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise store_error(f"cannot keep a copy of {folder} at {place}", error) from None


def store_error(what: str, error: OSError) -> StoreError:
    """Return the error of a disk that does not take what is written: StoreFull where it is full."""
    kind = StoreFull if error.errno in {errno.ENOSPC, errno.EDQUOT} else StoreError
    return kind(f"{what}: {error.strerror}")


def hold_model(folder: Path, place: Path) -> None:
    """Keep a model's files at `place` without the cost of a copy: by reflink, small ones by a copy,
    and else open in this process, so that they outlive that they are removed, but not that they
    are written in place. Raises OSError."""
    place.mkdir()
    weights = weight_names(folder)
    for name in model_files(folder):
        with _opened(folder, name) as reading:
            target = place / name
            if _reflink(reading, target):
                continue
            if name in weights:
                held = os.dup(reading.fileno())  # until this process ends
                target.unlink(missing_ok=True)
                target.symlink_to(f"/proc/{os.getpid()}/fd/{held}")
            else:
                with target.open("wb") as writing:
                    shutil.copyfileobj(reading, writing)


def model_files(folder: Path) -> list[str]:
    """Return the names of the files of a model's folder. Raises CheckpointError if it cannot be
    read, or has more than MOST_FILES."""
    try:
        files = list(islice(folder.iterdir(), MOST_FILES + 1))
        weights = weight_names(folder)
        if len(files) > MOST_FILES:
            raise CheckpointError(f"{folder} has more than {MOST_FILES} files")
        return [
            file.name
            for file in sorted(files)
            if file.is_file() and (file.name in weights or file.stat().st_size <= SMALL_BYTES)
        ]
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from None


def weight_names(folder: Path) -> set[str]:
    """Return the names of the files in a folder that hold the weights: of one, or where that is not
    there, of the shards in its index. Whoever loads them says what is wrong with an index."""
    index = folder / INDEX
    if not (folder / WEIGHTS).exists() and index.is_file():
        with suppress(OSError, *UNDECODABLE):
            shards = msgspec.json.decode(read_file(index).removeprefix(BOM_UTF8), type=ShardIndex)
            return {name for name in shards.weight_map.values() if Path(name).name == name}
    return {WEIGHTS}


@contextmanager
def locked(path: Path, is_wanted: IsWanted, kind: int = fcntl.LOCK_EX) -> Iterator[int]:
    """Wait for the lock of a file and hold it. Raises EngineUnavailable once it `is_wanted` no
    more, as when whoever has it is frozen."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while not try_lock(file, kind):
            _check(is_wanted)
            time.sleep(_POLL_S)
        yield file
    finally:
        os.close(file)


def try_lock(file: int, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed, if nobody else has it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove(path: Path) -> None:
    """Remove a file or folder, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _opened(folder: Path, name: str, within: Path | None = None) -> BinaryIO:
    try:
        return open_file(folder / name, within)
    except OSError as error:
        raise CheckpointError(f"cannot read {folder / name}: {error.strerror}") from None


def _copy(reading: BinaryIO, target: Path, is_wanted: IsWanted) -> None:
    """Copy as many bytes as the file has now, whoever goes on writing it."""
    check_room(target.parent, 0)
    if _reflink(reading, target):
        return
    left = os.fstat(reading.fileno()).st_size
    check_room(target.parent, left)
    with target.open("wb", buffering=0) as writing:
        while left:
            _check(is_wanted)
            try:
                chunk = reading.read(min(_CHUNK, left))
            except OSError as error:
                raise CheckpointError(f"cannot read {target.name}: {error.strerror}") from None
            if not chunk:
                raise CheckpointError(f"cannot read {target.name}: it was cut while it was read")
            left -= len(chunk)
            rest = memoryview(chunk)
            while rest:
                rest = rest[writing.write(rest) :]


def check_room(folder: Path, size: int) -> None:
    """Raises OSError where so many bytes would not leave enough free."""
    if shutil.disk_usage(folder).free < size + SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _reflink(reading: BinaryIO, target: Path) -> bool:
    """Have `target` share the bytes of an open file, if the disk can."""
    try:
        with target.open("wb") as writing:
            fcntl.ioctl(writing, _FICLONE, reading.fileno())
    except OSError:  # another disk, or one that cannot
        return False
    return True


def _check(is_wanted: IsWanted) -> None:
    if not is_wanted():
        raise EngineUnavailable("the weights are not wanted any more")
