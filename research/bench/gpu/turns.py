"""`srm bench turns`: products of a GPU, today's and those of variants, in turns on a hot card.

Each way to compute a product has the same inputs, but for int8 in the place of float8, and all take
turns of some milliseconds, so that clocks and temperature are the same for all. A time is that of
one of many calls in a row, whose weights may stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from max.driver import Device

from research.bench.engine.decode import in_turns
from research.bench.engine.models import StepsConfig
from research.bench.engine.ops import PRODUCTS, Ops, Variant
from research.bench.frame import Record, note, random_shape, run, table
from research.bench.peaks.timing import seconds_per_call
from srm.engine.device.linear import graph_dtype
from srm.engine.device.products import FLOAT8, choose_product, choose_variants
from srm.engine.device.runner import open_device

TODAY = "today"
TURN_S = 0.01


class TurnsConfig(StepsConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench turns`."""

    compared: tuple[str, ...] = ("tanh", "ahead", "stores", "clusters", "tanh+ahead+stores")
    """Variants, or several joined by +, that are compared with today's kernels."""
    rows: tuple[int, ...] = (4096, 16_384, 65_536)
    """Rows of a product."""
    seconds: float = 3.0
    """Least time that a product is computed before it is measured, and that it is measured, in
    seconds."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its table."""
    return run(TurnsConfig, argv, "turns", measure, markdown)


def measure(config: TurnsConfig) -> Record:
    """Return the seconds of each way of each product."""
    device, cases = open_device(config.device), []
    for width in config.random_widths:
        ways = {way: _ops(config, width, way, device) for way in (TODAY, *config.compared)}
        for rows in config.rows:
            for name in ways[TODAY].ops:
                case: Record = {"d_model": width, "op": name, "rows": rows}
                cases.append(note(case | _measure(ways, device, name, rows, config)))
    return {"cases": cases}


def _ops(config: TurnsConfig, width: int, way: str, device: Device) -> Ops:
    model, dtype = random_shape(width), graph_dtype(config.dtypes[0])
    product = choose_product(config.product, model, dtype, device)
    names = [] if way == TODAY else way.split("+")
    variants = choose_variants(names, product, model, dtype)
    variant = Variant(model, dtype, product, True, variants)
    return Ops(variant, device, config.cache_dir.expanduser(), () if dtype == FLOAT8 else PRODUCTS)


def _measure(
    ways: dict[str, Ops], device: Device, name: str, rows: int, config: TurnsConfig
) -> dict[str, Any]:
    given = ways[TODAY].upload(name, rows)
    calls = {
        way: ops.bind(name, ops.upload(name, rows) if "int8" in way else given)
        for way, ops in ways.items()
    }
    (seconds,) = seconds_per_call(calls[TODAY], device.synchronize, 1, TURN_S)
    count = max(1, round(TURN_S / seconds))
    turns = {way: partial(_repeat, call, count, device) for way, call in calls.items()}
    in_turns(turns, 1, config.seconds)  # the card gets hot
    timed = in_turns(turns, config.repetitions, config.seconds)
    return {"calls": count, "seconds": {way: timed[way] / count for way in ways}} | timed


def _repeat(call: Callable[[], object], count: int, device: Device) -> None:
    for _ in range(count):
        call()
    device.synchronize()


def markdown(record: Record) -> list[str]:
    """Render the record as a table: times, and how much of today's each variant takes."""
    compared = record["settings"]["compared"]
    return table(
        " | ".join(["d", "op", "rows", "µs today", *compared]),
        (
            f"{case['d_model']} | {case['op']} | {case['rows']:,} "
            f"| {case['seconds'][TODAY] * 1e6:,.1f}"
            + "".join(f" | {case['seconds'][way] / case['seconds'][TODAY]:.1%}" for way in compared)
            for case in record["cases"]
        ),
    )
