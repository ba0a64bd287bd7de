"""`python -m research.bench.host.bundled [DEVICE]`: bundled models are served and asked.

They must answer as their cards say. A line has the seconds from the start to the first answer;
the exit status counts models that answer otherwise.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import httpx

from research.bench.host.serving import serving
from srm.loadtest.records import ROOT

PUZZLE = {"prompt": "482 of 97 3 5 12", "n": 1000, "temperature": 1, "seed": 1}
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
    "countdown": (PUZZLE, ""),
    "countdown --product=own": (PUZZLE, ""),
}
"""The request to each model, with flags of the server behind its name, and a text that an answer
must contain."""
TIMEOUT_S = 60.0


def main(argv: list[str]) -> int:
    device = argv[0] if argv else "gpu"
    asked = [what for what in ASKED if device == "gpu" or "--" not in what]
    return sum(not _answers(what, device) for what in asked)


def _answers(what: str, device: str) -> bool:
    body, expected = ASKED[what]
    name, *others = what.split()
    started = time.monotonic()
    flags = (f"--model={ROOT / 'models' / name}", f"--device={device}", *others)
    with serving(*flags, log=sys.stderr) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT_S)
        seconds = time.monotonic() - started
        answer.raise_for_status()
        texts = [choice["text"] for choice in answer.json()["choices"]]
    is_right = any(expected in text for text in texts)
    verdict = f"{'as' if is_right else 'NOT as'} its card says, {len({*texts})} different answers"
    sys.stdout.write(f"{what}: after {seconds:.1f} s {texts[0]!r}, {verdict}\n")
    sys.stdout.flush()
    return is_right


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
