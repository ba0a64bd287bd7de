"""Checked files of one JSON value a line; errors name file and line."""

from __future__ import annotations

from codecs import BOM_UTF8
from pathlib import Path
from typing import TypeVar

import msgspec

from srm.errors import UNDECODABLE, ConfigError, in_words, not_json_line, not_utf8
from srm.files import open_file

T = TypeVar("T")


def text_of(path: Path) -> str:
    """Read a text file. Raises ConfigError unless it is a regular one that can be read."""
    try:
        with open_file(path) as file:
            data = file.read().removeprefix(BOM_UTF8)
        return data.decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start)
        fault = not_utf8(data.split(b"\n")[number])
        raise ConfigError(f"{path}, line {number + 1}: {fault}") from None


def read(path: Path, kind: type[T], allowed: str) -> list[tuple[int, T]]:
    """Decode the lines that are not empty, each with its number; `allowed` describes a valid one.

    Raises ConfigError for an invalid line, for a file without lines, and for an unreadable file.
    """
    decoder = msgspec.json.Decoder(float_hook=_number)
    decoded = []
    for number, line in enumerate(text_of(path).split("\n"), 1):
        if line.strip():
            try:
                decoded.append((number, msgspec.convert(decoder.decode(line), kind)))
            except UNDECODABLE as error:
                fault = not_json_line(line.encode()) or in_words(error)
                raise bad_line(path, number, fault, allowed) from None
    if not decoded:
        raise ConfigError(f"{path}: no line; allowed is {allowed}")
    return decoded


def _number(text: str) -> int | float:
    """5.0 is 5."""
    value = float(text)
    return int(value) if value.is_integer() else value


def bad_line(path: Path, number: int, error: str, allowed: str) -> ConfigError:
    """Return the error for a bad line, naming file and line."""
    return ConfigError(f"{path}, line {number}: {error}; allowed is {allowed}")
