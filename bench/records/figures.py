"""Figures that pages show, made from records: for each, the kind of record and its rendering.

A record is a file that a benchmark wrote; earlier ones may lack values not measured then, which are
shown as "–". Knows no page and no folder.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from bench.engine.counts import Count
from bench.peaks.rates import limit, peak_line

Record = dict[str, Any]
MODELS = {"demo", "random d 512"}
"""Models that a record must have to be shown: one of a single model is no summary."""


def is_whole(record: Record) -> bool:
    """Whether a record has all that its figures need."""
    if "models" in record:
        names = {model["name"] for model in record["models"]}
        return names >= MODELS and all("runs" in model for model in record["models"])
    if "results" in record:  # of peers: one that has others to compare with
        return len({result["engine"] for result in record["results"] if result["points"]}) > 3
    return "cases" in record


def _engine(record: Record) -> list[str]:
    """Render the best batch size of each model and dtype, beside PyTorch's."""
    lines = [
        f"Best batch size of each; {peak_line(record)[0].lower()}{peak_line(record)[1:]}",
        "",
        "| model | dtype | batch | step | tok/s | of the GEMM peak | of the memory's | sampler "
        "| PyTorch tok/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model, run in _runs(record):
        if run["by"] == "srm":
            rates = [batch["tokens_per_s"] for other in model["runs"] for batch in other["batches"]
                     if other["by"] != "srm" and other["dtype"] == run["dtype"]]  # fmt: skip
            best = max(run["batches"], key=lambda batch: float(batch["tokens_per_s"]))
            sampler = 1 - run["sampler"]["unsampled_s"] / run["sampler"]["sampled_s"]
            seconds, gemm, memory = _step(record, model, run, best)
            lines.append(
                f"| {model['name']} | {run['dtype']} | {best['batch_size']:,} "
                f"| {seconds * 1e3:.1f} ms | {best['tokens_per_s']:,.0f} | {gemm} | {memory} "
                f"| {sampler:.1%} | {f'{max(rates):,.0f}' if rates else '–'} |"
            )
    return lines


def _steps(record: Record) -> list[str]:
    """Render a step's time by batch size."""
    ours = [(model, run) for model, run in _runs(record) if run["by"] == "srm"]
    sizes = [batch["batch_size"] for batch in ours[0][1]["batches"]]
    lines = [
        "| step of so many sequences | " + " | ".join(f"{size:,}" for size in sizes) + " |",
        "|---|" + "---|" * len(sizes),
    ]
    for model, run in ours:
        cells = [
            f"{seconds * 1e3:.1f} ms, {gemm}, {memory}"
            for seconds, gemm, memory in (_step(record, model, run, one) for one in run["batches"])
        ]
        lines.append(f"| {model['name']}, {run['dtype']} | {' | '.join(cells)} |")
    return [*lines, "", "The fractions are those of the GEMM peak and of the memory's."]


def _step(record: Record, model: Record, run: Record, batch: Record) -> tuple[float, str, str]:
    rows = batch.get("rows", batch["batch_size"])
    seconds = rows / batch["tokens_per_s"]
    peak = record["peak_gflops"].get(run["dtype"])
    gemm = f"{rows * model['flops_per_token'] / seconds / 1e9 / peak:.0%}" if peak else "–"
    counted, memory = model.get("bytes", {}).get(run["dtype"]), record.get("peak_gb_per_s")
    if counted is None or memory is None:
        return seconds, gemm, "–"
    moved = counted["once"] + rows * counted["row"]
    return seconds, gemm, f"{moved / seconds / 1e9 / memory:.0%}"


def _starts(record: Record) -> list[str]:
    """Render the times from the command to the first token."""
    lines = ["| start | cold | warm |", "|---|---|---|"]
    for model, run in _runs(record):
        if run["by"] == "srm":
            cold, warm = run["startup"].get("cold_s"), median(run["startup"]["warm_s"])
            shown = f"{cold:.1f} s" if cold else "–"
            lines.append(f"| {model['name']}, {run['dtype']} | {shown} | {warm:.1f} s |")
    return lines


def _kernels(record: Record) -> list[str]:
    """Render each op by rows, for the first random model: time, and fraction of its limit."""
    ((model, run), *_) = ((m, r) for m, r in _runs(record) if m["name"] == "random d 512")
    counts = sorted({entry["rows"] for entry in run["ops"]})
    lines = [
        f"Ops of {model['name']} in {run['dtype']}, µs a call and the fraction of the limit that "
        f"binds (G: GEMM, M: memory); a call that does nothing takes "
        f"{run['call']['seconds'] * 1e6:.0f} µs. {peak_line(record)}",
        "",
        "| op | " + " | ".join(f"{rows:,} rows" for rows in counts) + " |",
        "|---|" + "---|" * len(counts),
    ]
    for op in dict.fromkeys(entry["op"] for entry in run["ops"]):
        cells = []
        for entry in sorted((e for e in run["ops"] if e["op"] == op), key=lambda e: int(e["rows"])):
            count = Count(entry["flops"], entry["bytes"])
            name, least = limit(record, run["dtype"], count.flops, count.bytes)
            share = f"{least / entry['seconds']:.0%} {name[0].upper()}"
            cells.append(f"{entry['seconds'] * 1e6:,.0f}, {share}")
        lines.append(f"| {op.replace('_', ' ')} | {' | '.join(cells)} |")
    return lines


def _prefill(record: Record) -> list[str]:
    """Render prefill rates: many prompts at once, and one prefilled and token by token."""
    lines = [
        "| model | dtype | prompts | tok/s | of the GEMM peak | one prompt | token by token |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, run in _runs(record):
        best = max(run["prefill"], key=lambda entry: float(entry["tokens_per_s"]))
        peak, prompt = record["peak_gflops"].get(run["dtype"]), run["prompt"]
        flops = best["tokens_per_s"] * model["prefill_flops_per_token"] / 1e9
        lines.append(
            f"| {model['name']} | {run['dtype']} "
            f"| {best['prompts']:,} of {best['prompt_tokens']:,} tokens "
            f"| {best['tokens_per_s']:,.0f} | {f'{flops / peak:.0%}' if peak else '–'} "
            f"| {prompt['prompt_tokens']} tokens: {prompt['engine_s'] * 1e3:.0f} ms "
            f"| {prompt['decode_rows_s'] * 1e3:,.0f} ms |"
        )
    return lines


def _host(record: Record) -> list[str]:
    """Render the scheduler's cost by running sequences."""
    step, peak = record.get("step"), record.get("peak_gb_per_s")
    lines = [
        "| running | rows of a step | going on | replaced all the time | of a step | GB/s |",
        "|---|---|---|---|---|---|",
    ]
    sizes = dict.fromkeys((case["running"], case["rows"]) for case in record["cases"])
    for running, rows in sizes:
        cases = [c for c in record["cases"] if (c["running"], c["rows"]) == (running, rows)]
        cells = {c["length"] is None: c["schedule"] + c["complete"] for c in cases}
        part = f"{cells[False] / step['row_ns']:.2%}" if step else "–"
        moved = max(c.get("bytes_per_row", 0) for c in cases)
        rate = moved / cells[True]
        lines.append(
            f"| {running:,} | {rows:,} | {cells[True]:.0f} ns a row | {cells[False]:.0f} ns "
            f"| {part} | {f'{rate:.1f}, {rate / peak:.0%} of the peak' if peak else '–'} |"
        )
    return lines


def _http(record: Record) -> list[str]:
    """Render bursts through HTTP as a fraction of the engine's rate alone."""
    tokens = record["settings"]["max_tokens"]
    lines = [
        f"| requests × n, {tokens} tokens | reply | engine alone | through HTTP | part |",
        "|---|---|---|---|---|",
    ]
    for case in record["cases"]:
        engine, http = median(case["engine_tokens_per_s"]), median(case["http_tokens_per_s"])
        lines.append(
            f"| {case['requests']:,} × {case['n']:,} "
            f"| {'stream' if case['is_stream'] else 'whole'} "
            f"| {engine:,.0f} | {http:,.0f} | {http / engine:.0%} |"
        )
    return lines


def _text(record: Record) -> list[str]:
    """Render the rates of the work between engine and socket."""
    tokens = record["settings"]["max_tokens"]
    lines = [f"| requests × n, {tokens} tokens | burst | tok/s |", "|---|---|---|"]
    for case in record["cases"]:
        rate = median(one["tokens_per_s"] for one in case["raw"])
        lines.append(f"| {case['requests']:,} × {case['n']:,} | {case['name']} | {rate:,.0f} |")
    return lines


def _peers(record: Record) -> list[str]:
    """Render every engine that speaks HTTP, with each of its models at its best concurrency."""
    lines = [
        "| engine, over HTTP | model | requests at once | tok/s | GFLOP/s |",
        "|---|---|---|---|---|",
    ]
    served = [one for one in record["results"] if one["how"] == "http" and one["points"]]
    rows = [(max(one["points"], key=lambda point: float(point["tokens_per_s"])), one)
            for one in served]  # fmt: skip
    for best, one in sorted(rows, key=lambda row: -float(row[0]["tokens_per_s"])):
        rate = best["tokens_per_s"]
        lines.append(
            f"| {one['engine']} | {one['model']}, {one['dtype']} | {best['concurrency']:,} "
            f"| {rate:,.0f} | {rate * one['flops_per_token'] / 1e9:,.0f} |"
        )
    return lines


def _runs(record: Record) -> list[tuple[Record, Record]]:
    return [(model, run) for model in record["models"] for run in model["runs"]]


FIGURES: dict[str, tuple[str, Callable[[Record], list[str]]]] = {
    "engine": ("engine", _engine),
    "steps": ("engine", _steps),
    "starts": ("engine", _starts),
    "kernels": ("kernels", _kernels),
    "prefill": ("prefill", _prefill),
    "host": ("host", _host),
    "http": ("http-demo", _http),
    "text": ("text", _text),
    "peers": ("peers", _peers),
}
"""By the name used in a page: the kind of record, and the function that returns the lines."""
