"""Reads documents from files and folders, one after the other, whatever their size.

A text file is a document; in `.jsonl` a line is one, and in `.parquet` a row, by the member or
column that is named. In a folder, files are read in the order of their paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ConfigError

_ROWS = 1_024
"""Rows of Parquet in memory at once."""


def documents(paths: Sequence[Path], suffix: str = "", member: str = "text") -> Iterator[str]:
    """Yield the documents of these files and folders; those with no text are left out.

    Of a folder, only files that end with `suffix`, whatever they are called where it is empty.
    Raises ConfigError, with file and line, for what cannot be read or is no text.
    """
    for path in files(paths, suffix):
        read = _READERS.get(path.suffix, _text)
        try:
            yield from filter(None, read(path, member))
        except OSError as error:
            raise ConfigError(f"texts: {path}: {error.strerror}") from error


def files(paths: Sequence[Path], suffix: str = "") -> list[Path]:
    """Return these files and those of these folders. Raises ConfigError where there are none."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(one for one in path.rglob(f"*{suffix}") if one.is_file())
        if not path.exists() or (path.is_dir() and not inside):
            raise ConfigError(f"texts: {path} is no file, nor a folder with files *{suffix}")
        found += inside if path.is_dir() else [path]
    return found


def _text(path: Path, _member: str) -> Iterator[str]:
    try:
        yield path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"texts: {path}: byte {error.start} is not UTF-8") from error


def _lines(path: Path, member: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = (
                    msgspec.json.decode(line, type=dict[str, Any]) if line.strip() else {member: ""}
                )
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"texts: {path}:{number}: {error}") from error
            yield _member_of(row, member, f"{path}:{number}")


def _parquet(path: Path, member: str) -> Iterator[str]:
    try:
        arrow, parquet = map(import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise ConfigError(f"texts: {path} needs pyarrow: pip install 'srm[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as table:
            if member not in table.schema_arrow.names:
                raise ConfigError(
                    f"texts: {path} has no column {member!r}, but {table.schema_arrow.names}"
                )
            for batch in table.iter_batches(_ROWS, columns=[member]):
                for row in batch.to_pylist():
                    yield _member_of(row, member, str(path))
    except arrow.ArrowException as error:
        raise ConfigError(f"texts: {path}: {error}") from error


def _member_of(row: dict[str, Any], member: str, where: str) -> str:
    value = row.get(member)
    if not isinstance(value, str):
        raise ConfigError(f"texts: {where}: {member!r} must be a text, got {value!r:.80}")
    return value


_READERS = {".jsonl": _lines, ".parquet": _parquet}
