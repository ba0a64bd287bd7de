"""`python -m research.bench.model.recurrence_lines TASK`: the recurrence of a random model, as
lines.

TASK is a `research.bench.gpu.task.Task`. What else it knows is in
`research.bench.model.recurrence_rate`.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from research.bench.gpu.task import Lines, Task, read_task
from research.bench.model.recurrence_rate import FORMS, Decoder
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import fold


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines, weights = Lines.from_task(task), fold(task.model, random_tensors(task.model), "random")
    for form in task.forms:
        decoder = Decoder(weights, form, task.dtype, task.device)
        for rows in task.rows:
            known = {"by": FORMS[form], "dtype": task.dtype, "d_model": task.d_model}
            lines.attempt(f"{form} {rows}", partial(_rate, decoder, rows, task), **known)
    return 0


def _rate(decoder: Decoder, rows: int, task: Task) -> dict[str, Any]:
    return decoder.measure(rows, task.repetitions, task.seconds)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
