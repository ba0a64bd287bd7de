"""`srm bench validity`: how many replies under random schemas are JSON that the schema allows.

Schemas are drawn from the kinds that programs send. Every distinct text is checked by `jsonschema`,
which neither server nor masks use. Any server can be asked that takes a schema in a completion.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import httpx
from jsonschema import Draft202012Validator, FormatChecker

from bench.frame import Record, Settings, run, table
from bench.host.serving import serving
from srm.engine.config import DEMO_MODEL, Dtype

Json = dict[str, Any]

FIELDS: dict[str, Callable[[Json], Json]] = {
    "structured_outputs": lambda schema: {"structured_outputs": {"json": schema}},
    "response_format": lambda schema: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    },
    "json_schema": lambda schema: {"json_schema": schema},
}
"""Make the part of a body that carries a schema, by the name of the field that the server reads."""
_FORMATS = ("date", "uuid", "ipv4", "email")
_PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^(a|b)+$", "^[0-9]{4}-[0-9]{2}$")
_TIMEOUT_S = 3_600.0
_CHECKED_AT_ONCE = 1_000
"""Texts that a process checks at a time."""


class ValidityConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench validity`."""

    url: str = ""
    """A running server to ask; empty: `srm serve` is started with `model`."""
    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device of the started server, or of the one at `url`."""
    dtype: Dtype = "float32"
    """Dtype of matrices and activations of the started server."""
    field: Literal["structured_outputs", "response_format", "json_schema"] = "structured_outputs"
    """Field of a completion request that has the schema, as the server takes it."""
    prompt: str = "a b c"
    """Prompt of every request."""
    schemas: int = 100
    """Number of schemas, which are drawn with `seed`."""
    samples: int = 10_000
    """Completions of each schema."""
    completions: int = 10_000
    """Completions that one request asks for, at most."""
    concurrency: int = 4
    """Requests that are open at once."""
    max_tokens: int = 256
    """Tokens of each completion, at most."""
    seed: int = 0
    """Draws the schemas."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(ValidityConfig, argv, "validity", measure, markdown)


def measure(config: ValidityConfig) -> Record:
    """Return what became of each schema's samples."""
    schemas = [draw_schema(random.Random(f"{config.seed} {k}")) for k in range(config.schemas)]
    with (
        ProcessPoolExecutor(mp_context=get_context("forkserver")) as checkers,
        _server(config) as url,
        httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client,
    ):
        (model,) = (entry["id"] for entry in client.get("/v1/models").json()["data"][:1])
        cases = [_measure_schema(client, model, schema, config, checkers) for schema in schemas]
    return {"cases": cases}


@contextmanager
def _server(config: ValidityConfig) -> Iterator[str]:
    if config.url:
        yield config.url
        return
    flags = [f"--{name}={getattr(config, name)}" for name in ("model", "device", "dtype")]
    with serving(*flags) as server:
        yield server.url


def _measure_schema(
    client: httpx.Client,
    model: str,
    schema: Json,
    config: ValidityConfig,
    checkers: ProcessPoolExecutor,
) -> Json:
    sizes = [config.completions] * (config.samples // config.completions)
    if config.samples % config.completions:
        sizes.append(config.samples % config.completions)
    body = {"model": model, "prompt": config.prompt, "max_tokens": config.max_tokens}
    body |= {"temperature": 1.0, **FIELDS[config.field](schema)}
    before, began = _constrained_rows(client), time.monotonic()
    with ThreadPoolExecutor(config.concurrency) as threads:
        ask = partial(_ask, client, body)
        replies = list(threads.map(ask, range(len(sizes)), sizes))
    seconds = time.monotonic() - began
    texts: Counter[tuple[str, str]] = Counter()
    for reply, count in zip(replies, sizes, strict=True):
        if reply.is_success:
            texts.update(
                (choice["text"], choice["finish_reason"]) for choice in reply.json()["choices"]
            )
        else:
            texts["", f"{reply.status_code}: {reply.text[:300]}"] += count
    rows = {way: count - before.get(way, 0) for way, count in _constrained_rows(client).items()}
    tokens = sum(r.json()["usage"]["completion_tokens"] for r in replies if r.is_success)
    case = {"schema": schema, "seconds": seconds, "tokens": tokens, "rows": rows}
    counted, step = list(texts.items()), _CHECKED_AT_ONCE
    parts = [Counter(dict(counted[at : at + step])) for at in range(0, len(counted), step)]
    return case | add_sorted(checkers.map(partial(sort_texts, schema=schema), parts))


def add_sorted(parts: Iterable[Json]) -> Json:
    """Add up what `sort_texts` returned for distinct texts."""
    first, *others = parts
    for other in others:
        first = {name: first[name] + other[name] for name in first}
    return first | {"reasons": sorted({*first["reasons"]}), "examples": first["examples"][:3]}


def _ask(client: httpx.Client, body: Json, seed: int, n: int) -> httpx.Response:
    return client.post("/v1/completions", json=body | {"seed": seed, "n": n})


def _constrained_rows(client: httpx.Client) -> dict[str, int]:
    """Return an srm server's counters of constrained rows, by way."""
    rows: dict[str, int] = {}
    for line in client.get("/metrics").text.splitlines():
        for way in ("table", "masked"):
            if line.startswith(f"srm_engine_{way}_rows_total"):
                rows[way] = rows.get(way, 0) + int(float(line.split()[-1]))
    return rows


def sort_texts(texts: Counter[tuple[str, str]], schema: Json) -> Json:
    """Return how many texts are valid, invalid, cut by their length, and refused, by reason.

    `texts` counts pairs of a text and its finish reason; another reason than `stop` and `length`
    is a refusal.
    """
    validator = Draft202012Validator(schema, format_checker=FormatChecker(_FORMATS))
    counts = {"valid": 0, "invalid": 0, "cut": 0, "refused": 0}
    reasons: set[str] = set()
    examples = []
    for (text, reason), count in texts.items():
        if reason not in {"stop", "length"}:
            reasons.add(reason)
            counts["refused"] += count
        elif _is_valid(text, validator):
            counts["valid"] += count
        elif reason == "length":
            counts["cut"] += count
        else:
            counts["invalid"] += count
            examples.append(text)
    return counts | {"distinct": len(texts), "reasons": sorted(reasons), "examples": examples[:3]}


def _is_valid(text: str, validator: Draft202012Validator) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except ValueError:
        return False


def draw_schema(rng: random.Random, depth: int = 0) -> Json:
    """Draw a schema as programs send them; the outermost one is of an object.

    One in ten objects may have further properties, so that not every schema is regular.
    """
    kinds: list[Callable[[random.Random, int], Json]] = [_object, _array, _nullable, _tagged]
    is_leaf = depth and (depth == 3 or rng.random() < 0.6)
    return _leaf(rng) if is_leaf else (rng.choice(kinds) if depth else _object)(rng, depth)


def _object(rng: random.Random, depth: int) -> Json:
    names = rng.sample(["id", "name", "kind", "size", "tags", "unit", "price", "note"], 4)
    names = names[: rng.randint(1, 4)]
    schema: Json = {
        "type": "object",
        "properties": {name: draw_schema(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
    }
    return schema if rng.random() < 0.1 else schema | {"additionalProperties": False}


def _array(rng: random.Random, depth: int) -> Json:
    least = rng.randint(0, 2)
    items = draw_schema(rng, depth + 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 3}


def _nullable(rng: random.Random, depth: int) -> Json:
    return {"anyOf": [draw_schema(rng, depth + 1), {"type": "null"}]}


def _tagged(rng: random.Random, depth: int) -> Json:
    """A tagged union, as pydantic writes it."""
    return {
        "oneOf": [
            {
                "type": "object",
                "properties": {"tag": {"const": tag}, "value": draw_schema(rng, depth + 1)},
                "required": ["tag", "value"],
                "additionalProperties": False,
            }
            for tag in ("first", "second")
        ]
    }


def _leaf(rng: random.Random) -> Json:
    low = rng.randint(-50, 50)
    number = {"minimum": low, "maximum": low + rng.randint(0, 200)}
    return rng.choice(
        [
            {"type": "boolean"},
            {"type": "integer"} | number,
            {"type": "number"} | number,
            {"enum": rng.sample(["red", "green", "blue", 1, 2, None], 3)},
            {"const": "v1"},
            {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 16)},
            {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 20},
            {"type": "string", "format": rng.choice(_FORMATS)},
        ]
    )


def markdown(record: Record) -> list[str]:
    """Return the totals, by the way that the schemas went."""
    groups: dict[str, list[Json]] = {}
    for case in record["cases"]:
        groups.setdefault(_way(case), []).append(case)
    heads = "schemas | number | samples | valid | invalid | cut by length | refused | tok/s"
    rows = [
        " | ".join([way, str(len(cases)), *_totals(cases)]) for way, cases in sorted(groups.items())
    ]
    rows.append(" | ".join(["all", str(len(record["cases"])), *_totals(record["cases"])]))
    return table(heads, rows)


def _way(case: Json) -> str:
    rows = case["rows"]
    if not any(rows.values()):
        return "of this server"
    return "masked on the host" if rows.get("masked") else "with a table"


def _totals(cases: list[Json]) -> Iterator[str]:
    sums = [sum(case[name] for case in cases) for name in ("valid", "invalid", "cut", "refused")]
    yield from (f"{number:,}" for number in (sum(sums), *sums))
    yield f"{sum(case['tokens'] for case in cases) / sum(case['seconds'] for case in cases):,.0f}"
