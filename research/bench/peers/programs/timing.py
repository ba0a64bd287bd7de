"""The one way in which programs here are told what to do, time it, and say what they found.

The task is a JSON object, the first argument:

    model           folder or file of the model
    shape           d_model, num_layers, num_heads, vocab_size, n_ctx
    dtype           "float32" or "bfloat16"
    concurrency     how many prompts are given at once, one measurement each
    prompt_tokens   of each prompt, random ids
    output_tokens   of each sample, greedy, none ended early
    seconds         a measurement is repeated until so long was measured
    threads         to compute with

One line of JSON for each concurrency comes out: `concurrency`, `began` and `ended` on the
monotonic clock that all processes share, `seconds` of each repetition, `tokens` of each.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

Prompts = list[list[int]]
Prepare = Callable[[Prompts], Callable[[int], int]]
"""A function from prompts to a function that generates n tokens for each and returns the total
number."""

FIRST_TOKEN = 3
"""Least id of ordinary tokens; lower ids are special."""
WARM_TOKENS = 4


def read_task() -> dict[str, Any]:
    """Return the task given as the first argument."""
    task: dict[str, Any] = json.loads(sys.argv[1])
    return task


def random_prompts(task: dict[str, Any], count: int) -> Prompts:
    """Return random prompts, always the same for the same count."""
    rng = random.Random(count)
    vocab_size = task["shape"]["vocab_size"]
    return [
        [rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(task["prompt_tokens"])]
        for _ in range(count)
    ]


def measure_tree(
    task: dict[str, Any], grow: Callable[[], int], sample: Callable[[int, int], int]
) -> None:
    """Time a tree, and as many tokens of independent samples, short and long ones, in turns.

    `grow` and `sample`, of a number of samples and the tokens of each, return the tokens made.
    """
    depth, length = task["depth"], task["node_tokens"]
    nodes = 2 ** (depth + 1) - 2
    ways: dict[str, Callable[[], int]] = {
        "tree": grow,
        "samples of a node": lambda: sample(nodes, length),
        "samples of a path": lambda: sample(nodes // depth, depth * length),
    }
    sample(max(task["concurrency"]), length)  # warms up
    for repetition in range(task["repetitions"]):
        for turn in range(len(ways)):
            way = [*ways][(turn + repetition) % len(ways)]
            began = time.monotonic()
            tokens = ways[way]()
            ended = time.monotonic()
            entries = {"way": way, "tokens": tokens, "began": began, "ended": ended}
            sys.stdout.write(json.dumps(entries) + "\n")
            sys.stdout.flush()


def measure(task: dict[str, Any], prepare: Prepare) -> None:
    """Measure each concurrency in turn. A generation of another length than asked for ends the
    program."""
    for concurrency in task["concurrency"]:
        generate = prepare(random_prompts(task, concurrency))
        generate(min(WARM_TOKENS, task["output_tokens"]))
        wanted = concurrency * task["output_tokens"]
        seconds: list[float] = []
        began = time.monotonic()
        while not seconds or sum(seconds) < task["seconds"]:
            started = time.monotonic()
            tokens = generate(task["output_tokens"])
            seconds.append(time.monotonic() - started)
            if tokens != wanted:
                raise SystemExit(f"{tokens} tokens instead of {wanted}")
        entries = {
            "concurrency": concurrency,
            "began": began,
            "ended": time.monotonic(),
            "seconds": seconds,
            "tokens": wanted,
        }
        sys.stdout.write(json.dumps(entries) + "\n")
        sys.stdout.flush()
