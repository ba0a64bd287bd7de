"""Draws questions of gsm_symbolic into files, for `research.experiments coverage --train …`.

The templates are those of reasoning_gym (https://pypi.org/project/reasoning-gym/, Apache-2.0),
after GSM-Symbolic (https://arxiv.org/abs/2410.05229). That package pins its requirements, so it
gets an environment of its own, which runs this file as a script. Every fifth template is kept out
of training: `known-templates` has new numbers in templates of the training questions,
`new-templates` has templates that are in none of these.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path

SUFFIX = " Give the result as your final answer. Do not include units."
"""Every question ends with it; the files leave it out."""
KEPT_OUT = 5
"""One template in this many is in no training question."""
SIZE = 2**20
"""Rows of a dataset, whose row i is drawn with the seed plus i."""


def draw(seed: int, is_new: bool) -> Iterator[dict[str, str]]:
    """Yield questions with worked answers that end with `#### <number>`."""
    dataset = import_module("reasoning_gym").create_dataset("gsm_symbolic", seed=seed, size=SIZE)
    order = sorted(set(dataset.task_indices))
    new = set(order[::KEPT_OUT])
    for place, template in enumerate(dataset.task_indices):
        if (template in new) != is_new:
            continue
        row = dataset[place]
        worked, _, _ = row["metadata"]["answer_cot"].partition("####")
        question = row["question"].removesuffix(SUFFIX)
        yield {"question": question, "answer": f"{worked.strip()}\n#### {row['answer']}"}


def main() -> None:
    """Write the three files; a question to answer is none that is trained on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="folder of the files")
    parser.add_argument("--rows", type=int, default=100_000, help="training questions")
    parser.add_argument("--asked", type=int, default=200, help="questions of each other file")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    train = [*islice(draw(0, False), given.rows)]
    learned = {row["question"] for row in train}
    other = (row for row in draw(SIZE, False) if row["question"] not in learned)
    files = {
        "train": train,
        "known-templates": islice(other, given.asked),
        "new-templates": islice(draw(2 * SIZE, True), given.asked),
    }
    for name, rows in files.items():
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (given.output / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
