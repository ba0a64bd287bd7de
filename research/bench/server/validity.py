"""`srm bench validity`: how many replies under random schemas are JSON that the schema allows.

Schemas are drawn from the kinds that programs send. Every distinct text is checked by `jsonschema`,
which neither server nor masks use. Any server can be asked that takes a schema in a completion.
Other engines are started in turn and asked for the same, as is srm with a model of theirs: of the
same shape and tokenizer, with random weights.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, NoReturn

import httpx
from jsonschema import Draft202012Validator, FormatChecker, exceptions
from msgspec.structs import replace

from research.bench.frame import Record, Settings, run, table
from research.bench.host.serving import serving
from research.bench.peers.catalog import chosen
from research.bench.peers.config import PeersConfig
from research.bench.peers.running import engine_version, serving_peer
from research.bench.peers.shapes import VOCAB_SIZE
from srm.engine.config import DEMO_MODEL, Dtype
from tests.kit.engines.drawn_schemas import FORMATS, draw_schema

Json = dict[str, Any]

FIELDS: dict[str, Callable[[Json], Json]] = {
    "structured_outputs": lambda schema: {"structured_outputs": {"json": schema}},
    "response_format": lambda schema: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    },
    "json_schema": lambda schema: {"json_schema": schema},
}
"""Make the part of a body that carries a schema, by the name of the field that the server reads."""


class AskedPeer(NamedTuple):
    """A server beside ours."""

    name: str
    """Its name in research/bench/peers/catalog.toml."""
    field: Literal["structured_outputs", "json_schema"]
    """Its field, of FIELDS."""
    flags: tuple[str, ...] = ()
    """Further flags of its command."""
    note: str = ""
    """A remark on the flags, shown behind the engine's version in the table."""


_COMPACT = (
    "--structured-outputs-config",
    '{"backend": "xgrammar", "disable_any_whitespace": true}',
)
"""By default vLLM's grammars allow any whitespace, which random weights seldom end."""
PEERS = (
    AskedPeer("srm-512-http", "structured_outputs"),
    AskedPeer("vllm-http", "structured_outputs"),
    AskedPeer("vllm-http", "structured_outputs", _COMPACT, " (xgrammar, no whitespace)"),
    AskedPeer("llama-server-http", "json_schema"),
)
"""The servers that are asked one after the other."""
_AT_ONCE = 256
"""Requests that are open at once at a peer, of one completion each: all of these take as many."""
_TIMEOUT_S = 3_600.0
_CHECKED_AT_ONCE = 1_000
"""Texts that a process checks at a time."""
_SHOWN = 400
"""Characters of an example in a record."""


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
    peers_dir: str = ""
    """Folder of `python -m research.bench.peers setup`, whose vLLM and llama.cpp are asked too, and
    srm with a model like theirs; empty: they are left out."""
    peer_samples: int = 100
    """Completions of each schema that each of these is asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.peers_dir and (self.device, self.dtype == "float8") != ("cpu", False):
            raise ValueError(
                "peers_dir needs device cpu and dtype float32 or bfloat16, "
                f"got {self.device} and {self.dtype}"
            )


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(ValidityConfig, argv, "validity", measure, markdown)


def measure(config: ValidityConfig) -> Record:
    """Return what became of each schema's samples."""
    schemas = [draw_schema(random.Random(f"{config.seed} {k}")) for k in range(config.schemas)]
    with ProcessPoolExecutor(mp_context=get_context("forkserver")) as checkers:
        # First, so that what cannot be started ends the run before its longest part.
        asked = PEERS if config.peers_dir else ()
        peers = [_measure_peer(each, schemas, config, checkers) for each in asked]
        with _server(config) as url:
            return {"cases": _measure_server(url, schemas, config, checkers), "peers": peers}


def _measure_peer(
    asked: AskedPeer, schemas: list[Json], config: ValidityConfig, checkers: ProcessPoolExecutor
) -> Json:
    """Start a peer and return its engine, its model and its cases."""
    (peer,) = chosen((asked.name,))
    engines = PeersConfig(
        peers_dir=Path(config.peers_dir),
        dtype="float32" if config.dtype == "float32" else "bfloat16",
    )
    version = engine_version(peer, engines)
    sizes = {"samples": config.peer_samples, "completions": 1, "concurrency": _AT_ONCE}
    with serving_peer(peer, engines, *asked.flags) as url:
        config = replace(config, field=asked.field, **sizes)
        cases = _measure_server(url, schemas, config, checkers)
    return {"engine": f"{peer.engine}, {version}{asked.note}", "model": peer.model, "cases": cases}


def _measure_server(
    url: str, schemas: list[Json], config: ValidityConfig, checkers: ProcessPoolExecutor
) -> list[Json]:
    """Ask a server for the samples of each schema, and return what became of these."""
    limits = httpx.Limits(max_connections=None)
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S, limits=limits) as client:
        (model,) = (entry["id"] for entry in client.get("/v1/models").json()["data"][:1])
        body = {"model": model, "prompt": config.prompt, "max_tokens": config.max_tokens}
        # Some servers leave out unlikely tokens by default.
        body |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        other = draw_schema(random.Random(f"{config.seed} first"))
        _first_token_s(client, body | FIELDS[config.field](other))  # loads what schemas need
        return [_measure_schema(client, body, schema, config, checkers) for schema in schemas]


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
    body: Json,
    schema: Json,
    config: ValidityConfig,
    checkers: ProcessPoolExecutor,
) -> Json:
    constrained = body | FIELDS[config.field](schema)
    asked = {"new": constrained, "again": constrained, "free": body}
    first_token_s = {name: _first_token_s(client, each) for name, each in asked.items()}
    sizes = [config.completions] * (config.samples // config.completions)
    if config.samples % config.completions:
        sizes.append(config.samples % config.completions)
    before, began = _constrained_rows(client), time.monotonic()
    with ThreadPoolExecutor(config.concurrency) as threads:
        ask = partial(_ask, client, constrained)
        replies = list(threads.map(ask, range(len(sizes)), sizes))
    seconds = time.monotonic() - began
    texts: Counter[tuple[str, str]] = Counter()
    for reply, count in zip(replies, sizes, strict=True):
        if isinstance(reply, str):
            texts["", reply] += count
        else:
            texts.update((each["text"], str(each["finish_reason"])) for each in reply["choices"])
    rows = {way: count - before.get(way, 0) for way, count in _constrained_rows(client).items()}
    tokens = sum(r["usage"]["completion_tokens"] for r in replies if not isinstance(r, str))
    case = {"schema": schema, "seconds": seconds, "tokens": tokens, "rows": rows}
    case["first_token_s"] = first_token_s
    counted, step = list(texts.items()), _CHECKED_AT_ONCE
    parts = [Counter(dict(counted[at : at + step])) for at in range(0, len(counted), step)]
    return case | add_sorted(checkers.map(partial(sort_texts, schema=schema), parts))


def add_sorted(parts: Iterable[Json]) -> Json:
    """Add up what `sort_texts` returned for distinct texts."""
    first, *others = parts
    for other in others:
        first = {name: first[name] + other[name] for name in first}
    first |= {"examples": first["examples"][:3], "cut_examples": first["cut_examples"][:1]}
    return first | {"reasons": sorted({*first["reasons"]})}


def _ask(client: httpx.Client, body: Json, seed: int, n: int) -> Json | str:
    """Return the reply, or why there is none."""
    try:
        reply = client.post("/v1/completions", json=body | {"seed": seed, "n": n})
    except httpx.HTTPError as error:  # a server that dies under a schema is a finding too
        return f"{type(error).__name__}: {error}"
    return reply.json() if reply.is_success else f"{reply.status_code}: {reply.text[:300]}"


def _first_token_s(client: httpx.Client, body: Json) -> float | None:
    """Return the seconds until a stream's first text, then end it; None if none comes."""
    began = time.perf_counter()
    with (
        suppress(httpx.HTTPError),
        client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply,
    ):
        for line in reply.iter_lines():
            choices = json.loads(line[6:]).get("choices") if line.startswith("data: {") else None
            if choices and choices[0]["text"]:
                return time.perf_counter() - began
    return None


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
    is a refusal. `broken` counts the invalid ones by the keywords that they break.
    """
    validator = Draft202012Validator(schema, format_checker=FormatChecker(FORMATS))
    counts = {"valid": 0, "invalid": 0, "cut": 0, "refused": 0}
    reasons: set[str] = set()
    broken: Counter[str] = Counter()
    examples, cut_examples = [], []
    for (text, reason), count in texts.items():
        if reason not in {"stop", "length"}:
            reasons.add(reason)
            counts["refused"] += count
        elif not (keywords := _broken_keywords(text, validator)):
            counts["valid"] += count
        elif reason == "length":
            counts["cut"] += count
            cut_examples.append(text[:_SHOWN])
        else:
            counts["invalid"] += count
            examples.append(text[:_SHOWN])
            broken.update(dict.fromkeys(keywords, count))
    shown = {"distinct": len(texts), "reasons": sorted(reasons), "examples": examples[:3]}
    return counts | shown | {"cut_examples": cut_examples[:1], "broken": broken}


def _broken_keywords(text: str, validator: Draft202012Validator) -> set[str]:
    """Return the schema's keywords that a text breaks, the innermost ones of alternatives.

    Formats have their names behind them.
    """
    try:
        errors = list(validator.iter_errors(json.loads(text, parse_constant=_refuse)))
    except (ValueError, RecursionError):
        return {"not JSON"}
    innermost = [exceptions.best_match([error]) for error in errors]
    return {
        f"format {error.validator_value}" if error.validator == "format" else error.validator
        for error in innermost
    }


def _refuse(constant: str) -> NoReturn:
    """NaN and the infinities are Python's, and no JSON."""
    raise ValueError(constant)


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
    lines = table(heads, rows)
    if not record["peers"]:
        return lines
    settings = record["settings"]
    name = settings["url"] or f"srm serve, {Path(settings['model']).name}"
    heads = (
        "server | samples | valid | invalid | cut by length | refused | tok/s | valid of whole"
        " | compiling, p50 | longest | first token, known schema | none | invalid ones break"
    )
    servers = {name: record["cases"]} | {
        f"{peer['engine']}, {peer['model']}": peer["cases"] for peer in record["peers"]
    }
    rows = [f"{name} | {' | '.join(_compared(cases))}" for name, cases in servers.items()]
    return [
        *lines,
        "",
        f"Peers have random weights and a tokenizer of {VOCAB_SIZE:,} tokens, {name} its own; they "
        f"get requests of one completion, at most {_AT_ONCE} at once and of one schema. Compiling: "
        "the time to the first token of a schema's first request, less that of the second.",
        "",
        *table(heads, rows),
    ]


def _way(case: Json) -> str:
    rows = case["rows"]
    if not any(rows.values()):
        return "of this server"
    return "masked on the host" if rows.get("masked") else "with a table"


def _totals(cases: list[Json]) -> Iterator[str]:
    sums = [sum(case[name] for case in cases) for name in ("valid", "invalid", "cut", "refused")]
    yield from (f"{number:,}" for number in (sum(sums), *sums))
    yield f"{sum(case['tokens'] for case in cases) / sum(case['seconds'] for case in cases):,.0f}"


def _compared(cases: list[Json]) -> Iterator[str]:
    yield from _totals(cases)
    valid, invalid = (sum(case[name] for case in cases) for name in ("valid", "invalid"))
    yield f"{valid / (valid + invalid):.2%}" if valid + invalid else "—"
    times = [case["first_token_s"] for case in cases if None not in case["first_token_s"].values()]
    compiling = [time["new"] - time["again"] for time in times]
    again, free = ([time[name] for time in times] for name in ("again", "free"))
    for measured, summed in (
        (compiling, median),
        (compiling, max),
        (again, median),
        (free, median),
    ):
        yield f"{1e3 * summed(measured):,.1f} ms" if measured else "—"
    broken: Counter[str] = sum((Counter(case["broken"]) for case in cases), Counter())
    yield ", ".join(f"`{keyword}` {count:,}" for keyword, count in broken.most_common()) or "none"
