"""Input and output of a batch over a cluster: files of any file system that pyarrow has.

The input is cut into shards, runs of lines that one engine answers together. Each has an output
file of its own, which is there whole or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from io import BytesIO
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow
from pyarrow import fs, parquet

from srm.errors import ConfigError
from srm.server.batch.lines import RawLine, read_lines
from srm.server.commands.batch_parquet import ROWS_READ, check_rows, encode_rows, is_parquet
from srm.server.commands.compression import CHUNK, codec_of

UNFINISHED = "_unfinished"
"""Folder in the output for files that are still being copied."""
_NEWLINE = ord("\n")


class Piece(NamedTuple):
    """A run of lines of one file."""

    path: str
    lines: int
    group: int
    """The row group, where the file is Parquet."""
    start: int
    """Its first byte, or its first row in the group."""
    end: int


class Shard(NamedTuple):
    """A run of lines of the whole input, which counts them from 1 over all its files."""

    first: int
    last: int
    piece: Piece

    def file_name(self, job: str, suffix: str) -> str:
        """Return the name of its output file."""
        return f"{job}-{self.first:012}-{self.last:012}.{suffix}"


def whole_uri(uri: str) -> str:
    """Return a URI as it is, and a path so that it is the same in every folder."""
    return uri if "://" in uri else str(Path(uri).absolute())


def locate(uri: str) -> tuple[Any, str]:
    """Return the file system of a URI or an absolute path, and the path in it.

    Raises ConfigError.
    """
    try:
        located: tuple[Any, str] = fs.FileSystem.from_uri(uri)
        return located
    except (pyarrow.ArrowException, ImportError, OSError) as error:
        raise ConfigError(f"{uri} cannot be reached: {error}") from None


def input_files(uri: str) -> list[str]:
    """Return the paths of the input's files by name. Raises ConfigError."""
    files, path = locate(uri)
    try:
        given = files.get_file_info(path)
        if given.type == fs.FileType.NotFound:
            raise ConfigError(f"input = {uri}: there is no such file or folder")
        infos = [given]
        if given.type == fs.FileType.Directory:
            infos = files.get_file_info(fs.FileSelector(path, recursive=True))
    except OSError as error:
        raise ConfigError(f"input = {uri}: {error}") from None
    paths = [
        info.path
        for info in infos
        if info.type == fs.FileType.File and not info.base_name.startswith((".", "_"))
    ]
    if not paths:
        raise ConfigError(f"input = {uri}: the folder has no files")
    for path in paths:
        if codec_of(Path(path)) is not None:
            raise ConfigError(
                f"input = {path} is compressed, so it cannot be read from its middle: lines "
                "without compression, or Parquet, can"
            )
    return sorted(paths)


def pieces(uri: str, path: str, lines: int) -> list[Piece]:
    """Cut a file of the input into pieces of so many lines; reads all of it, unless it is Parquet.
    Raises ConfigError for a file that cannot be read, and for rows that cannot be said in JSON."""
    files, _ = locate(uri)
    cut = _row_pieces if is_parquet(Path(path)) else _line_pieces
    try:
        return list(cut(files, path, lines))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"input = {path}: {error}") from None


def _row_pieces(files: Any, path: str, lines: int) -> Iterator[Piece]:
    with files.open_input_file(path) as file:
        rows_file = parquet.ParquetFile(file)
        check_rows(rows_file, path)
        metadata = rows_file.metadata
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group).num_rows
        for start in range(0, rows, lines):
            end = min(start + lines, rows)
            yield Piece(path, end - start, group, start, end)


def _line_pieces(files: Any, path: str, lines: int) -> Iterator[Piece]:
    starts, count, at, last = [0], 0, 0, b"\n"
    with files.open_input_stream(path) as file:
        while chunk := file.read(CHUNK):
            ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE)
            starts += (at + 1 + ends[lines - 1 - count % lines :: lines]).tolist()
            count, at, last = count + len(ends), at + len(chunk), chunk[-1:]
    count += last != b"\n"
    if starts[-1] < at:
        starts.append(at)
    for number, (start, end) in enumerate(pairwise(starts)):
        yield Piece(path, min(lines, count - number * lines), 0, start, end)


def in_order(results: list[list[Piece]]) -> list[Shard]:
    """Return the pieces of all files as shards, numbered through."""
    shards: list[Shard] = []
    last = 0
    for piece in chain.from_iterable(results):
        shards.append(Shard(last + 1, last + piece.lines, piece))
        last += piece.lines
    return shards


def read_shard(uri: str, shard: Shard, max_line_bytes: int) -> list[RawLine]:
    """Return the lines of a shard, without blank ones. Raises OSError, ArrowException, and
    ConfigError for what a row cannot be made of."""
    files, _ = locate(uri)
    piece = shard.piece
    with files.open_input_file(piece.path) as file:
        if is_parquet(Path(piece.path)):
            rows = _rows(parquet.ParquetFile(file), piece)
            lines = enumerate(row if len(row) <= max_line_bytes else None for row in rows)
            return [(shard.first + number, line) for number, line in lines]
        file.seek(piece.start)
        data = BytesIO(file.read(piece.end - piece.start))
    read = chain.from_iterable(read_lines(data, max_line_bytes))
    return [(shard.first - 1 + number, line) for number, line in read]


def _rows(file: Any, piece: Piece) -> Iterator[bytes]:
    at = 0
    for batch in file.iter_batches(batch_size=ROWS_READ, row_groups=[piece.group]):
        skipped = max(0, piece.start - at)
        if skipped < batch.num_rows:
            yield from encode_rows(batch.slice(skipped, piece.end - at - skipped), piece.path)
        at += batch.num_rows
        if at >= piece.end:
            return


def publish(local: Path, uri: str, name: str) -> None:
    """Copy a file into the output: it is there whole or not at all, and replaces one of the same
    name. Raises OSError."""
    files, folder = locate(uri)
    copy = f"{folder}/{UNFINISHED}/{uuid4().hex}"
    fs.copy_files(str(local), copy, fs.LocalFileSystem(), files)
    files.move(copy, f"{folder}/{name}")


def output_names(uri: str) -> set[str]:
    """Make the output's folder if it is not there, and return the names of the files in it. Raises
    ConfigError."""
    files, folder = locate(uri)
    try:
        files.create_dir(f"{folder}/{UNFINISHED}", recursive=True)
        file_info = files.get_file_info(fs.FileSelector(folder))
    except OSError as error:
        raise ConfigError(f"output = {uri}: {error}") from None
    return {info.base_name for info in file_info if not info.base_name.startswith(("_", "."))}


def forget_unfinished(uri: str) -> None:
    """Delete what copies that broke off have left. Raises OSError."""
    files, folder = locate(uri)
    files.delete_dir(f"{folder}/{UNFINISHED}")
