"""What tells the results of one run of `srm batch` from those of another: the name of the job.

So an output needs no file beside it that says whose it is: each of its lines does.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain

from engine.config import EngineConfig
from server.batch_lines import RawLine
from server.offline_config import BatchConfig
from server.tokenizer_files import chat_template

_HEAD = 64 * 1024
"""Bytes of each end of the weights that tell them from others."""


def peek(lines: Iterator[list[RawLine]]) -> tuple[bytes, Iterator[list[RawLine]]]:
    """The first line, and all of them."""
    taken: list[list[RawLine]] = []
    for some in lines:
        taken.append(some)
        if some:
            return some[0][1] or b"", chain(taken, lines)
    return b"", iter(taken)


def job_name(config: BatchConfig, engine: EngineConfig, first: bytes) -> str:
    """A name that is the same whenever the same results are made: of the input's first line, the
    model, and what else a result depends on."""
    found = blake2b(digest_size=8)
    weights = engine.model / "model.safetensors"
    ends = [b""]
    if weights.exists():
        with weights.open("rb") as file:
            ends = [file.read(_HEAD), str(weights.stat().st_size).encode()]
            file.seek(max(0, weights.stat().st_size - _HEAD))
            ends.append(file.read())
    for part in (
        *(first, str(config.seed).encode(), engine.compute_dtype.encode()),
        *((engine.model / "config.json").read_bytes(), *ends),
        (chat_template(engine.model, config.chat_template) or "").encode(),
    ):
        found.update(len(part).to_bytes(8, "little") + part)
    return f"batch_{found.hexdigest()}"
