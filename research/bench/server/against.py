"""`srm bench against --base COMMIT`: this server beside that of an earlier commit, in one run.

Both serve the same model at the same time and are sent the same bursts in turns, first the one and
then the other, so that what else the machine does meets both. The client is this tree's. Bursts
under a JSON schema make lists of objects: by tables on the device, where the schema names all
properties, and by masks of the host, where it leaves the objects open.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from research.bench.frame import Record, Settings, run, table
from research.bench.host.serving import serving
from research.bench.server.http import rate_of
from research.bench.server.load import send
from srm.engine.config import DEMO_MODEL
from srm.errors import ConfigError
from srm.loadtest.records import ROOT


class AgainstConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench against`."""

    base: str = "c64c155b"
    """The earlier commit."""
    model: Path = DEMO_MODEL
    """Model folder that both serve."""
    streams: tuple[int, ...] = (64, 1_024)
    """Numbers of streams read at once, of one completion each."""
    requests: int = 10
    """Number of requests for many completions, sent at once, streamed and whole."""
    n: int = 1_000
    """Completions of each of these requests; 0: they are left out."""
    constrained: int = 256
    """Number of requests under a JSON schema, sent at once, of one completion each, by tables and
    by masks; 0: they are left out, as for a base without schemas."""
    prompt_tokens: int = 32
    """Tokens of each prompt."""
    max_tokens: int = 128
    """Tokens of each completion."""
    repetitions: int = 7
    """Bursts of each kind that each server is sent."""


class Burst(NamedTuple):
    """Requests that are sent at once."""

    requests: int
    n: int
    is_stream: bool
    way: Literal["", "table", "masks"] = ""
    """How a server keeps completions to their schema; empty: they have none."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(AgainstConfig, argv, "against", measure, markdown)


def measure(config: AgainstConfig) -> Record:
    """Return both servers' tokens a second in each burst."""
    model = config.model.resolve()
    bursts = [Burst(count, 1, True) for count in config.streams]
    if config.n:
        bursts += [Burst(config.requests, config.n, is_stream) for is_stream in (True, False)]
    if config.constrained:
        bursts.append(Burst(config.constrained, 1, False, "table"))
        bursts.append(Burst(config.constrained, 1, False, "masks"))
    with (
        _checkout(config.base) as (commit, root),
        serving(f"--model={model}", root=root) as base,
        serving(f"--model={model}") as here,
    ):
        urls = {"base": base.url, "here": here.url}
        cases = [_measure(config, urls, burst) for burst in bursts]
    return {"base": commit, "cases": cases}


@contextmanager
def _checkout(revision: str) -> Iterator[tuple[str, Path]]:
    """Lay an earlier commit out in a folder of its own; yields its id and the folder."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "base"
        commit = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        _git("worktree", "add", "--quiet", "--detach", str(root), commit)
        try:
            yield commit, root
        finally:
            _git("worktree", "remove", "--force", str(root))


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"`git {' '.join(words)}` failed: {done.stderr.strip() or 'no reason'}")
    return done.stdout.strip()


def _measure(config: AgainstConfig, urls: dict[str, str], burst: Burst) -> Record:
    requests, n, is_stream, way = burst
    tokens = str(config.max_tokens)
    sizes: dict[str, Any] = {"requests": requests, "concurrency": requests, "n": str(n)}
    sizes |= {"prompt_tokens": str(config.prompt_tokens), "stream": is_stream}
    if way:
        schema = {"json": long_list(config.max_tokens, is_open=way == "masks")}
        sizes |= {"extra_body": json.dumps({"structured_outputs": schema}), "ignore_eos": False}
    for url in urls.values():
        send(url, output_tokens=tokens if way else "2", seed=config.repetitions, **sizes)
    rates: dict[str, list[float]] = {name: [] for name in urls}
    for seed in range(config.repetitions):
        for name in sorted(urls, reverse=bool(seed % 2)):
            rates[name].append(rate_of(send(urls[name], output_tokens=tokens, seed=seed, **sizes)))
    return {**burst._asdict(), "tokens_per_s": rates}


def long_list(max_tokens: int, is_open: bool) -> dict[str, Any]:
    """Return the schema of a list that nearly fills so many tokens of the bundled model.

    Objects that are open may have any property besides, which no table can count.
    """
    item = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "count": {"type": "integer", "minimum": 0, "maximum": 10_000},
            "kind": {"enum": ["one", "other", "none"]},
        },
        "required": ["name", "count", "kind"],
        "additionalProperties": is_open,
    }
    length = max(1, max_tokens // 40)
    return {"type": "array", "items": item, "minItems": length, "maxItems": length}


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    rows = []
    for case in record["cases"]:
        base, here = case["tokens_per_s"]["base"], case["tokens_per_s"]["here"]
        ratios = [rate / other for rate, other in zip(here, base, strict=True)]
        reply = "stream" if case["is_stream"] else "whole"
        kind = f"{reply}, {case['way']}" if case["way"] else reply
        rows.append(
            f"{case['requests']:,} × {case['n']:,} | {kind} "
            f"| {median(base):,.0f} | {median(here):,.0f} | {median(ratios):.3f} "
            f"| {min(ratios):.3f} … {max(ratios):.3f}"
        )
    settings = record["settings"]
    return [
        f"Tokens a second over HTTP of this tree and of {record['base'][:7]}, which served at the "
        f"same time and were sent the same bursts in turns: prompts of {settings['prompt_tokens']} "
        f"tokens, completions of {settings['max_tokens']}. Medians of {settings['repetitions']}; "
        "*ratio* is the median of the pairs' ratios.",
        "",
        *table("requests × n | reply | base | here | ratio | of the pairs", rows),
    ]
