"""Engines stepped to their end, and what they said."""

from __future__ import annotations

from engine.messages import Output, join
from engine.process.engine import Engine


def run(engine: Engine, most: int = 1_000) -> list[Output]:
    """All that is said in at most so many steps."""
    said: list[Output] = []
    while engine.has_work and most:
        said += engine.step_overlapped()
        most -= 1
    return said


def tokens(outputs: list[Output]) -> dict[tuple[str, int], bytes]:
    """Of each sample, by request and index."""
    keys = sorted({(output.id, output.index) for output in outputs})
    return {
        key: join([one for one in outputs if (one.id, one.index) == key]).token_ids for key in keys
    }
