"""Reads documents from files and folders, one after the other, whatever their size.

A text file is a document; in `.jsonl` a line is one, and in `.parquet` a row, by the member or
column that is named. In a folder, files are read in the order of their paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.errors import ConfigError
from training.text.rows import SUFFIXES, rows


def documents(paths: Sequence[Path], suffix: str = "", member: str = "text") -> Iterator[str]:
    """Yield the documents of these files and folders; those with no text are left out.

    Of a folder, only files that end with `suffix`, whatever they are called where it is empty.
    Raises ConfigError, with file and line, for what cannot be read or is no text, and where there
    is no text in all of them.
    """
    is_empty = True
    for path in files(paths, suffix):
        texts = _members(path, member) if path.suffix in SUFFIXES else _text(path)
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
    try:
        yield path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"texts: {path}: byte {error.start} is not UTF-8") from error
    except OSError as error:
        raise ConfigError(f"texts: {path}: {error.strerror}") from error


def _members(path: Path, member: str) -> Iterator[str]:
    for where, row in rows(path, "texts", member):
        value = row.get(member)
        if not isinstance(value, str):
            raise ConfigError(f"texts: {where}: {member!r} must be a text, got {value!r:.80}")
        yield value
