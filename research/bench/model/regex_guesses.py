"""`python -m research.bench.model.regex_guesses`: how often guesses solve tasks of models/regex.

Guesses do not read the task: random regexes of the grammar, and regexes of training. Without
models/regex/drawn.jsonl it is drawn first, of regexes that are held out.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import islice

import msgspec

from srm.loadtest.records import ROOT
from srm.training.problems import regexes
from srm.training.problems.regex_grammar import draw_regex
from srm.training.problems.regex_nodes import write_regex
from srm.training.questions.questions import Question, read_questions
from srm.training.statistics.coverage import Tally, pass_table

FOLDER = ROOT / "models" / "regex"
DRAWN = 300
"""Tasks that are drawn."""
GUESSES = 10_000
KS = (1, 10, 100, 1_000)


def draw_tasks() -> list[Question]:
    """Return tasks of regexes that are held out from training."""
    drawn = islice(regexes.tasks("models/regex/drawn.jsonl", held_out=True), DRAWN)
    return [Question(task.prompt, task.regex) for task in drawn]


def random_regexes(seed: int) -> Iterator[str]:
    """Yield regexes of the grammar without end."""
    r = random.Random(seed)
    while True:
        regex = write_regex(draw_regex(r))
        if len(regex) <= regexes.MOST_ANSWER:
            yield regex


def trained_regexes(seed: int) -> Iterator[str]:
    """Yield answers of training without end."""
    return (task.regex for task in regexes.tasks(f"guesses {seed}"))


def guessed(questions: list[Question], guesses: list[str]) -> list[float]:
    """Return pass@k of the guesses at each of KS, mean over the questions."""
    matches = [regexes.compiled(guess).fullmatch for guess in guesses]
    counts = []
    for question in questions:
        right, wrong = (
            [text.encode() for text in texts] for texts in regexes.parse_prompt(question.question)
        )
        fitting = (match for match in matches if all(map(match, right)))
        counts.append(Tally(len(guesses), sum(not any(map(match, wrong)) for match in fitting)))
    means: list[float] = pass_table(counts, KS).mean(axis=0).tolist()
    return means


def main() -> int:
    """Print a table; return 0."""
    path = FOLDER / "drawn.jsonl"
    if not path.exists():
        lines = [msgspec.json.encode(question) + b"\n" for question in draw_tasks()]
        path.write_bytes(b"".join(lines))
    _write("| one of k fits | " + " | ".join(f"k = {k:,}" for k in KS) + " |")
    _write("|---|" + "---|" * len(KS))
    kinds = {"random regexes": random_regexes(0), "regexes of training": trained_regexes(0)}
    for kind, drawn in kinds.items():
        guesses = list(islice(drawn, GUESSES))
        for name in ("drawn", "written"):
            means = guessed(read_questions(FOLDER / f"{name}.jsonl"), guesses)
            _write(f"| {name}, {kind} | " + " | ".join(f"{mean:.4f}" for mean in means) + " |")
    return 0


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
