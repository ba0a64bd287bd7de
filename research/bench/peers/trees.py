"""`python -m research.bench.peers trees`: a tree of samples beside independent ones, by engine."""

from __future__ import annotations

from statistics import median
from typing import Any

from research.bench.frame import Record, table
from research.bench.host.processes import Watch
from research.bench.peers.config import Peer, PeersConfig
from research.bench.peers.making import make_model
from research.bench.peers.running import described, placeholders, program_task, run_program


def measure(peer: Peer, config: PeersConfig) -> dict[str, Any]:
    """Return what a peer's program timed. Raises ConfigError."""
    values = placeholders(peer, config, make_model(peer, config.folder))
    task = program_task(peer, config, values) | {
        "depth": config.depth,
        "node_tokens": config.node_tokens,
        "repetitions": config.repetitions,
    }
    lines: list[dict[str, Any]] = []
    with Watch() as watch:
        run_program(peer, config, task, watch, lines)
    for line in lines:
        line["foreign_cpus"] = watch.foreign_cpus(line["began"], line["ended"])
    return described(peer, config, values) | {"concurrency": peer.concurrency, "timed": lines}


def markdown(record: Record) -> list[str]:
    """Render the table of a record."""
    settings, rows = record["settings"], []
    nodes = 2 ** (settings["depth"] + 1) - 2
    for peer in record["results"]:
        rates: dict[str, list[float]] = {}
        for line in peer["timed"]:
            own = rates.setdefault(line["way"], [])
            own.append(line["tokens"] / (line["ended"] - line["began"]))
        trees = rates["tree"]
        for way, speeds in rates.items():
            share = median(tree / own for tree, own in zip(trees, speeds, strict=True))
            rows.append(
                f"{peer['engine']}, {peer['version']} | {peer['model']}, {peer['dtype']} | {way} "
                f"| {median(speeds):,.0f} | {median(speeds) / settings['node_tokens']:,.0f} "
                f"| {share:.2f}"
            )
    foreign = [line["foreign_cpus"] or 0.0 for peer in record["results"] for line in peer["timed"]]
    return [
        f"A tree of {nodes:,} nodes of {settings['node_tokens']} tokens, each node with two "
        f"children, after a prompt of {settings['prompt_tokens']} random tokens, and as many "
        f"tokens of independent samples of that prompt, {settings['repetitions']} times in turns. "
        f"Other programs used at most {max(foreign):.2f} CPUs meanwhile.",
        "",
        *table(
            "engine | model | way | tokens/s, median | nodes of as many tokens/s "
            "| tree's to it, median",
            rows,
        ),
    ]
