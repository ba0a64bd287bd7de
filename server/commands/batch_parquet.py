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
from types import UnionType
from typing import Annotated, Any, BinaryIO, Union, get_args, get_origin

import msgspec

from srm.errors import UNDECODABLE, ConfigError, cut, did_you_mean
from srm.files import open_file
from srm.server.batch.lines import RawLine
from srm.server.commands.object_storage import Source, StoredObject
from srm.server.dialects.chat.request import ChatRequest
from srm.server.dialects.responses.request import ResponseRequest
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.sampling_fields import NEUTRAL
from srm.server.schema.validation import hints_of

ROWS_READ = 32
"""Rows that are in memory at once: a value that all rows have takes no room in the file."""
_ROWS_WRITTEN, _BYTES_WRITTEN = 5_000, 32 * 2**20
"""Most rows of a row group, and bytes of results after which it ends: a reply may have megabytes,
and takes six times its bytes while it is written."""
_SHOWN_TYPE = 80
_MAY_BE_NULL = {"const", "default", "equals"}
"""Fields of schemas and rules that null is a value of."""
_ANY_JSON = {*_MAY_BE_NULL, "enum", "examples", "chat_template_kwargs"}
"""Fields inside whose values a null is one."""
_encode = msgspec.json.Encoder(enc_hook=str, decimal_format="number").encode


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Text(msgspec.Struct):
    text: str


class _Item(msgspec.Struct):
    """Of a response's output: a message, or a call, which has no content."""

    content: list[_Text] = []


class _Choice(msgspec.Struct):
    text: str | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    output: list[_Item] | None = None
    """Of a response."""
    status: str = ""


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
    out, also inside structs.

    Raises ConfigError for what is no Parquet file, and before the first row for columns that no
    request has and for what `check_rows` finds.
    """
    arrow, parquet = _arrow()
    try:
        with _opened(path) as opened, parquet.ParquetFile(opened) as file:
            number = 0
            names = [name for name in file.schema_arrow.names if not name.startswith(_INDEX)]
            _check_columns(path, names)
            if only:
                names = [name for name in names if name == only]
            else:
                check_rows(file, str(path))
            for batch in file.iter_batches(batch_size=ROWS_READ, columns=names):
                lines: list[RawLine] = []
                for line in encode_rows(batch, str(path)):
                    number += 1
                    lines.append((number, line if len(line) <= max_line_bytes else None))
                yield lines
    except arrow.ArrowException as error:
        raise ConfigError(f"input = {path}: {error}") from None


def _check_columns(path: Source, names: list[str]) -> None:
    """Raise ConfigError for a column that would have every row fail."""
    known = {*_FIELDS, *NEUTRAL, "custom_id", "method", "url"}
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
    with open_file(unfinished) as file:
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


def check_rows(file: Any, path: str) -> None:
    """Raise ConfigError for a row that `encode_rows` would refuse. Reads only columns of types that
    may have one."""
    if names := [field.name for field in file.schema_arrow if _may_fail(field.type, (field.name,))]:
        for batch in file.iter_batches(batch_size=ROWS_READ, columns=names):
            for _ in encode_rows(batch, path):
                pass


def encode_rows(batch: Any, path: str) -> Iterator[bytes]:
    """Yield the rows of some of a file as JSON. A string column is JSON where its field is no text.

    Raises ConfigError for what JSON has no value for, and for a null of a struct that may be a
    value or a field left out.
    """
    columns: dict[str, list[Any]] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values = column.to_pylist(maps_as_pydicts="strict")
            columns[name] = [_as_json(value, column.type, (name,)) for value in values]
        except (KeyError, ValueError) as error:  # a key given twice, or a time too exact
            fault = str(error).partition(". ")[0]  # behind it, which package to install
            kind = cut(str(column.type), _SHOWN_TYPE)
            raise ConfigError(f"input = {path}: column {name!r} ({kind}): {fault}") from None
    for row in range(batch.num_rows):
        line = {name: values[row] for name, values in columns.items() if values[row] is not None}
        line = _read_texts(line)
        if isinstance(line.get("body"), dict):
            line["body"] = _read_texts(line["body"])
        yield _encode(line)


def _read_texts(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with JSON in place of text that is JSON of a list or an object."""
    return {
        name: _read(value) if isinstance(value, str) and name in _NO_TEXTS else value
        for name, value in fields.items()
    }


def _read(text: str) -> str | msgspec.Raw:
    try:  # what is not JSON stays text, which the field refuses
        raw = msgspec.json.decode(text, type=msgspec.Raw)
    except UNDECODABLE:
        return text
    return raw if bytes(raw)[:1] in (b"[", b"{") else text


def _takes_text(hint: Any) -> bool:
    is_choice = get_origin(hint) in (Annotated, Union, UnionType)
    return hint is str or (is_choice and any(map(_takes_text, get_args(hint))))


_FIELDS = {
    **hints_of(ResponseRequest),
    **hints_of(ChatRequest),
    **hints_of(CompletionRequest),
    "prompt": str,
    "body": dict,
}
_NO_TEXTS = {name for name, hint in _FIELDS.items() if not _takes_text(hint)}
"""Fields that take no text, or a few words alone, none of which is JSON of a list or an object."""


def _is_value(place: tuple[str, ...]) -> bool:
    """Whether a null in this place is a value, and not the same as a field left out."""
    return place[-1] in _MAY_BE_NULL or not _ANY_JSON.isdisjoint(place[:-1])


def _may_fail(kind: Any, place: tuple[str, ...]) -> bool:
    """Whether `_as_json` may refuse a value of this Arrow type."""
    types = _arrow()[0].types
    if types.is_struct(kind):
        places = [(field.type, (*place, field.name)) for field in kind]
        return any(_is_value(inner) or _may_fail(own, inner) for own, inner in places)
    if hasattr(kind, "value_type") and not types.is_dictionary(kind):
        return _may_fail(kind.value_type, (*place, "[]"))
    is_number = types.is_floating(kind) and _is_value(place)
    return bool(is_number or types.is_map(kind) or types.is_temporal(kind))


def _as_json(value: Any, kind: Any, place: tuple[str, ...]) -> Any:
    """Return a value of this Arrow type as what JSON is made of; None for null and NaN. What JSON
    lacks becomes what no field takes, so that its name and it are shown.

    Every row of a struct has all of its fields, so those not given are null, and are left out.
    Raises ValueError where null may be a value as well.
    """
    if isinstance(value, dict):
        item = getattr(kind, "item_type", None)  # of a map, which has what it was given alone
        fields = {}
        for name, child in value.items():
            inner = (*place, str(_as_key(name)))
            own = _as_json(child, item or kind.field(name).type, inner)
            if own is None and item is None:
                _refuse_missing(inner)
                continue
            fields[_as_key(name)] = own
        return fields
    if isinstance(value, list):
        return [_as_json(child, kind.value_type, (*place, "[]")) for child in value]
    if isinstance(value, bytes):  # text as Spark and Impala write it
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"bytes that are not UTF-8": value[:16].hex()}
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            _refuse_missing(place)
            return None
        return msgspec.Raw(b"1e999" if value > 0 else b"-1e999")
    return value


def _refuse_missing(place: tuple[str, ...]) -> None:
    if _is_value(place):
        shown = ".".join(place[1:]).replace(".[]", "[]")
        raise ValueError(
            f"{cut(shown, _SHOWN_TYPE)} is null or NaN, which may be a value or a field left out: "
            "write the column as JSON in strings"
        )


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
    if body.output is not None:
        parts = [part.text for item in body.output for part in item.content]
        reason = "length" if body.status == "incomplete" else "stop" if parts else "tool_calls"
        body.choices = [_Choice("".join(parts) if parts else None, finish_reason=reason)]
        usage = _Usage(usage.input_tokens, usage.output_tokens)
    texts = [
        choice.text if choice.message is None else choice.message.content for choice in body.choices
    ]
    return row | {
        "texts": texts,
        "finish_reasons": [choice.finish_reason for choice in body.choices],
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }
