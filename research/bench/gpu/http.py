"""`python -m research.bench.gpu.http TASK`: tokens a second through HTTP, of servers on this
device.

`srm serve` runs a random model of the task's shape. Bursts are `rows` streams of one completion
each, then requests of N completions, `slots` completions together, streamed and whole. Engine,
server and client share the machine. Of several `servers`, each has an engine on the same device and
its share of the slots and requests; a line says why one server does not take two.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from research.bench.gpu.task import Lines, Task, read_task
from research.bench.host.serving import serving
from research.bench.server.http import rate_of
from research.bench.server.load import send
from srm.engine.weights.random_model import write_random_model
from srm.errors import ConfigError

N = 1_000
CORES_OF_API_PROCESSES = 0.6
"""Part of the cores that get an API process. An engine takes one, the client what is left."""
PROMPT_TOKENS, MAX_TOKENS = 32, 128
TIMEOUT_S = 120.0


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines = Lines.from_task(task)
    n = min(N, task.slots // 4)
    bursts = [(count, 1, True) for count in task.rows]
    bursts += [(task.slots // n, n, is_stream) for is_stream in (True, False)]
    cores, count = len(os.sched_getaffinity(0)), task.servers
    apis = max(1, int(CORES_OF_API_PROCESSES * cores / count))
    workers = max(1, (cores - count * (apis + 1)) // count)
    known = {"d_model": task.d_model, "servers": count, "api_processes": apis, "workers": workers}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        model = Path(folder) / f"srm-{task.d_model}"
        write_random_model(model, task.model)
        flags: dict[str, object] = {"model": model, "device": task.device, "dtype": task.dtype}
        flags |= {"cache-dir": task.cache_dir, "api-processes": apis}
        flags |= {"num-slots": task.slots // count, "log-level": "warning"}
        flags |= {"max-waiting": 2 * max([task.slots, *task.rows])}
        given = [f"--{name}={value}" for name, value in flags.items()]
        if count > 1:
            lines.attempt("one server, devices 0,0", partial(_refused, *given, "--devices=0,0"))
        urls = []
        for number in range(count):
            data = f"--data-dir={folder}/data-{number}"
            urls.append(opened.enter_context(serving(*given, data, log=sys.stderr)).url)
            send(urls[-1], requests=1, output_tokens="2", seed=9, prompt_tokens="4")
        for requests, n, is_stream in bursts:
            kind = "streamed" if is_stream else "whole"
            measure = partial(_measure, urls, task, workers, requests, n, is_stream)
            lines.attempt(f"{requests} requests of {n}, {kind}", measure, **known)
    return 0


def _refused(*flags: str) -> dict[str, Any]:
    """Return the last line of a server that does not start; empty: it did."""
    with tempfile.TemporaryFile("w+") as log:
        try:
            with serving(*flags, log=log):
                return {"refused": ""}
        except ConfigError:
            log.seek(0)
            return {"refused": log.read().splitlines()[-1]}


def _measure(
    urls: Sequence[str], task: Task, workers: int, requests: int, n: int, is_stream: bool
) -> dict[str, Any]:
    each = requests // len(urls)
    sizes: dict[str, Any] = {"requests": each, "concurrency": each, "n": str(n)}
    sizes |= {"prompt_tokens": str(PROMPT_TOKENS), "output_tokens": str(MAX_TOKENS)}
    sizes |= {"stream": is_stream, "timeout_s": TIMEOUT_S, "workers": workers}
    with ThreadPoolExecutor(len(urls)) as threads:
        raw = [
            rate_of(*threads.map(partial(send, seed=seed, **sizes), urls))
            for seed in range(task.repetitions)
        ]
    facts = {"requests": requests, "n": n, "is_stream": is_stream}
    return facts | {"http_tokens_per_s": median(raw), "raw": raw}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
