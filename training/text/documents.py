"""Reads documents from files and folders, one after the other, whatever their size.

A text file is a document, and comes in parts if it is large; in `.jsonl` a line is one, and in
`.parquet` a row, by the member or column that is named. In a folder, files are read in the order of
their paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.errors import ConfigError
from training.text.rows import SUFFIXES, rows

_BLOCK = 64 * 1024
"""Bytes of a text that are read at once."""
_LINES = re.compile(rb".*\n(?=\S)", re.DOTALL)
"""As many whole lines as there are. Tokenizers begin a token behind such an end of a line."""
_CHARACTERS = re.compile(rb".*(?=[^\x80-\xbf\n])", re.DOTALL)
"""All but the last character."""


class Part(str):
    """A part of a document that goes on with the next text."""

    __slots__ = ()


def documents(paths: Sequence[Path], suffix: str = "", member: str = "text") -> Iterator[str]:
    """Yield the documents of these files and folders, large ones in parts; those with no text are
    left out.

    Of a folder, only files that end with `suffix`, whatever they are called where it is empty.
    Raises ConfigError, with file and line, for what cannot be read or is no text, and where there
    is no text in all of them.
    """
    is_empty = True
    for path in files(paths, suffix):
        texts = _members(path, member) if path.suffix.lower() in SUFFIXES else _text(path)
        for text in filter(None, texts):
            is_empty = False
            yield text
    if is_empty:
        names = ", ".join(map(str, paths))
        raise ConfigError(f"texts: there is no text in {names:.300}")


def files(paths: Sequence[Path], suffix: str = "") -> list[Path]:
    """Return these files and those of these folders. Raises ConfigError where there are none."""
    results: list[Path] = []
    for path in paths:
        below = path.rglob("*") if path.is_dir() else ()
        inside = sorted(path for path in below if path.name.endswith(suffix) and path.is_file())
        if not path.exists() or (path.is_dir() and not inside):
            such = f"files *{suffix}" if suffix else "files"
            raise ConfigError(f"texts: {path} is no file, nor a folder with {such}")
        results += inside if path.is_dir() else [path]
    return results


def _text(path: Path) -> Iterator[str]:
    start = 0
    try:
        with path.open("rb") as file:
            data = file.read(_BLOCK)
            while block := file.read(_BLOCK):
                whole = _LINES.match(data) or _CHARACTERS.match(data)
                end = whole.end() if whole else 0
                if text := _decode(data[:end], start):
                    yield Part(text)
                data, start = data[end:] + block, start + end
            yield _decode(data, start)
    except UnicodeDecodeError as error:
        raise ConfigError(f"texts: {path}: byte {start + error.start} is not UTF-8") from error
    except OSError as error:
        raise ConfigError(f"texts: {path}: {error.strerror}") from error


def _decode(data: bytes, start: int) -> str:
    text = data.decode()
    if not start:
        text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _members(path: Path, member: str) -> Iterator[str]:
    for where, row in rows(path, "texts", member):
        value = row.get(member)
        if not isinstance(value, str):
            raise ConfigError(f"texts: {where}: {member!r} must be a text, got {value!r:.80}")
        yield value
