"""Figures that pages show: made from records, and in a model's card from the files beside it.

A record is a file that a benchmark wrote; earlier ones may lack values not measured then, which are
shown as "–".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec

from research.bench.frame import Record, table
from research.bench.peaks.rates import (
    byte_cells,
    bytes_moved,
    limit,
    peak_line,
    runs_of,
    share,
    start_cells,
)
from srm.engine.weights.inspect_model import inspect_model

LAST = 100
"""The last training steps whose mean loss is shown."""


def _model(folder: Path) -> list[str]:
    """Render the output of `srm inspect`."""
    rows = [f"| {name} | {value} |" for name, value in inspect_model(folder).items()]
    return ["| | |", "|---|---|", *rows]


def _training(folder: Path) -> list[str]:
    losses = msgspec.json.decode((folder / "losses.json").read_bytes(), type=list[float])
    return [
        f"{len(losses):,} steps; the mean loss of the last {LAST} is "
        f"{mean(losses[-LAST:]):.3f} nats a token."
    ]


def _accuracy(folder: Path) -> list[str]:
    """Render the result of `srm evaluate`."""
    decoded: dict[str, Any] = msgspec.json.decode((folder / "evaluation.json").read_bytes())
    ks = [f"pass@{int(k):,}" for k in decoded["pass_at"]]
    errors = decoded["pass_at_error"]
    rates = [f"{rate:.3f} ± {errors[k]:.3f}" for k, rate in decoded["pass_at"].items()]
    compared = []
    if gains := decoded["gains"]:
        more = (
            f"{more:+.3f} ± {gains['pass_at_error'][k]:.3f}" for k, more in gains["pass_at"].items()
        )
        compared = [f"| more than {gains['than']} | {' | '.join(more)} |"]
    kinds = decoded["pass_at_1_by_kind"].items()
    return [
        f"{decoded['problems']:,} held-out problems, {decoded['samples']:,} samples each at "
        f"temperature {decoded['temperature']:g}, by the weights {decoded['fingerprint']}; greedy "
        f"{decoded['greedy']:.3f}. ± is a standard error over problems, of a difference over the "
        "differences of the same problems.",
        "",
        f"| | {' | '.join(ks)} |",
        "|---|" + "---|" * len(ks),
        f"| {decoded['model']} | {' | '.join(rates)} |",
        *compared,
        "",
        "| kind of problem | pass@1 |",
        "|---|---|",
        *(f"| {kind} | {rate:.3f} |" for kind, rate in kinds),
    ]


def _learning(folder: Path) -> list[str]:
    """Render the evaluations of `srm train grpo`."""
    lines = (folder / "evaluations.jsonl").read_bytes().splitlines()
    decoded: list[dict[str, Any]] = [msgspec.json.decode(line) for line in lines]
    last = decoded[-1]
    most = list(last["pass_at"])[-1]
    rows = [
        f"| {entry['step']} | {entry['pass_at']['1']:.4f} ± {entry['pass_at_1_error']:.4f} | "
        f"{entry['gain']:+.4f} ± {entry['gain_error']:.4f} | {entry['pass_at'][most]:.4f} |"
        for entry in decoded
    ]
    return [
        f"{len(last['right'])} held-out problems, {last['samples']} samples each; ± is a standard "
        "error over problems, of the gain over the differences of the same problems.",
        "",
        f"| updates | pass@1 | gained | pass@{most} |",
        "|---|---|---|---|",
        *rows,
    ]


CARD: dict[str, Callable[[Path], list[str]]] = {
    "model": _model,
    "training": _training,
    "accuracy": _accuracy,
    "learning": _learning,
}
"""Functions that return a card's lines for its folder, by the name used in the card."""


RANDOM = "random d 512"
MODELS = {"demo", RANDOM}
"""A record is shown if it has these models; one of single operations needs only the second."""


def is_whole(record: Record) -> bool:
    """Whether a record has all that its figures need."""
    if "models" in record:
        names = {model["name"] for model in record["models"]}
        if not all("runs" in model for model in record["models"]):
            return False
        is_of_ops = all("ops" in run for model in record["models"] for run in model["runs"])
        return names >= ({RANDOM} if is_of_ops else MODELS)
    if "results" in record:  # of peers: one that has others to compare with
        return len({result["engine"] for result in record["results"] if result["points"]}) > 3
    return "cases" in record or "losses" in record


def _engine(record: Record) -> list[str]:
    """Render the best batch size of each model and dtype, beside PyTorch's."""
    rows = []
    for model, run in _ours(record):
        plain = [
            _rate(batch)
            for other in model["runs"]
            for batch in other["batches"]
            if other["by"] != "srm" and other["dtype"] == run["dtype"]
        ]
        best = max(run["batches"], key=_rate)
        sampler = 1 - run["sampler"]["unsampled_s"] / run["sampler"]["sampled_s"]
        time, gemm, memory = _step(record, model, run, best)
        rows.append(
            f"{model['name']} | {run['dtype']} | {best['batch_size']:,} | {time} "
            f"| {_rate(best):,.0f} | {gemm} | {memory} | {sampler:.1%} "
            f"| {f'{max(plain):,.0f}' if plain else '–'}"
        )
    heads = (
        "model | dtype | batch | step | tok/s | of the GEMM peak | of the memory's | sampler "
        "| PyTorch tok/s"
    )
    line = peak_line(record)
    return [f"Best batch size of each; {line[0].lower()}{line[1:]}", "", *table(heads, rows)]


def _steps(record: Record) -> list[str]:
    """Render a step's time by batch size."""
    ours = _ours(record)
    sizes = (f"{batch['batch_size']:,}" for batch in ours[0][1]["batches"])
    rows = [
        " | ".join([f"{model['name']}, {run['dtype']}",
                    *(", ".join(_step(record, model, run, batch)) for batch in run["batches"])])
        for model, run in ours
    ]  # fmt: skip
    lines = table(" | ".join(["step of so many sequences", *sizes]), rows)
    return [*lines, "", "The fractions are those of the GEMM peak and of the memory's."]


def _step(record: Record, model: Record, run: Record, batch: Record) -> tuple[str, str, str]:
    """Return a step's time, and its fractions of both peaks."""
    size: int = batch["batch_size"]
    rows: int = batch.get("rows", size)
    seconds = rows / _rate(batch)
    moved = byte_cells(record, bytes_moved(model, run["dtype"], rows), seconds)
    gemm = share(record, run["dtype"], _rate(batch), model["flops_per_token"])
    return f"{seconds * 1e3:.1f} ms", gemm, moved.split(" | ")[1]


def _starts(record: Record) -> list[str]:
    """Render the times from the command to the first token."""
    return table(
        "start | cold | warm",
        (
            f"{model['name']}, {run['dtype']} | {' | '.join(start_cells(run))}"
            for model, run in _ours(record)
        ),
    )


def _kernels(record: Record) -> list[str]:
    """Render each op at the fewest and the most rows, for the first random model: time, and
    fraction of its limit."""
    ((model, run), *_) = ((m, r) for m, r in runs_of(record) if m["name"] == RANDOM)
    every = sorted({entry["rows"] for entry in run["ops"]})
    counts = list(dict.fromkeys([*every[:1], *every[-1:]]))
    ops: dict[str, list[str]] = {}
    for entry in sorted(run["ops"], key=lambda entry: int(entry["rows"])):
        if entry["rows"] not in counts:
            continue
        name, least = limit(record, run["dtype"], entry["flops"], entry["bytes"])
        cell = f"{entry['seconds'] * 1e6:,.0f}, {least / entry['seconds']:.0%} {name[0].upper()}"
        ops.setdefault(entry["op"], []).append(cell)
    return [
        f"Ops of {model['name']} in {run['dtype']}, µs a call and the fraction of the limit that "
        f"binds (G: GEMM, M: memory); a call that does nothing takes "
        f"{run['call']['seconds'] * 1e6:.0f} µs. {peak_line(record)}",
        "",
        *table(
            " | ".join(["op", *(f"{rows:,} rows" for rows in counts)]),
            (" | ".join([op.replace("_", " "), *cells]) for op, cells in ops.items()),
        ),
    ]


def _prefill(record: Record) -> list[str]:
    """Render prefill rates: many prompts at once, and one prefilled and token by token."""
    rows = []
    for model, run in runs_of(record):
        best, prompt = max(run["prefill"], key=_rate), run["prompt"]
        part = share(record, run["dtype"], _rate(best), model["prefill_flops_per_token"])
        rows.append(
            f"{model['name']} | {run['dtype']} "
            f"| {best['prompts']:,} of {best['prompt_tokens']:,} tokens | {_rate(best):,.0f} "
            f"| {part} | {prompt['prompt_tokens']} tokens: {prompt['engine_s'] * 1e3:.0f} ms "
            f"| {prompt['decode_rows_s'] * 1e3:,.0f} ms"
        )
    return table(
        "model | dtype | prompts | tok/s | of the GEMM peak | one prompt | token by token", rows
    )


def _host(record: Record) -> list[str]:
    """Render the scheduler's cost by running sequences."""
    rows = []
    for size in dict.fromkeys((case["running"], case["rows"]) for case in record["cases"]):
        cases = [c for c in record["cases"] if (c["running"], c["rows"]) == size]
        cells = {c["length"] is None: c["schedule"] + c["complete"] for c in cases}
        rows.append(f"{size[0]:,} | {size[1]:,} | {cells[True]:.0f} ns | {cells[False]:.0f} ns")
    return table(
        "running | rows of a step | time a row | of sequences that end after 128 tokens", rows
    )


def _http(record: Record) -> list[str]:
    """Render bursts through HTTP as a fraction of the engine's rate alone."""
    rows = []
    for case in record["cases"]:
        engine, http = median(case["engine_tokens_per_s"]), median(case["http_tokens_per_s"])
        kind = "stream" if case["is_stream"] else "whole"
        size = f"{case['requests']:,} × {case['n']:,}"
        rows.append(f"{size} | {kind} | {engine:,.0f} | {http:,.0f} | {http / engine:.0%}")
    tokens = record["settings"]["max_tokens"]
    heads = f"requests × n, {tokens} tokens | reply | engine alone | through HTTP | part"
    return table(heads, rows)


def _peers(record: Record) -> list[str]:
    """Render the engines that speak HTTP at the largest concurrency that all were measured at."""
    served = [peer for peer in record["results"] if peer["how"] == "http" and peer["points"]]
    rates = [{at["concurrency"]: _rate(at) for at in peer["points"]} for peer in served]
    most = max(set.intersection(*map(set, rates)))
    rows = sorted(zip((of[most] for of in rates), served, strict=True), key=lambda row: -row[0])
    heads = f"engine, {most:,} requests at once | model | tok/s | MFLOP a token | GFLOP/s"
    return table(
        heads,
        (
            f"{peer['engine']} | {peer['model']}, {peer['dtype']} | {rate:,.0f} "
            f"| {peer['flops_per_token'] / 1e6:,.0f} | {rate * peer['flops_per_token'] / 1e9:,.0f}"
            for rate, peer in rows
        ),
    )


def _router(record: Record) -> list[str]:
    """Render what became of requests while replicas behind a router came and went."""
    lost, full = record["losses"], record["full"]
    wasted = lost["tokens_in_no_answer"] / lost["answered_tokens"]
    rows = [
        *(f"{name} | {count:,}" for name, count in sorted(lost["outcomes"].items())),
        f"answers unlike those of a server alone | {lost['differing']}",
        f"retries by the router | {lost['retries']:,.0f}",
        f"tokens computed that are in no answer | {wasted:.1%} of those of answers",
        f"prompt tokens whose state was kept | {lost['prompt_tokens_kept']:.0%}",
        f"with full queues: 503 by servers, retries | {full['refused_by_servers']:,.0f}, "
        f"{full['retries']:,.0f}",
        f"answered right after that | {full['after'].get('answered', 0)} of "
        f"{sum(full['after'].values())}",
    ]
    at_once = record["settings"]["concurrency"]
    return table(f"{lost['requests']:,} requests, {at_once} at once | ", rows)


def _ours(record: Record) -> list[tuple[Record, Record]]:
    return [(model, run) for model, run in runs_of(record) if run["by"] == "srm"]


def _rate(measured: Record) -> float:
    return float(measured["tokens_per_s"])


FIGURES: dict[str, tuple[str, Callable[[Record], list[str]]]] = {
    "engine": ("engine", _engine),
    "steps": ("engine", _steps),
    "starts": ("engine", _starts),
    "kernels": ("kernels", _kernels),
    "prefill": ("prefill", _prefill),
    "host": ("host", _host),
    "http": ("http-demo", _http),
    "peers": ("peers", _peers),
    "router": ("router-vllm", _router),
}
"""Kind of record and function that returns the lines, by the name used in a page."""
