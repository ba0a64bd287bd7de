"""`python -m research.bench.gpu.report RESULTS [OUTPUT]`: a record, its tables and plot of what
came back.

RESULTS has `call-1.jsonl` and on, of as many calls as were made. What was not measured is left out
of the tables; what failed is named.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deploy.gpu.lines import AGAIN, drop_retried, parse_lines
from research.bench.frame import Record, table
from research.bench.peaks.rates import byte_cells, bytes_moved, peak_line, rate_cells, runs_of
from research.bench.peaks.torch_side import plot_record
from srm.errors import ConfigError, SRMError
from srm.loadtest.records import RECORDS, write_record

MOST_KERNELS = 12
"""Number of kernels that the report lists: those that take longest of a step."""
UNSHOWN = {"part", "key", "at", "call", "begun", "ok", "raw", "d_model", "environment", "said"}


def record_of(results: Path) -> Record:
    """Return what came back as a record. Raises ConfigError where nothing did, and where it is of
    several machines or commits."""
    entries = {
        path.stem: parse_lines(path.read_bytes()) for path in sorted(results.glob("call-*.jsonl"))
    }
    lines = [
        line | {"call": call}
        for call, (whole, _) in entries.items()
        for line in drop_retried([line for line in whole if not line.get("begun")])
    ]
    machines = [line for line in lines if line["part"] == "machine" and "machine" in line]
    if not machines:
        raise ConfigError(f"{results} has no call-*.jsonl that says on which machine")
    of = {f"{machine['machine']} at {machine['commit']}": machine["call"] for machine in machines}
    if len(of) > 1:
        named_calls = " and ".join(f"{call} is of {which}" for which, call in of.items())
        raise ConfigError(f"{results}: {named_calls}: put each into a folder of its own")
    named = ("date", "time", "commit", "machine")
    timed = _timed(lines)
    record: Record = {"command": "deploy/gpu/run.sh"} | {k: machines[-1][k] for k in named}
    record |= {"lines": lines, "models": _models(timed), "peak_gflops": _peaks(timed)}
    record["damaged_lines"] = sum(damaged for _, damaged in entries.values())
    copies = [line["gb_per_s"] for line in timed if "gb_per_s" in line]
    return record | ({"peak_gb_per_s": max(copies)} if copies else {})


def _timed(lines: list[Record]) -> list[Record]:
    """Return the lines whose times count: not those of MAX's synchronous mode."""
    return [line for line in lines if AGAIN not in line["part"]]


def _peaks(lines: list[Record]) -> dict[str, float]:
    """Return the best product by dtype: torch's, or the step's own."""
    peaks: dict[str, float] = {}
    for line in lines:
        if "gflops" in line:
            peaks[line["dtype"]] = max(line["gflops"], peaks.get(line["dtype"], 0.0))
    return peaks


def _models(lines: list[Record]) -> list[Record]:
    """Return models and runs in the form of `srm bench engine`, whose plot is drawn of them."""
    decoded = [line for line in lines if line.get("top_p") == 1.0 and "tokens_per_s" in line]
    models = []
    for width in sorted({line["d_model"] for line in decoded}):
        mine = [line for line in decoded if line["d_model"] == width]
        batches: dict[str, list[Record]] = {}
        for line in mine:
            if line["part"].startswith("decode"):
                batches.setdefault(line["dtype"], []).append(line)
        runs: list[Record] = [
            {"by": "srm", "dtype": dtype, "batches": batch} for dtype, batch in batches.items()
        ]
        others = [line for line in lines if "by" in line and line.get("d_model") == width]
        others = [line for line in others if "tokens_per_s" in line]
        runs += [
            {
                "by": by,
                "dtype": "bfloat16",
                "batches": sorted(
                    (line for line in others if line["by"] == by),
                    key=lambda record: record["batch_size"],
                ),
            }
            for by in dict.fromkeys(line["by"] for line in others)
        ]
        model = {"name": f"random d {width}", "flops_per_token": mine[0]["flops_per_token"]}
        counted = {line["dtype"]: line["bytes"] for line in mine}
        models.append(model | {"bytes": counted, "runs": runs})
    return models


def markdown(record: Record) -> list[str]:
    """Render the record as tables."""
    lines, timed = record["lines"], _timed(record["lines"])
    tables: list[tuple[str, list[str]]] = [
        ("Tokens a second, sampled at temperature 1", _rates(record)),
        ("Many sequences in turns", _many(timed)),
        ("Through HTTP", _http(timed)),
        ("Products and ops against float64", tabulate_ops(timed)),
        ("The same wherever and beside whomever", _checks(lines)),
        ("A step's kernels", _kernels(timed)),
        ("The driver", _facts(lines, "probe")),
        ("Parts", _parts(lines)),
    ]
    text = [peak_line(record)] if record["peak_gflops"] else []
    if damaged := record["damaged_lines"]:
        text += ["", f"Lines that broke off, and are left out: {damaged}."]
    for heading, shown in tables:
        if len(shown) > 2:  # more than its head
            text += ["", f"## {heading}", "", *shown]
    return text


def _rates(record: Record) -> list[str]:
    return table(
        "model | by | dtype | rows | step | tok/s | GFLOP/s | of the peak | GB/s | of the peak",
        (
            f"{model['name']} | {run['by']} | {run['dtype']} "
            f"| {batch['batch_size']:,} | {seconds * 1e3:.2f} ms | "
            + rate_cells(record, run["dtype"], batch["tokens_per_s"], model["flops_per_token"])
            + f" | {byte_cells(record, moved, seconds)}"
            for model, run in runs_of(record)
            for batch in run["batches"]
            for seconds in [batch["batch_size"] / batch["tokens_per_s"]]
            for moved in [bytes_moved(model, run["dtype"], batch["batch_size"])]
        ),
    )


def _many(lines: list[Record]) -> list[str]:
    ones = [line for line in lines if line["part"].split()[1:2] == ["slots"] and "rows" in line]
    return table(
        "d | sequences | rows of a step | tok/s",
        (
            f"{entry['d_model']} | {entry['batch_size']:,} | {entry['rows']:,} "
            f"| {entry['tokens_per_s']:,.0f}"
            for entry in ones
        ),
    )


def _http(lines: list[Record]) -> list[str]:
    return table(
        "d | servers | requests × n | reply | API and client processes of each | tok/s",
        (
            f"{line['d_model']} | {line.get('servers', 1)} | {line['requests']:,} × {line['n']:,} "
            f"| {'stream' if line['is_stream'] else 'whole'} | {line['api_processes']} "
            f"+ {line.get('workers', 1)} | {line['http_tokens_per_s']:,.0f}"
            for line in lines
            if "http_tokens_per_s" in line
        ),
    )


def tabulate_ops(lines: list[Record]) -> list[str]:
    return table(
        "op | dtype | d | rows | right | error, of what rounding allows | time | GFLOP/s | GB/s",
        (
            f"{op['op']} | {op['dtype']} | {op['d_model']} | {op['rows']:,} | {_ok(op)} | "
            f"{_error(op)} | " + (_speed(op) if "seconds" in op else "– | – | –")
            for op in lines
            if "op" in op and "ok" in op
        ),
    )


def _error(record: Record) -> str:
    if "error" not in record:
        return _cell(record["died"])
    return (
        "not a number" if record["error"] is None else f"{record['error']:.2g}"
    )  # JSON has no NaN


def _speed(record: Record) -> str:
    seconds = record["seconds"]
    rates = (f"{record[name] / seconds / 1e9:,.0f}" for name in ("flops", "bytes"))
    return " | ".join([f"{seconds * 1e6:,.1f} µs", *rates])


def _checks(lines: list[Record]) -> list[str]:
    ones = [line for line in lines if "ok" in line and "op" not in line and line["part"] != "probe"]
    return table(
        "part | what | right | found",
        (f"{entry['part']} | {entry['key']} | {_ok(entry)} | {_shown(entry)}" for entry in ones),
    )


def _kernels(lines: list[Record]) -> list[str]:
    return table(
        "d | rows | kernel | calls | µs | of the step",
        (
            f"{line['d_model']} | {line['rows']:,} | `{kernel['name'][:80]}` | {kernel['calls']} "
            f"| {kernel['ns'] / 1e3:,.1f} | {kernel['ns'] / line['ns']:.1%}"
            for line in lines
            if "kernels" in line
            for kernel in line["kernels"][:MOST_KERNELS]
        ),
    )


def _facts(lines: list[Record], part: str) -> list[str]:
    ones = [line for line in lines if line["part"].split()[0] == part and line["key"] != "end"]
    return table("what | found", (f"{entry['key']} | {_shown(entry)}" for entry in ones))


def _parts(lines: list[Record]) -> list[str]:
    return table(
        "call | part | exit | seconds | its last words",
        (
            f"{line['call']} | {line['part']} | {line.get('exit', 'left out')} "
            f"| {line.get('seconds', '–')} | {_cell(line.get('left_out', line.get('last')))}"
            for line in lines
            if line["key"] == "end"
        ),
    )


def _ok(record: Record) -> str:
    return "yes" if record["ok"] else "**no**"


def _shown(record: Record) -> str:
    shown = {key: value for key, value in record.items() if key != "launched"}  # names of digits
    return ", ".join(f"{key} {_cell(value)}" for key, value in _flat(shown) if key not in UNSHOWN)


def _flat(facts: Record) -> Iterator[tuple[str, Any]]:
    """Yield figures, those of figures within them behind their name."""
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from ((f"{key} {name}", shown) for name, shown in _flat(value))
        else:
            yield key, value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(value).split()).replace("|", "\\|")


def main(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 2 or argv[0].startswith("-"):
        sys.stderr.write(f"usage: {(__doc__ or '').split('`')[1]}\n")
        return ConfigError.exit_code
    results, output = Path(argv[0]), Path(argv[1]) if argv[1:] else RECORDS
    try:
        record = record_of(results)
    except SRMError as error:
        sys.stderr.write(f"report: {error.message}\n")
        return error.exit_code
    path = write_record(record, "gpu", "\n".join(markdown(record)) + "\n", output)
    if record["models"]:
        plot_record("engine", path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
