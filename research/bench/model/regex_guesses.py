"""`python -m research.bench.model.regex_guesses`: how often guesses solve tasks of models/regex.

Guesses do not read the task: random regexes of the grammar, and regexes of training. The record
has how many of them fit each task. Without models/regex/drawn.jsonl it is drawn first, of regexes
that are held out.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import islice

import msgspec

from research.bench.frame import table
from research.experiments.tasks.regex_examples import DRAWN, count_fitting, trained_regexes
from srm.loadtest.records import RECORDS, new_record, write_record
from srm.training.problems import regexes
from srm.training.problems.regex_grammar import draw_regex
from srm.training.problems.regex_nodes import write_regex
from srm.training.questions.questions import read_questions
from srm.training.statistics.coverage import Tally, pass_table

FOLDER = DRAWN.parent
COUNT = 300
"""Tasks that are drawn."""
GUESSES = 10_000
KS = (1, 10, 100, 1_000)


def draw_tasks() -> list[dict[str, str]]:
    """Return questions about regexes that are held out from training."""
    drawn = islice(regexes.tasks("models/regex/drawn.jsonl", held_out=True), COUNT)
    names = "question", "answer", "regex"
    return [dict(zip(names, (task.prompt, task.misses, task.regex), strict=True)) for task in drawn]


def random_regexes(seed: int) -> Iterator[str]:
    """Yield regexes of the grammar without end."""
    r = random.Random(seed)
    while True:
        regex = write_regex(draw_regex(r))
        if len(regex) <= regexes.MOST_ANSWER:
            yield regex


def main() -> int:
    """Write a record and print its table; return 0."""
    if not DRAWN.exists():
        drawn_lines = (msgspec.json.encode(question) + b"\n" for question in draw_tasks())
        DRAWN.write_bytes(b"".join(drawn_lines))
    record = new_record("python -m research.bench.model.regex_guesses")
    record |= {"guesses": GUESSES, "fitting": {}}
    lines = []
    kinds = {"random regexes": random_regexes(0), "regexes of training": trained_regexes(0)}
    for kind, drawn in kinds.items():
        guesses = list(islice(drawn, GUESSES))
        for name in ("drawn", "written"):
            counts = count_fitting(read_questions(FOLDER / f"{name}.jsonl"), guesses)
            record["fitting"][f"{name}, {kind}"] = counts
            means = pass_table([Tally(GUESSES, count) for count in counts], KS).mean(axis=0)
            lines.append(" | ".join([f"{name}, {kind}", *(f"{mean:.4f}" for mean in means)]))
    heads = " | ".join(["one of k fits", *(f"k = {k:,}" for k in KS)])
    write_record(record, "regex-guesses", "\n".join(table(heads, lines)) + "\n", RECORDS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
