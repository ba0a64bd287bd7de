"""`python -m research.bench.records.lm_eval RESULTS COMMAND …`: a record of what lm-eval measured.

RESULTS is the file that `lm-eval run --output_path` left, the commands are those that made it, each
a word of the shell. The record has its results, versions and settings as they are, and a row for
each number with its standard error, which lm-eval estimates.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from research.bench.frame import table
from srm.files import read_file
from srm.loadtest.records import RECORDS, new_record, write_record


def main(results: str, *commands: str) -> int:
    """Write the record and print its table; return 0."""
    measured = msgspec.json.decode(read_file(Path(results)))
    record = new_record("; ".join(commands))
    names = "results", "config", "configs", "versions", "n-samples", "lm_eval_version"
    record |= {name: measured[name] for name in names}
    lines = [
        f"{task} | {metric.replace(',', ', ')} | {value:.4f} | {error:.4f}"
        for task, numbers in measured["results"].items()
        for metric, value in numbers.items()
        if isinstance(error := numbers.get(metric.replace(",", "_stderr,")), float)
    ]
    heads = "task | metric, filter | value | standard error"
    text = f"lm-eval {measured['lm_eval_version']}\n\n" + "\n".join(table(heads, lines)) + "\n"
    write_record(record, "lm-eval", text, RECORDS)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
