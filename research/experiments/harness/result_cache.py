"""Keeps the result of each case in a file: an experiment that was stopped goes on at the next case.

A file also has everything that its result depends on, and a checksum of both, so that a result of
other settings or with a damaged byte is never used.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from srm.errors import UNDECODABLE, ConfigError
from srm.training.text.whole_files import write_whole

Numbers = dict[str, Any]
"""The result of one case with one seed: names and values that JSON can hold."""


class _File(msgspec.Struct):
    crc32: int
    about: dict[str, Any]
    result: Numbers

    @classmethod
    def from_result(cls, about: dict[str, Any], result: Numbers) -> _File:
        return cls(zlib.crc32(msgspec.json.encode([about, result])), about, result)


def cached(path: Path, about: Mapping[str, Any], measure: Callable[[], Numbers]) -> Numbers:
    """Return the result at `path`, or measure it and keep it there.

    `about` says in JSON what the result depends on. Raises ConfigError for a file that is damaged
    or was made of something else, and names what differs.
    """
    plain = msgspec.json.decode(msgspec.json.encode(dict(about)))
    if path.exists():
        return _read(path, plain)
    path.parent.mkdir(parents=True, exist_ok=True)
    result = msgspec.json.decode(msgspec.json.encode(measure()))
    write_whole(path, msgspec.json.format(msgspec.json.encode(_File.from_result(plain, result))))
    return result  # type: ignore[no-any-return]


def folder_of(folder: Path, made_of: Mapping[str, Any]) -> Path:
    """Return the folder of a model that is trained with these settings: its name ends with their
    hash, so that no run goes on with what others have trained."""
    sealed = msgspec.json.encode(dict(made_of), enc_hook=str, order="sorted")
    return folder.with_name(f"{folder.name}-{hashlib.sha256(sealed).hexdigest()[:8]}")


def digest(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of files. Raises ConfigError for one that cannot be read."""
    hasher = hashlib.sha256()
    for path in paths:
        try:
            hasher.update(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    return hasher.hexdigest()


def _read(path: Path, about: dict[str, Any]) -> Numbers:
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except UNDECODABLE as error:
        raise ConfigError(f"results: {path} is damaged, remove it: {error}") from None
    if file != _File.from_result(file.about, file.result):
        raise ConfigError(f"results: {path} is damaged, remove it: its checksum is another one")
    for name, was, wanted in _differing(file.about, about):
        raise ConfigError(
            f"results: {path} is of another {name}, {was!r:.200} and not {wanted!r:.200}: remove "
            "it or change results"
        )
    return file.result


def _differing(
    mine: Mapping[str, Any], other: Mapping[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """Yield name and both values of each member that differs; dicts are compared member by
    member."""
    for name in {**mine, **other}:
        was, wanted = mine.get(name), other.get(name)
        if isinstance(was, dict) and isinstance(wanted, dict):
            yield from _differing(was, wanted)
        elif was != wanted:
            yield name, was, wanted
