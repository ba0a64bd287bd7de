"""`make agreement`: `srm loadtest` beside guidellm, on the same servers and loads, in turns.

On a toy server whose timing is exact both are held against what it really did; on ours, against
its own histograms. Then the toy server stalls for a second, under an open and a closed loop. Writes
a record with every figure of every run.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from bench.host.serving import serving
from engine.config import DEMO_MODEL
from engine.records import RECORDS, new_record, settings_of, write_record
from engine.settings import load as load_settings
from tests.clients import figures
from tests.clients.figures import Figures, Load
from tests.loads.stalled import RATE, SECONDS, STALL_S, STREAMS, stalled
from tests.loads.theory import Times
from tests.loads.toy_server import ToyConfig, ToyServer

TOOLS = {"srm": figures.by_srm, "guidellm": figures.by_guidellm}
TOY = ToyConfig(ttft_s=0.5, itl_s=0.025)
PROMPT = "Question: Ava has 6 boxes with 7 pears each. How many pears is that in all?\nAnswer:"
SHOWN = ("TTFT, s", "TPOT, s", "E2E, s", "requests/s", "tokens/s")


class AgreementConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `make agreement`."""

    repeats: int = 3
    """Of each load by each tool, in turns."""
    output: Path = RECORDS
    """Folder for the record."""


CASES = (
    ("toy", Load(requests=64, tokens=64, prompt=PROMPT, streams=8)),
    ("toy", Load(requests=64, tokens=64, prompt=PROMPT, rate=4)),
    ("srm, demo model", Load(requests=160, tokens=64, prompt=PROMPT, streams=16)),
    ("srm, demo model", Load(requests=100, tokens=64, prompt=PROMPT, rate=6)),
)
Before = Callable[[], Callable[[], Figures]]
"""Called before a run, and what it returns after it: the truth."""


@contextmanager
def running(server: str) -> Iterator[tuple[str, Before]]:
    """A server's address, and what tells the truth of a run."""
    if server == "toy":
        with ToyServer(TOY) as toy:

            def fresh() -> Callable[[], Figures]:
                toy.served.clear()
                return lambda: figures.by_toy(toy.served)

            yield toy.url, fresh
    else:
        with serving(f"--model={DEMO_MODEL}", "--num-slots=512") as ours:
            yield ours.url, lambda: figures.Histograms(ours.url).figures


def measure(server: str, load: Load, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """One row a run: the tool, its figures, and the server's of the same requests."""
    rows = []
    with running(server) as (url, before):
        for number, (name, tool) in product(range(repeats), TOOLS.items()):
            truth = before()
            told = tool(folder / f"{name}-{number}", url, load)
            row = {
                **{"server": server, "load": str(load), "tool": name},
                **{"told": figures.as_data(told), "truth": figures.as_data(truth())},
                "load_average": os.getloadavg()[0],
            }
            rows.append(row)
            sys.stderr.write(f"{row}\n")
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Medians over the repeats, in Markdown."""
    lines = [
        "| server, load | mean of | srm | guidellm | srm / guidellm | srm / server "
        "| guidellm / server |",
        "|---|---|---|---|---|---|---|",
    ]
    runs = defaultdict(list)
    for row in rows:
        runs[row["server"], row["load"], row["tool"]].append((row["told"], row["truth"]))
    loads = dict.fromkeys((server, load) for server, load, _ in runs)
    for (server, load), (name, shown) in product(loads, zip(figures.MEASURES, SHOWN, strict=True)):
        found, off = [], []
        for tool in TOOLS:
            mine = runs[server, load, tool]
            found.append(median(told[name] for told, _ in mine))
            offs = [told[name] / truth[name] for told, truth in mine if name in truth]
            off.append(f"{median(offs):.3f}" if offs else "")
        cells = [*(f"{one:.5g}" for one in found), f"{found[0] / found[1]:.3f}", *off]
        lines.append(f"| {server}, {load} | {shown} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def stall() -> list[dict[str, Any]]:
    """What either loop says of a server that stalls, and theory of what users meet."""
    rows = []
    for name, is_open in (("open loop", True), ("closed loop", False)):
        found = stalled(is_open)
        requests = found.run.recording.requests
        e2e = requests["ended"] - requests["planned"]
        rows.append({"loop": name, **said(found.ttft, e2e)})
        if is_open:
            expected = found.expected[:, -1] - found.planned
            rows.append({"loop": "theory, of whoever comes", **said(found.expected_ttft, expected)})
    return rows


def said(ttft: Times, e2e: Times) -> dict[str, float]:
    """Of all requests of a run."""
    percentiles = {
        f"ttft_p{percent:g}": float(np.percentile(ttft, percent))
        for percent in (50, 90, 95, 99, 99.9)
    }
    share = float(np.mean(e2e > STALL_S / 2))
    return {"requests": len(ttft), **percentiles, "share_above_half_the_stall": share}


def stall_table(rows: list[dict[str, Any]]) -> str:
    """In Markdown."""
    names = [name for name in rows[0] if name.startswith("ttft")]
    head = " | ".join(name.replace("ttft_", "TTFT ") + ", s" for name in names)
    lines = [
        f"A server that stalls for {STALL_S:g} s in a run of {SECONDS:g} s: {RATE} requests "
        f"a second at fixed times, or {STREAMS} streams.\n",
        f"| | requests | {head} | replies that took more than {STALL_S / 2:g} s |",
        "|---" * (len(names) + 3) + "|",
    ]
    for row in rows:
        cells = " | ".join(f"{row[name]:.3f}" for name in names)
        share = row["share_above_half_the_stall"]
        lines.append(f"| {row['loop']} | {row['requests']} | {cells} | {share:.1%} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, and write the record."""
    config = load_settings(AgreementConfig, sys.argv[1:], prog="make agreement")
    record = new_record("make agreement")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (server, load) in enumerate(CASES):
            rows += measure(server, load, config.repeats, Path(folder) / f"{number}")
        stalls = stall()
    record |= {"settings": settings_of(config), "toy": vars(TOY), "runs": rows, "stalls": stalls}
    busy = [row["load_average"] for row in rows]
    note = (
        "Medians of all repeats. The server's figures are what the toy server wrote down, and "
        "sums by counts of our server's histograms between the beginning and the end of a run: "
        "ours is not equally fast in every run, so there the ratios to the server are to be "
        "compared. TTFT and E2E are from the sending; guidellm calls TPOT its ITL. "
        f"Load average of the machine after each run: {min(busy):.1f} to {max(busy):.1f}.\n\n"
    )
    text = note + table(rows) + "\n" + stall_table(stalls)
    write_record(record, "agreement", text, config.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
