"""Files of one JSON value a line, checked: what is wrong is told with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from engine.errors import UNDECODABLE, ConfigError

T = TypeVar("T")


def text_of(path: Path) -> str:
    """Raises ConfigError for a file that cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def read(path: Path, kind: type[T], allowed: str) -> list[tuple[int, T]]:
    """The lines that are not empty, each with its number; `allowed` says what one may be.

    Raises ConfigError for any other, for none, and for a file that cannot be read.
    """
    decoder = msgspec.json.Decoder(kind)
    found = []
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if line.strip():
            try:
                found.append((number, decoder.decode(line)))
            except UNDECODABLE as error:
                raise bad_line(path, number, str(error), allowed) from None
    if not found:
        raise ConfigError(f"{path}: no line; allowed is {allowed}")
    return found


def bad_line(path: Path, number: int, error: str, allowed: str) -> ConfigError:
    """What every error about a line says."""
    return ConfigError(f"{path}, line {number}: {error}; allowed is {allowed}")
