"""`python -m tests.tools.doc_tables` writes the pages of docs/reference/, and the tables of docs/
that say what the code has.

Tables stand between `<!-- table: NAME … -->` and `<!-- end of table -->`. What only a person can
say is kept: such a cell, by the first cell of its row and the head of its column. A new row has a
question mark there. `tests/test_docs.py` refuses that, and a table that is not as the code is.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Set
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import prometheus_client
from msgspec import NODEFAULT
from prometheus_client.metrics import MetricWrapperBase

from srm import errors
from srm.engine.config import EngineConfig
from srm.loadtest import scenario
from srm.server.commands.batch_config import BatchConfig
from srm.server.commands.generate import GenerateConfig
from srm.server.commands.score import ScoreConfig
from srm.server.config import ServerConfig
from srm.server.dialects.chat.request import ChatRequest
from srm.server.dialects.chat.tokenize import TokenizeRequest
from srm.server.dialects.messages.request import MessageRequest
from srm.server.dialects.responses.request import ResponseRequest
from srm.server.dialects.rollouts.requests import (
    SGLANG_PARAMS,
    VLLM_PARAMS,
    GenerateRequest,
    TokensRequest,
)
from srm.server.errors import INTERNAL, body_of, status_of
from srm.server.routes.app import OPERATIONS
from srm.server.routes.scrape import VLLM_NAMES
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.sampling_fields import NEUTRAL
from srm.server.schema.validation import hints_of
from srm.settings import field_docs, flag_of, settings_in, variable_of
from tests.kit import doors
from tests.kit.serving import ROOT
from tests.tools import vllm_tables
from tests.tools.vllm_tables import Row

PAGES = sorted((ROOT / "docs").rglob("*.md"))
REFERENCE = {ROOT / "docs" / "reference" / "accepted-input.md": doors.page}
"""Pages that are written whole."""
END = "<!-- end of table -->"
BLOCK = re.compile(rf"<!-- table: ([^>]+) -->\n(.*?){END}", re.S)
FROM_VARIABLES: dict[type[msgspec.Struct], Set[str]] = {
    kind: frozenset(kind.__struct_fields__)
    for kind in (ServerConfig, EngineConfig, GenerateConfig, BatchConfig, ScoreConfig)
} | {scenario.Scenario: scenario.VARIABLES}
"""Settings that variables of the environment set, by their struct."""
KEPT = None
"""Stands for a cell that the page has."""
MISSING = "?"
"""Stands in a page for a cell that it does not have yet."""
_OF_HTTP = {
    400: "invalid_http",
    405: "method_not_allowed",
    416: "requested_range_not_satisfiable",
    431: "headers_too_large",
}
"""Codes of errors that are no SRMError, of type invalid_request_error."""


class Table(NamedTuple):
    head: list[str]
    rows: list[Row]
    has_order: bool = True
    """Whether rows stand in this order; otherwise in the page's, new ones last."""


def settings(which: str) -> Table:
    """Of `MODULE.Struct`; with ` but MODULE.Struct` without those that are there too."""
    name, _, base = which.partition(" but ")
    left_out = [row[:3] for row in (_settings(struct(base)) if base else [])]  # names and defaults
    rows = [row for row in _settings(struct(name)) if row[:3] not in left_out]
    given = "flag, variable" if struct(name) in FROM_VARIABLES else "flag"
    has_tables = any(setting.table for setting in settings_in(struct(name)))
    given = f"{given}, table of a file" if has_tables else given
    return Table(["setting", given, "default", "meaning", "allowed"], rows)


def _settings(kind: type[msgspec.Struct]) -> list[Row]:
    variables = FROM_VARIABLES.get(kind, frozenset())
    return [
        [
            code(setting.name),
            code(flag_of(setting.name))
            + (f" {code(variable_of(setting.name))}" if setting.name in variables else "")
            + (f" {code(f'[{setting.table}]')}" if setting.table else ""),
            code(_shown(setting.default)),
            setting.meaning or MISSING,
            _choices(setting.hint),
        ]
        for setting in settings_in(kind)
    ]


def _shown(value: object) -> str:
    """A default as on a command line, paths from the root."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or '""'
    if isinstance(value, Path) and value.is_relative_to(ROOT):
        return str(value.relative_to(ROOT))
    return str(value) or '""'


def _choices(hint: Any) -> str | None:
    if hint is bool:
        return "`true`, `false`"
    return ", ".join(map(code, get_args(hint))) if get_origin(hint) is Literal else KEPT


def fields(which: str) -> Table:
    """Of the request `MODULE.Struct`; with ` but MODULE.Struct` without those of that one, where
    they are the same."""
    name, _, base = which.partition(" but ")
    kind = struct(name)
    others = get_type_hints(struct(base), include_extras=True) if base else {}
    hints, meanings = get_type_hints(kind, include_extras=True), field_docs(kind)
    rows: list[Row] = []
    for field in msgspec.structs.fields(kind):
        if field.name not in others or others[field.name] != hints[field.name]:
            default = _default(field, is_in_query=name.endswith("Query"))
            allowed, meaning = _described(hints[field.name]), meanings.get(field.name, MISSING)
            rows.append([code(field.encode_name), default, allowed, meaning])
    return Table(["field", "default", "allowed", "meaning"], rows, has_order=False)


def _default(field: msgspec.structs.FieldInfo, is_in_query: bool) -> str | None:
    if field.required:
        return "required"
    has_factory = field.default_factory is not NODEFAULT
    default = field.default_factory() if has_factory else field.default
    spelled = default if is_in_query else json.dumps(default)
    return KEPT if default is None else code(spelled)


def _described(hint: Any) -> str | None:
    """The outermost description in an annotation."""
    for part in (*getattr(hint, "__metadata__", ()), *get_args(hint)):
        result = part.description if isinstance(part, msgspec.Meta) else _described(part)
        if result:
            return str(result)
    return KEPT


_DIALECTS: dict[str, Set[str]] = {
    "completions": {*hints_of(CompletionRequest)},
    "chats": {*hints_of(ChatRequest)},
    "responses": {*hints_of(ResponseRequest)},
    "messages": {*hints_of(MessageRequest)},
    "/inference/v1/generate": {*hints_of(TokensRequest), *VLLM_PARAMS},
    "/generate": {*hints_of(GenerateRequest), *SGLANG_PARAMS},
    "/tokenize": {*hints_of(TokenizeRequest)},
}


def dialects() -> Table:
    """What asks for nothing everywhere, and which routes take other values too."""
    rows: list[Row] = [
        [
            code(name),
            vllm_tables.shown(values),
            ", ".join(route for route, names in _DIALECTS.items() if name in names) or "–",
        ]
        for name, values in sorted(NEUTRAL.items())
    ]
    return Table(["field", "accepted everywhere", "other values too"], rows)


def routes() -> Table:
    rows: list[Row] = [
        [code(f"{operation.method} {operation.path}"), KEPT] for operation in OPERATIONS
    ]
    return Table(["route", "answers"], rows, has_order=False)


def metrics_of(module: object) -> Iterator[MetricWrapperBase]:
    yield from (var for var in vars(module).values() if isinstance(var, MetricWrapperBase))


def exposed(metric: MetricWrapperBase) -> str:
    (family,) = metric.describe()
    return family.name + ("_total" if isinstance(metric, prometheus_client.Counter) else "")


def metrics(module: str) -> Table:
    rows: list[Row] = []
    for metric in metrics_of(import_module(module)):
        (family,) = metric.describe()
        labels = ", ".join(map(code, metric._labelnames))
        rows.append([code(exposed(metric)), family.type, labels, family.documentation])
    return Table(["metric", "type", "labels", "meaning"], rows)


def vllm_metrics() -> Table:
    ours = {
        family.name: exposed(metric)
        for module in ("srm.server.metrics", "srm.engine.metrics")
        for metric in metrics_of(import_module(module))
        for family in metric.describe()
    }
    rows: list[Row] = [
        [code(theirs + ours[name].removeprefix(name)), code(ours[name])]
        for theirs, name in VLLM_NAMES.items()
    ]
    return Table(["metric", "the same as"], rows)


def every_error(kind: type[errors.SRMError] = errors.SRMError) -> Iterator[type[errors.SRMError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from every_error(child)


def error_codes() -> Table:
    members = {(500, INTERNAL.error.code, INTERNAL.error.type)}
    members |= {(status, name, "invalid_request_error") for status, name in _OF_HTTP.items()}
    for kind in every_error():
        error = errors.Overloaded("", 1) if kind is errors.Overloaded else kind("")
        members.add((status_of(error), kind.code, body_of(error).error.type))
    rows: list[Row] = [
        [code(name), str(n), code(of), KEPT, KEPT] for n, name, of in sorted(members)
    ]
    return Table(["code", "status", "type", "when", "what to do"], rows)


def exit_codes() -> Table:
    kinds = {kind.exit_code: kind.code for kind in every_error()}
    named = {number: code(name) for number, name in kinds.items() if number > 1}
    rows: list[Row] = [[str(item), KEPT, named.get(item, "–")] for item in sorted({0, *kinds})]
    return Table(["code", "of `srm`", "error"], rows)


def make_targets() -> Table:
    matches = re.findall(r"^([a-z-]+):(?:[^#\n]*## +(.*))?", (ROOT / "Makefile").read_text(), re.M)
    return Table(["target", "does"], [[code(f"make {name}"), does] for name, does in matches])


def make_variables() -> Table:
    matches = re.findall(r"^(\w+) \?= (.*)$", (ROOT / "Makefile").read_text(), re.M)
    rows: list[Row] = [[code(name), code(default), KEPT, KEPT] for name, default in matches]
    return Table(["variable", "default", "of", "meaning"], rows)


_LEVELS = {"warning": "warning", "error": "error", "exception": "error", "critical": "critical"}


def log_lines() -> Table:
    """What processes of `srm serve` log beyond information. A message that is only an error's own
    words has no row."""
    levels: dict[str, str] = {}
    folders = [(ROOT / name).rglob("*.py") for name in ("engine", "server")]
    for path in chain(*folders, (ROOT / "srm").glob("*.py")):
        if path.parent.name == "commands" or path.stem in {"embedded_engine", "graph_notes"}:
            continue
        for call in ast.walk(ast.parse(path.read_text())):
            match call:
                case ast.Call(
                    func=ast.Attribute(ast.Name("log" | "logger" | "logging"), level),
                    args=[ast.Constant(str(message)), *_],
                ) if level in _LEVELS:
                    shown = re.sub(r"%[.\d]*[sdfg]", "…", message)
                    if re.search("[a-z]", shown):
                        levels[code(shown)] = min(levels.get(code(shown), "z"), _LEVELS[level])
    rows: list[Row] = [[message, level, KEPT, KEPT] for message, level in sorted(levels.items())]
    return Table(["message", "level", "meaning", "what to do"], rows)


def code(text: object) -> str:
    return f"`{text}`"


def struct(name: str) -> type[msgspec.Struct]:
    module, _, kind = name.rpartition(".")
    return vars(import_module(module))[kind]  # type: ignore[no-any-return]


TABLES: dict[str, Callable[..., Table]] = {
    "settings": settings,
    "fields": fields,
    "dialects": dialects,
    "routes": routes,
    "metrics": metrics,
    "vllm-metrics": vllm_metrics,
    "vllm-fields": lambda: Table(["vLLM's fields", "which"], vllm_tables.fields()),
    "vllm-routes": lambda: Table(["vLLM's routes", "which"], vllm_tables.routes()),
    "errors": error_codes,
    "exit-codes": exit_codes,
    "log-lines": log_lines,
    "make-targets": make_targets,
    "make-variables": make_variables,
}


def names(text: str) -> list[str]:
    """What the tables of a page are called, such as `fields MODULE.Struct`."""
    return [match[1] for match in BLOCK.finditer(text)]


def written(text: str) -> str:
    """A page with its tables as the code has them."""

    def block(match: re.Match[str]) -> str:
        name, _, which = match[1].partition(" ")
        lines = _rendered(TABLES[name](*filter(None, [which])), cells(match[2]))
        return "\n".join([f"<!-- table: {match[1]} -->", *lines, END])

    return BLOCK.sub(block, text)


def cells(table: str) -> dict[str, dict[str, str]]:
    """The cells that a page has, by the first of their row and by the head of their column."""
    rows = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines()]
    head, *body = [*rows[:1], *rows[2:]] or [[]]
    return {row[0]: dict(zip(head, row, strict=True)) for row in body}


def _rendered(table: Table, old: dict[str, dict[str, str]]) -> list[str]:
    rows = table.rows
    if not table.has_order:
        places = {first: place for place, first in enumerate(old)}
        rows = sorted(rows, key=lambda row: places.get(str(row[0]), len(places)))
    lines = [f"| {' | '.join(table.head)} |", "|---" * len(table.head) + "|"]
    for row in rows:
        was = old.get(str(row[0]), {})
        both = zip(table.head, row, strict=True)
        lines.append(f"| {' | '.join(_cell(item, was.get(name, '')) for name, item in both)} |")
    return lines


def _cell(cell: str | None, old: str) -> str:
    """The cell, and what the page says behind it: after a semicolon, or where to read more."""
    if cell is KEPT:
        return old or MISSING
    return old if old.startswith((f"{cell};", f"{cell} See ")) else cell


if __name__ == "__main__":
    for page, whole in REFERENCE.items():
        page.write_text(whole())
    for page in PAGES:
        page.write_text(written(page.read_text()))
