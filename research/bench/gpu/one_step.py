"""`python -m research.bench.gpu.one_step`: a few decode steps of a random model and nothing else.

Run it under a profiler or a memory checker, or alone: it prints what a step enqueues, by kind and
name of kernel. The exit status is 1 where a token was not sampled.
"""

from __future__ import annotations

import sys
from collections import Counter

import msgspec
from max.driver import begin_launch_trace, take_launch_trace

from research.bench.engine.decode import decode_rows, random_runner, random_tokens
from research.bench.engine.models import StepsConfig
from research.bench.frame import random_shape
from srm.settings import load


def main(argv: list[str]) -> int:
    config = load(StepsConfig, argv, prog="python -m research.bench.gpu.one_step")
    model, rows = random_shape(config.random_widths[0]), config.rows[0]
    runner = random_runner(model, config, config.dtypes[0], rows)
    (tokens,) = random_tokens(model, 1, rows)
    for position in range(config.repetitions - 1):
        runner.launch(decode_rows(tokens, position, top_p=0.9)).wait()
    begin_launch_trace()
    result = runner.launch(decode_rows(tokens, config.repetitions - 1, top_p=0.9)).wait()
    trace = take_launch_trace()  # empty on a processor
    runner.close()
    launched = Counter(f"{event.kind.name.lower()} {event.name}".strip() for event in trace)
    is_sampled = bool((result.token_ids >= 0).all())
    facts = {"sampled": is_sampled, "enqueued": len(trace), "launched": launched.most_common()}
    sys.stdout.write(msgspec.json.encode(facts).decode() + "\n")
    return not is_sampled


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
