"""`python -m research.bench.host.bundled TASK`: bundled models served on the GPU answer as their
cards say.

What is asked is in the models' cards. A line has the seconds from the start to the first answer.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import httpx

from research.bench.gpu.task import Lines, Task, read_task
from research.bench.host.serving import serving
from srm.loadtest.records import ROOT

ASKED: dict[str, tuple[dict[str, Any], str]] = {
    "demo": (
        {
            "prompt": "Question: Ava has 6 boxes with 7 pears each. How many pears is that in all?"
            "\nAnswer:",
            "max_tokens": 64,
            "temperature": 0,
        },
        "#### 42",
    ),
    "countdown": ({"prompt": "482 of 97 3 5 12", "n": 1000, "temperature": 1, "seed": 1}, ""),
}
"""What each model is asked, and what one of the answers must have."""


def main(argv: list[str]) -> int:
    task = read_task(argv)
    lines = Lines.from_task(task)
    for name in ASKED:
        lines.attempt(name, partial(_answer, task, name))
    return 0


def _answer(task: Task, name: str) -> dict[str, Any]:
    body, expected = ASKED[name]
    started = time.monotonic()
    flags = {"model": ROOT / "models" / name, "device": task.device, "cache-dir": task.cache_dir}
    with serving(*(f"--{flag}={value}" for flag, value in flags.items()), log=sys.stderr) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=task.attempt_s)
        seconds = time.monotonic() - started
        answer.raise_for_status()
        texts = [choice["text"] for choice in answer.json()["choices"]]
    ok = any(expected in text for text in texts)
    return {"seconds": seconds, "text": texts[0], "distinct": len({*texts}), "ok": ok}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
