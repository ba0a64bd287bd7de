"""Parquet files of `srm batch`: rows as lines, and results as rows. Needs the extra `parquet`.

Holds a few rows to read, with their pages, and one group of rows to write at a time in memory.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from srm.engine.errors import ConfigError, cut, did_you_mean
from srm.server.batch.lines import RawLine
from srm.server.commands.object_storage import Source, StoredObject
from srm.server.schema.chat_request import CHAT_NEUTRAL, ChatRequest
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.sampling_fields import NEUTRAL
from srm.server.schema.validation import hints_of

ROWS_READ = 32
"""Rows that are in memory at once: a value that all rows have takes no room in the file."""
_ROWS_WRITTEN, _BYTES_WRITTEN = 5_000, 32 * 2**20
"""Most rows of a row group, and bytes of results after which it ends: a reply may have megabytes,
and takes six times its bytes while it is written."""
_encode = msgspec.json.Encoder(enc_hook=str).encode


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Result(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: msgspec.Raw


_INDEX = "__index_level_"
"""How pandas names columns of its index, which nobody meant to send."""


def is_parquet(path: Source) -> bool:
    """Whether a file is one of rows, by the end of its name."""
    return path.suffix.lower() == ".parquet"


def read_rows(path: Source, max_line_bytes: int, only: str = "") -> Iterator[list[RawLine]]:
    """Yield rows as JSON lines, numbered from 1, perhaps with `only` one column. Nulls are left
    out, also inside a row.

    Raises ConfigError for what is no Parquet file, and for columns that no request has.
    """
    arrow, parquet = _arrow()
    try:
        with _opened(path) as opened, parquet.ParquetFile(opened) as file:
            number = 0
            names = [name for name in file.schema_arrow.names if not name.startswith(_INDEX)]
            _check_columns(path, names)
            if only:
                names = [name for name in names if name == only]
            for batch in file.iter_batches(batch_size=ROWS_READ, columns=names):
                lines: list[RawLine] = []
                for row in rows_of(batch, str(path)):
                    number += 1
                    line = encode_row(row)
                    lines.append((number, line if len(line) <= max_line_bytes else None))
                yield lines
    except arrow.ArrowException as error:
        raise ConfigError(f"input = {path}: {error}") from None


def _check_columns(path: Source, names: list[str]) -> None:
    """Raise ConfigError for a column that would have every row fail."""
    known = {*hints_of(CompletionRequest), *hints_of(ChatRequest), *NEUTRAL, *CHAT_NEUTRAL}
    known |= {"custom_id", "method", "url", "body"}
    for name in names:
        if name not in known:
            raise ConfigError(
                f"input = {path}: column {cut(name, 64)!r} is no field of a request"
                f"{did_you_mean(name, known)}; leave it out: a result has its row's custom_id"
            )


def read_ids(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the id of each result in a file, and whether it failed. Raises ConfigError."""
    arrow, parquet = _arrow()
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=["id", "status_code"]):
                for row in batch.to_pylist():
                    if not isinstance(row["id"], str):
                        raise ConfigError(
                            f"output = {path} is no file of results: id {row['id']!r}"
                        )
                    yield row["id"], row["status_code"] != 200
    except (arrow.ArrowException, KeyError) as error:
        raise ConfigError(f"output = {path} is no file of results: {error}") from None


def write_results(records: Iterable[bytes], path: Path) -> None:
    """Write a file of results; it is there whole or not at all. Raises OSError."""
    arrow, parquet = _arrow()
    schema = arrow.schema(
        [
            ("id", arrow.string()),
            ("custom_id", arrow.string()),
            ("status_code", arrow.int32()),
            ("texts", arrow.list_(arrow.string())),
            ("finish_reasons", arrow.list_(arrow.string())),
            ("prompt_tokens", arrow.int64()),
            ("completion_tokens", arrow.int64()),
            ("response", arrow.string()),
            ("error", arrow.string()),
        ]
    )
    unfinished = path.with_name(f"{path.name}.tmp")
    with parquet.ParquetWriter(unfinished, schema, compression="zstd") as writer:
        for some in _groups(records):
            writer.write_table(arrow.Table.from_pylist(some, schema))
    with unfinished.open("rb") as file:
        os.fsync(file.fileno())
    unfinished.replace(path)


def _groups(records: Iterable[bytes]) -> Iterator[list[dict[str, Any]]]:
    group: list[dict[str, Any]] = []
    num_bytes = 0
    for record in records:
        group.append(_row(record))
        num_bytes += len(record)
        if len(group) == _ROWS_WRITTEN or num_bytes >= _BYTES_WRITTEN:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def check_installed() -> None:
    """Raise ConfigError if pyarrow is not installed."""
    _arrow()


def _opened(path: Source) -> AbstractContextManager[Path | BinaryIO]:
    """Open an object; Arrow opens files by itself, and faster."""
    return path.open() if isinstance(path, StoredObject) else nullcontext(path)


def _arrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            "Parquet files need pyarrow, which is not installed: pip install pyarrow"
        ) from None


def rows_of(batch: Any, path: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of some of a file. Raises ConfigError for what Python has no value for."""
    columns: dict[str, list[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            columns[name] = column.to_pylist(maps_as_pydicts="strict")
        except (KeyError, ValueError) as error:  # a key given twice, or a time too exact
            fault = str(error).partition(". ")[0]  # behind it, which package to install
            raise ConfigError(f"input = {path}: column {name!r} ({column.type}): {fault}") from None
    for row in range(batch.num_rows):
        yield {name: values[row] for name, values in columns.items()}


def encode_row(row: dict[str, Any]) -> bytes:
    """Encode a row; its column `body` may be a struct, or JSON in a string."""
    given = _as_json(row)
    body = given.get("body")
    if isinstance(body, str):
        given["body"] = msgspec.Raw(body.encode())
    return _encode(given)


def _as_json(value: Any) -> Any:
    """Leave out nulls: every row of a struct has all of its fields, so those not given are null,
    or NaN. What JSON lacks becomes what no field takes, so that its name and it are shown."""
    if isinstance(value, dict):
        children = ((_as_key(name), _as_json(child)) for name, child in value.items())
        return {name: child for name, child in children if child is not None}
    if isinstance(value, list):
        return [_as_json(child) for child in value]
    if isinstance(value, bytes):  # text as Spark and Impala write it
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"bytes that are not UTF-8": value[:16].hex()}
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else msgspec.Raw(b"1e999" if value > 0 else b"-1e999")
    return value


def _as_key(name: Any) -> Any:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _row(record: bytes) -> dict[str, Any]:
    result = msgspec.json.decode(record, type=_Result)
    row: dict[str, Any] = {"id": result.id, "custom_id": result.custom_id}
    error = bytes(result.error)
    row["error"] = None if error == b"null" else error.decode()
    if (response := result.response) is None:
        return row
    row |= {"status_code": response.status_code, "response": bytes(response.body).decode()}
    if response.status_code != 200:
        return row
    body = msgspec.json.decode(response.body, type=_Body)
    usage = body.usage or _Usage()
    texts = [
        choice.text if choice.message is None else choice.message.content for choice in body.choices
    ]
    return row | {
        "texts": texts,
        "finish_reasons": [choice.finish_reason for choice in body.choices],
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }
