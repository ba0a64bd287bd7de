"""Writes files atomically, and seals files with a SHA-256 that shows damage."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from srm.errors import ConfigError
from srm.files import open_file, read_file

_BLOCK = 1 << 20


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to; the finished file then replaces `path` in one step.

    Raises ConfigError if it cannot be written; the old file stays.
    """
    partial = path.parent / f"{path.name}.partial"
    try:
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # as the user's umask says; safetensors lets nobody else read
        with open_file(partial) as file:
            os.fsync(file.fileno())  # before the name is there, also where the power fails
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        partial.unlink(missing_ok=True)


def has(path: Path, content: bytes) -> bool:
    """Return whether there is a file of this content."""
    with suppress(OSError):
        return read_file(path, len(content)) == content
    return False


def write_whole(path: Path, content: bytes) -> None:
    """Replace `path` by `content` in one step."""
    with replace_file(path) as partial:
        partial.write_bytes(content)


def seal(path: Path) -> None:
    """Append the SHA-256 of a file to it, which readers of zip files pass over."""
    with path.open("rb+") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0, os.SEEK_END)
        file.write(digest)


def is_sealed(path: Path) -> bool:
    """Return whether a file ends with the SHA-256 of all that stands before."""
    hasher = hashlib.sha256()
    left = path.stat().st_size - hasher.digest_size
    with open_file(path) as file:
        while left > 0 and (block := file.read(min(left, _BLOCK))):
            hasher.update(block)
            left -= len(block)
        return file.read() == hasher.digest()
