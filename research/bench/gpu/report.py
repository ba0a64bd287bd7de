"""`python -m research.bench.gpu.report RESULTS [OUTPUT]`: one record and page of what came back.

RESULTS has `call-*.jsonl`, and a folder for each command with its log and the records it wrote. A
command that wrote no record is shown by the end of its log.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from research.bench.frame import Record, table
from research.bench.peaks.torch_side import plot_record
from srm.errors import ConfigError, SRMError
from srm.files import read_file
from srm.loadtest.records import RECORDS, write_record

SHOWN_LINES, SHOWN_COLUMNS = 30, 300
"""Most lines of a log, and most characters of each."""


def record_of(results: Path) -> Record:
    """Return what came back as a record. Raises ConfigError where nothing did, and where it is of
    several machines or commits."""
    lines = [line for path in sorted(results.glob("call-*.jsonl")) for line in read_lines(path)]
    last = {line["name"]: line for line in lines}  # of a command that was run again
    commands = [line | _found(results / name) for name, line in last.items()]
    records = [record for command in commands for record in command["records"].values()]
    if not records:
        raise ConfigError(f"{results} has no record that says on which machine")
    where = {f"{record['machine']} at {record['commit']}" for record in records}
    if len(where) > 1:
        raise ConfigError(f"{results} has records of {' and of '.join(sorted(where))}")
    named = {name: records[-1][name] for name in ("date", "time", "commit", "machine")}
    engines = [record for record in records if "top_p" in record]  # what a plot is drawn of
    merged: Record = {"models": [model for engine in engines for model in engine["models"]]}
    for engine in engines:
        merged |= {name: engine[name] for name in ("peak_gflops", "peak_gb_per_s")}
    return {"command": "deploy/gpu/run.sh"} | named | {"commands": commands} | merged


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file, but those that broke off with their machine."""
    for text in read_file(path).splitlines():
        try:
            line = msgspec.json.decode(text)
        except msgspec.DecodeError:
            continue
        if isinstance(line, dict) and "name" in line:
            yield line


def _found(folder: Path) -> dict[str, Any]:
    """Return the records of a command, its pages and the end of its log."""
    pages = sorted(folder.glob("*.md"))
    log = folder / "log"
    printed = read_file(log).decode(errors="replace").splitlines() if log.exists() else []
    return {
        "records": {
            page.stem: msgspec.json.decode(read_file(page.with_suffix(".json"))) for page in pages
        },
        "pages": [read_file(page).decode() for page in pages],
        "log": [line[:SHOWN_COLUMNS] for line in printed[-SHOWN_LINES:]],
    }


def markdown(record: Record) -> list[str]:
    """Render the commands as a table, and what each wrote."""
    text = table(
        "command | exit | seconds | its last words",
        (
            f"{line['name']} | {'not run' if line['exit'] is None else line['exit']} "
            f"| {line.get('seconds', '–')} | {line['last'].replace('|', chr(92) + '|')}"
            for line in record["commands"]
        ),
    )
    for line in record["commands"]:
        text += ["", f"## {line['name']}"]
        for page in line["pages"]:  # without its heading and its picture
            text += [row for row in page.splitlines()[1:] if not row.startswith("![")]
        if not line["pages"] and line["log"]:
            text += ["", f"`{line.get('command')}`", "", "```", *line["log"], "```"]
    return text


def main(argv: list[str]) -> int:
    if not 1 <= len(argv) <= 2 or argv[0].startswith("-"):
        sys.stderr.write(f"usage: {(__doc__ or '').split('`')[1]}\n")
        return ConfigError.exit_code
    results, output = Path(argv[0]), Path(argv[1]) if argv[1:] else RECORDS
    try:
        record = record_of(results)
        path = write_record(record, "gpu", "\n".join(markdown(record)) + "\n", output)
    except SRMError as error:
        sys.stderr.write(f"report: {error.message}\n")
        return error.exit_code
    if record["models"]:
        plot_record("engine", path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
