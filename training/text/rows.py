"""Reads rows of `.jsonl` and `.parquet` files, one after the other, whatever their size."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, cast

import msgspec

from srm.errors import UNDECODABLE, ConfigError, not_json_line
from srm.files import open_file

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".parquet")
_AT_ONCE = 32
"""Number of Parquet rows in memory at once."""


def rows(path: Path, setting: str, column: str = "") -> Iterator[tuple[str, Row]]:
    """Yield each row behind its place, `file:line` or `file:row`; empty lines are skipped.

    Of Parquet only `column` is read, where one is named. Raises ConfigError, which names `setting`
    and the place, for what cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"{setting}: {path} must be a file {' or '.join(SUFFIXES)}")
    read = _parquet(path, setting, column) if suffix == ".parquet" else _lines(path, setting)
    try:
        for number, row in read:
            yield f"{path}:{number}", row
    except OSError as error:  # pyarrow's for damage has nothing but a text
        raise ConfigError(f"{setting}: {path}: {error.strerror or error}") from error


def _lines(path: Path, setting: str) -> Iterator[tuple[int, Row]]:
    with open_file(path) as lines:
        for number, line in enumerate(lines, 1):
            try:
                content = line.removeprefix(BOM_UTF8) if number == 1 else line
                if content.strip():
                    yield number, msgspec.json.decode(content, type=Row)
            except UNDECODABLE as error:
                fault = not_json_line(content) or error
                raise ConfigError(f"{setting}: {path}:{number}: {fault}") from error


def _parquet(path: Path, setting: str, column: str) -> Iterator[tuple[int, Row]]:
    try:
        arrow, parquet = map(import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise ConfigError(f"{setting}: {path} needs pyarrow: pip install pyarrow") from error
    try:
        with open_file(path) as file, parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if column and column not in names:
                raise ConfigError(f"{setting}: {path} has no column {column!r}, but {names}")
            batches = table.iter_batches(_AT_ONCE, columns=[column] if column else None)
            yield from enumerate(chain.from_iterable(map(_rows_of, batches)), 1)
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{setting}: {path}: {error}") from error


def _rows_of(batch: Any) -> list[Row]:
    return cast(list[Row], batch.to_pylist())
