"""The table of `srm bench counted`, made from its record. Knows no kernel."""

from __future__ import annotations

from bench.frame import Record, table

GOALS = {1024: 3.4e6, 512: 10e6}
"""Goals in tokens a second, by width."""


def markdown(record: Record) -> list[str]:
    """Render nanoseconds a token of each kernel, and what they come to."""
    cases, code = record["cases"], record["code"]
    rows = [
        " | ".join([of_one[0]["name"].replace("_", " "), *map(_cell, of_one)])
        for of_one in zip(*(case["kernels"] for case in cases), strict=True)
    ]
    gaps = (f"{case['launches']}, {case['gaps_ns']:.1f}" for case in cases)
    layers = (str(case["launches_a_layer"]) for case in cases)
    rows += [" | ".join(["between kernels", *gaps]), " | ".join(["launches a layer", *layers])]
    for name in cases[0]["tokens_per_s"]:
        reached = (
            f"**{case['tokens_per_s'][name] / 1e6:.2f} M**"
            + (f" of {GOALS[case['width']] / 1e6:g} M" if case["width"] in GOALS else "")
            for case in cases
        )
        rows.append(" | ".join([f"**tok/s, {name}**", *reached]))
    heads = (f"d {case['width']:,}, {case['rows']:,} rows" for case in cases)
    epilogues = ", ".join(f"{kind} {value}" for kind, value in code["epilogues"].items())
    samplers = ", ".join(f"{name} {found[0]:,.0f}" for name, found in code["samplers"].items())
    return [
        "A step of 8 layers in bfloat16, counted and not measured: launches, bytes a token, "
        "nanoseconds a token, and whether processors (p) or memory (m) bind. Instructions of a "
        f"thread after a tile's products: {epilogues}. Instructions of warps for a row of the "
        f"sampler: {samplers}.",
        "",
        *table(" | ".join(["kernel", *heads]), rows),
    ]


def _cell(kernel: Record) -> str:
    if not kernel["ns"]:
        return str(kernel["launches"])
    moved = f"{kernel['bytes'] / 1e3:,.1f} KB"
    return f"{kernel['launches']}, {moved}, {kernel['ns']:.1f} {kernel['bound'][0]}"
