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
from pathlib import Path

import msgspec

from srm.engine.errors import (
    UNDECODABLE,
    CheckpointError,
    EngineUnavailable,
    StoreError,
    StoreFull,
)

FIRST = "first"
"""Name of the copy of the model that the server was started with, which `srm serve` makes."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
SMALL_BYTES = 64 * 1024**2
"""Most bytes of another file that belongs to a model: its configuration, tokenizer, template."""
SPARE_BYTES = 64 * 1024**2
"""Bytes that a copy leaves free on the disk, where results of batches are written too."""
_CHUNK = 16 * 1024**2
_POLL_S = 0.02
_FICLONE = 0x40049409

IsWanted = Callable[[], bool]


class ShardIndex(msgspec.Struct):
    """The index of weights that are in several files: each tensor's file."""

    weight_map: dict[str, str]


def copies_of(note: str | Path) -> Path:
    """Return the folder of the copies that belong to a note of the weights in use."""
    return Path(f"{note}.copies")


def unclaimed(note: str | Path) -> Path:
    """Return the file that `srm serve` makes and the first engine that begins removes: without it,
    a note that is not there has been lost."""
    return Path(f"{note}.unclaimed")


def copy_model(
    folder: Path,
    place: Path,
    is_wanted: IsWanted,
    complete: Callable[[Path], object] = lambda _partial: None,
) -> None:
    """Copy a model's files, unless `place` is there: of several processes one makes it. `complete`
    is called with the copy before it is at its place, and may change and refuse it.

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
                for file in model_files(folder):
                    _copy(file, partial / file.name, is_wanted)
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
    for file in model_files(folder):
        if not _reflink(file, place / file.name):
            if file.name not in weights:
                shutil.copyfile(file, place / file.name)
            else:
                held = os.open(file, os.O_RDONLY | os.O_CLOEXEC)  # until this process ends
                (place / file.name).unlink(missing_ok=True)
                (place / file.name).symlink_to(f"/proc/{os.getpid()}/fd/{held}")


def model_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder. Raises CheckpointError if it cannot be read."""
    try:
        files = [file for file in sorted(folder.iterdir()) if file.is_file()]
        weights = weight_names(folder)
        return [
            file for file in files if file.name in weights or file.stat().st_size <= SMALL_BYTES
        ]
    except OSError as error:
        raise CheckpointError(f"cannot read {folder}: {error.strerror}") from None


def weight_names(folder: Path) -> set[str]:
    """Return the names of the files in a folder that hold the weights: of one, or where that is not
    there, of the shards in its index. Whoever loads them says what is wrong with an index."""
    index = folder / INDEX
    if not (folder / WEIGHTS).exists() and index.is_file():
        with suppress(OSError, *UNDECODABLE):
            shards = msgspec.json.decode(index.read_bytes().removeprefix(BOM_UTF8), type=ShardIndex)
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


def _copy(source: Path, target: Path, is_wanted: IsWanted) -> None:
    check_room(target.parent, 0)
    if _reflink(source, target):
        return
    try:
        reading = source.open("rb", buffering=0)
    except FileNotFoundError:  # it has gone since; whoever loads the copy says what is missing
        return
    except OSError as error:
        raise CheckpointError(f"cannot read {source}: {error.strerror}") from None
    with reading, target.open("wb", buffering=0) as writing:
        check_room(target.parent, source.stat().st_size)
        while True:
            _check(is_wanted)
            try:
                chunk = reading.read(_CHUNK)
            except OSError as error:
                raise CheckpointError(f"cannot read {source}: {error.strerror}") from None
            if not chunk:
                return
            rest = memoryview(chunk)
            while rest:
                rest = rest[writing.write(rest) :]


def check_room(folder: Path, size: int) -> None:
    """Raises OSError where so many bytes would not leave enough free."""
    if shutil.disk_usage(folder).free < size + SPARE_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _reflink(source: Path, target: Path) -> bool:
    """Have `target` share the bytes of `source`, if the disk can."""
    try:
        with source.open("rb") as reading, target.open("wb") as writing:
            fcntl.ioctl(writing, _FICLONE, reading.fileno())
    except OSError:  # another disk, or one that cannot
        return False
    return True


def _check(is_wanted: IsWanted) -> None:
    if not is_wanted():
        raise EngineUnavailable("the weights are not wanted any more")
