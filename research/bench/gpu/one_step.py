"""`python -m research.bench.gpu.one_step TASK`: a few decode steps and nothing else, to be looked
at.

Run under a profiler or a memory checker, or alone: then a line says what a step enqueues, by kind
and name of kernel.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from max.driver import begin_launch_trace, take_launch_trace

from research.bench.engine.decode import decode_rows, random_tokens
from research.bench.gpu.steps import open_runner
from research.bench.gpu.task import Lines, Task, read_task


def main(argv: list[str]) -> int:
    task = read_task(argv)
    Lines.from_task(task).attempt("steps", lambda: _steps(task))
    return 0


def _steps(task: Task) -> dict[str, Any]:
    runner, rows = open_runner(task), task.rows[0]
    (tokens,) = random_tokens(task.model, 1, rows)
    for position in range(task.repetitions - 1):
        runner.launch(decode_rows(tokens, position, top_p=0.9)).wait()
    begin_launch_trace()
    result = runner.launch(decode_rows(tokens, task.repetitions - 1, top_p=0.9)).wait()
    trace = take_launch_trace()  # empty on a processor
    runner.close()
    launched = Counter(f"{event.kind.name.lower()} {event.name}".strip() for event in trace)
    return {
        "d_model": task.d_model,
        "rows": rows,
        "steps": task.repetitions,
        "ok": bool((result.token_ids >= 0).all()),
        "enqueued": len(trace),
        "launched": dict(launched.most_common()),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
