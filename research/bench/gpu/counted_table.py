"""The table of `srm bench counted`, made from its record."""

from __future__ import annotations

from research.bench.frame import Record, table


def markdown(record: Record) -> list[str]:
    """Render nanoseconds a token of each kernel, and what they come to."""
    cases, code = record["cases"], record["code"]
    rows = [
        f"{of_one[0]['name'].replace('_', ' ')} | {of_one[0]['launches']} | "
        + " | ".join(map(_cell, of_one))
        for of_one in zip(*(case["kernels"] for case in cases), strict=True)
    ]
    gaps = (f"{case['gaps_ns']:.1f}" for case in cases)
    rows.append(" | ".join(["between kernels", str(cases[0]["launches"]), *gaps]))
    for name in cases[0]["tokens_per_s"]:
        reached = (f"**{case['tokens_per_s'][name] / 1e6:.2f} M**" for case in cases)
        rows.append(" | ".join([f"**tok/s, {name}**", "", *reached]))
    heads = (f"{case['card']}, d {case['width']:,}, {case['rows']:,} rows" for case in cases)
    epilogues = ", ".join(
        f"{kind} {value} ({code['special'][kind]})" for kind, value in code["epilogues"].items()
    )
    samplers = ", ".join(f"{name} {sampler[0]:,.0f}" for name, sampler in code["samplers"].items())
    return [
        "A step of 8 layers in bfloat16, counted and not measured: launches, nanoseconds a token, "
        "and whether processors (p) or memory (m) bind. Instructions of a thread after a tile's "
        f"products (in brackets: special functions): {epilogues}. Instructions of warps for a row "
        f"of the sampler: {samplers}.",
        "",
        *table(" | ".join(["kernel", "launches", *heads]), rows),
    ]


def _cell(kernel: Record) -> str:
    return f"{kernel['ns']:.1f} {kernel['bound'][0]}" if kernel["ns"] else "–"
