"""The tables of a `srm bench scale` record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from research.bench.frame import Record, table


def assumptions(record: Record) -> list[str]:
    """Render what the plan takes as given, and where each figure is from."""
    return [
        *table("measured | figure | record", _measured(record["unit_costs"])),
        "",
        *table("given, not measured on this machine | figure", _given(record["settings"])),
    ]


def _measured(unit: dict[str, Any]) -> Iterator[str]:
    rows = [
        (
            "processor time of a token in API processes, whole replies of many samples",
            f"{unit['whole_ns']:,.0f} ns",
            "text",
        ),
        (
            "– streamed, one sample a request",
            f"{unit['streamed_ns']:,.0f} ns",
            "text",
        ),
        ("bytes of a token in a whole reply", f"{unit['whole_bytes']:.1f}", "text"),
        ("– streamed, several tokens an event", f"{unit['streamed_bytes']:.1f}", "text"),
        ("scheduler's processor time of a token", f"{unit['host_ns']:,.0f} ns", "host"),
        (
            "processor time of a batch's line where the batch is, if it runs elsewhere",
            f"{unit['owner_us']:,.0f} µs",
            "fleet",
        ),
        ("– where it runs, besides the engine", f"{unit['worker_us']:,.0f} µs", "fleet"),
        ("bytes of such a line between the two", f"{unit['line_bytes']:,.0f}", "fleet"),
    ]
    records = unit["records"]
    return (f"{name} | {value} | `{records[kind]}`" for name, value, kind in rows)


def _given(settings: dict[str, Any]) -> Iterator[str]:
    low, high = settings["gpu_tokens_per_s"]
    rows = [
        (
            "tokens a second of a GPU, d 1,024 (2.26 M: an H100 through HTTP; 2.79 M: its engine)",
            f"{low / 1e6:g} to {high / 1e6:g} M",
        ),
        ("sequences that a GPU runs at once", f"{settings['running']:,}"),
        ("state of a sequence (8 layers of 1,024 float32)", f"{settings['state_bytes']:,} bytes"),
        ("requests a second that a router's core passes on", f"{settings['router_rate']:,.0f}"),
        ("hours between two failures of a GPU", f"{settings['mtbf_h']:,.0f}"),
        ("stops of each replica that are meant, a day", f"{settings['stops_a_day']:g}"),
        ("seconds until a replica is back", f"{settings['restart_s']:g}"),
        (
            "price of a GPU and of a core, an hour",
            f"{settings['gpu_price']:g} and {settings['core_price']:g} dollars",
        ),
    ]
    return (f"{name} | {value}" for name, value in rows)


def plan(record: Record) -> list[str]:
    """Render what each number of GPUs takes, one table for each kind of load."""
    lines: list[str] = []
    for name in dict.fromkeys(case["load"] for case in record["cases"]):
        cases = [case for case in record["cases"] if case["load"] == name]
        load = cases[0]
        lines += [
            f"**{name}**: prompts of {load['prompt_tokens']:,} tokens; samples of each: "
            f"{load['samples']:,}, of {load['output_tokens']:,} tokens:",
            "",
            *table(
                "GPUs | tok/s | requests/s | network | API cores | router cores "
                "| servers that own batches | dollars a billion tokens",
                (_row(item) for item in _by_gpus(cases)),
            ),
            "",
        ]
    return lines[:-1]


def losses(record: Record) -> list[str]:
    """Render what the simulated replicas lost."""
    settings = record["settings"]
    rows = []
    for gpus, cases in _by_gpus(record["losses"]):
        low, high = cases
        rows.append(
            f"{gpus:,} | {low['failures']:,} and {low['stops']:,} | {low['most_away']} "
            f"| {low['away']:.3%} | {_range(low['redone'], high['redone'], '{:.3%}')} "
            f"| {_bytes(low['state_bytes'])} "
            f"| {_range(high['recompute_s'], low['recompute_s'], '{:.0f} s')}"
        )
    return [
        f"{settings['days']:g} simulated days of batch lines; a stop that is meant ends lines as a "
        "failure does:",
        "",
        *table(
            "GPUs | failures and stops | most away at once | GPU time away | tokens made twice "
            "| states of one replica | made again by one GPU in",
            rows,
        ),
    ]


def markdown(record: Record) -> list[str]:
    """Render the record as tables."""
    return [*assumptions(record), "", *plan(record), "", *losses(record)]


def _by_gpus(cases: list[dict[str, Any]]) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the slow and the fast case of each number of GPUs."""
    counts = dict.fromkeys(case["gpus"] for case in cases)
    return [(count, [case for case in cases if case["gpus"] == count]) for count in counts]


def _row(case: tuple[int, list[dict[str, Any]]]) -> str:
    gpus, (low, high) = case
    cells = [f"{gpus:,}"]
    for name, form in (
        ("tokens_per_s", "{:,.0f} M"),
        ("requests_per_s", "{:,.0f}"),
        ("network_bytes_per_s", "{:,.0f} MB/s"),
        ("api_cores", "{:,.0f}"),
        ("router_cores", "{:,.0f}"),
        ("owners", "{:,.0f}"),
    ):
        scale = 1e-6 if "M" in form else 1
        cells.append(_range(low[name] * scale, high[name] * scale, form))
    cells.append(_range(low["price"], high["price"], "{:.2f}"))
    return " | ".join(cells)


def _range(low: float, high: float, form: str) -> str:
    least, most = form.format(low), form.format(high)
    return least if least == most else f"{least} – {most}"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB"
