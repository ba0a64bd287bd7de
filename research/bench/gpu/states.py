"""`python -m research.bench.gpu.states TASK`: sequences say the same wherever and beside whomever
they run.

The same `rows[0]` sequences are decoded in the lowest slots and in the highest, which lie beyond
2^32 values where there are `slots` enough; fewer together; and parked halfway, to go on in other
slots. PREFILLED of them have a prompt, fed whole and in pieces. Tokens, log-probabilities and
states must agree to the last bit: `differing` counts those that do not.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from research.bench.engine.decode import decode_rows, prefill_rows, random_tokens
from research.bench.gpu.steps import open_runner
from research.bench.gpu.task import Lines, Task, read_task
from srm.engine.device.runner import ModelRunner
from srm.engine.steps.batch import F32, FROM_DEVICE, I32

STEPS = 6
TOGETHER = (1, 2, 7, 64, 127, 128)
"""Rows of a step that the same sequences are cut into; on a GPU one has its own product of MAX's,
and few have other tiles of ours."""
PROMPT, PREFILLED = 48, 1000


class Outcome(NamedTuple):
    """The tokens of some sequences, by step, and their states afterwards."""

    tokens: I32
    logprobs: F32
    states: F32

    def differing(self, other: Outcome) -> dict[str, Any]:
        counts = {
            f"differing_{name}": int((mine.view(np.int32) != theirs.view(np.int32)).sum())
            for name, mine, theirs in zip(self._fields, self, other, strict=True)
        }
        return counts | {"ok": not any(counts.values())}


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines, rows, runner = Lines.from_task(task), task.rows[0], open_runner(task)
    low = np.arange(rows, dtype=np.int32)
    high = low + np.int32(runner.num_slots - rows)
    expected = _say(task, runner, low)
    values = runner.num_slots * task.model.state_width
    facts = {"d_model": task.d_model, "slots": runner.num_slots, "values": values, "rows": rows}

    def compared(how: str, **settings: Any) -> None:
        measure = partial(_say, task, runner, **settings)
        lines.attempt(how, lambda: facts | measure().differing(expected))

    def prefilled(length: int) -> dict[str, Any]:
        whole = _prefill(task, runner, low[:PREFILLED], PROMPT)
        pieces = _prefill(task, runner, high[:PREFILLED], length)
        return facts | pieces.differing(whole)

    different = len(np.unique(expected.tokens))
    lines.attempt("sampled", lambda: facts | {"different": different, "ok": different > STEPS})
    compared("again", slots=low)
    compared("the highest slots", slots=high)
    for together in (count for count in TOGETHER if count < rows):
        compared(f"{together} together", slots=low, together=together)
    compared("parked halfway", slots=low, then=high)
    for length in (1, 7, PROMPT // 2):
        lines.attempt(f"a prompt in pieces of {length}", partial(prefilled, length))
    runner.close()
    return 0


def _say(
    task: Task,
    runner: ModelRunner,
    slots: I32,
    together: int | None = None,
    then: I32 | None = None,
) -> Outcome:
    """Decode one sequence in each slot; with `then` they move there halfway, through the host."""
    (first,) = random_tokens(task.model, 1, len(slots))
    tokens, logprobs = [], []
    for position in range(STEPS):
        if then is not None and position == STEPS // 2:
            runner.write_slots(then.astype(np.int64), runner.read_slots(slots.astype(np.int64)))
            slots = then
        fed = first if position == 0 else np.full(len(slots), FROM_DEVICE, np.int32)
        launched = []
        for begin in range(0, len(slots), together or len(slots)):
            part = slice(begin, begin + (together or len(slots)))
            seeds = np.arange(len(slots), dtype=np.int32)[part]
            batch = decode_rows(fed[part], position, 0.9, slots[part], seeds)
            launched.append(runner.launch(batch))
        results = [step.wait() for step in launched]
        tokens.append(np.concatenate([output.token_ids for output in results]))
        logprobs.append(np.concatenate([output.logprobs for output in results]))
    states = runner.read_slots(slots.astype(np.int64)).states
    return Outcome(np.stack(tokens), np.stack(logprobs), states)


def _prefill(task: Task, runner: ModelRunner, slots: I32, length: int) -> Outcome:
    """Feed every slot a prompt of PROMPT tokens, so many a step; only the states say something."""
    prompts, none = random_tokens(task.model, len(slots), PROMPT), np.empty(0, np.int32)
    for begin in range(0, PROMPT, length):
        piece = np.ascontiguousarray(prompts[:, begin : begin + length])
        runner.launch(prefill_rows(piece, begin, slots)).wait()
    states = runner.read_slots(slots.astype(np.int64)).states
    return Outcome(none, none.astype(np.float32), states)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
