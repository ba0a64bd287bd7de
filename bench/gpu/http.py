"""`python -m bench.gpu.http TASK`: tokens a second through HTTP, of a server on this device.

`srm serve` runs a random model of the task's shape. Bursts are `rows` streams of one completion
each, then requests of N completions, `slots` completions together, streamed and whole. Engine,
server and client share the machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.gpu.task import Lines, Task, read_task
from bench.host.serving import serving
from bench.server.http import rate_of
from bench.server.load import send
from engine.weights.random_model import write_random_model

N = 1_000
CORES_OF_API_PROCESSES = 0.375
"""Part of the cores that get an API process; the client takes as many."""
PROMPT_TOKENS, MAX_TOKENS = 32, 128
TIMEOUT_S = 120.0


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines = Lines.of(task)
    n = min(N, task.slots // 4)
    bursts = [(count, 1, True) for count in task.rows]
    bursts += [(task.slots // n, n, is_stream) for is_stream in (True, False)]
    apis = max(1, int(CORES_OF_API_PROCESSES * len(os.sched_getaffinity(0))))
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / f"srm-{task.d_model}"
        write_random_model(model, task.model)
        flags: dict[str, object] = {"model": model, "device": task.device, "dtype": task.dtype}
        flags |= {"cache-dir": task.cache_dir, "api-processes": apis, "num-slots": task.slots}
        flags |= {"max-waiting": 2 * max(task.slots, *task.rows), "log-level": "warning"}
        given = [f"--{name}={value}" for name, value in flags.items()]
        with serving(*given, log=sys.stderr) as server:
            send(server.url, requests=1, output_tokens="2", seed=9, prompt_tokens="4")
            for requests, n, is_stream in bursts:
                kind = "streamed" if is_stream else "whole"
                measure = partial(_measure, server.url, task, requests, n, is_stream)
                known = {"d_model": task.d_model, "api_processes": apis}
                lines.attempt(f"{requests} requests of {n}, {kind}", measure, **known)
    return 0


def _measure(url: str, task: Task, requests: int, n: int, is_stream: bool) -> dict[str, Any]:
    sizes: dict[str, Any] = {"requests": requests, "concurrency": requests, "n": str(n)}
    sizes |= {"prompt_tokens": str(PROMPT_TOKENS), "output_tokens": str(MAX_TOKENS)}
    raw = [
        rate_of(send(url, TIMEOUT_S, seed=seed, stream=is_stream, **sizes))
        for seed in range(task.repetitions)
    ]
    facts = {"requests": requests, "n": n, "is_stream": is_stream}
    return facts | {"http_tokens_per_s": median(raw), "raw": raw}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
