"""Reads documents from files and folders, one after the other, whatever their size.

A text file is a document, and comes in parts if it is large; in `.jsonl` a line is one, and in
`.parquet` a row, by the member or column that is named. In a folder, files are read in the order of
their paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path

from srm.errors import ConfigError, not_utf8
from srm.files import open_file
from srm.training.text.rows import SUFFIXES, rows

_BLOCK = 64 * 1024
"""Characters of a text that are read at once."""
_CUTS = (re.compile(r".*(?<=\S)(?= )", re.DOTALL), re.compile(r".*\n(?=\S)", re.DOTALL))
"""As much of a text as ends before a space behind a word, else at the end of a line. Byte-level
tokenizers begin a token there. Those that put a space before a text put none before a space."""


class TextPart(str):
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
    text = ""
    for block in _blocks(path):
        if text:
            matches = (cut.match(text) for cut in _CUTS)
            end = next((match.end() for match in matches if match), len(text))
            yield TextPart(text[:end])
            text = text[end:]
        text += block
    yield text


def _blocks(path: Path) -> Iterator[str]:
    fault = ""
    try:
        with open_file(path) as data, TextIOWrapper(data, "utf-8-sig") as file:
            try:
                while (block := file.read(_BLOCK)) and not (fault := not_utf8(block.encode())):
                    yield block
            except UnicodeDecodeError as error:
                fault = not_utf8(error.object, data.tell() - len(error.object))
    except OSError as error:
        fault = error.strerror or str(error)
    if fault:
        raise ConfigError(f"texts: {path}: {fault}")


def _members(path: Path, member: str) -> Iterator[str]:
    for where, row in rows(path, "texts", member):
        value = row.get(member)
        if not isinstance(value, str):
            raise ConfigError(f"texts: {where}: {member!r} must be a text, got {value!r:.80}")
        yield value
