"""The name of a job, which tells the results of one run of `srm batch` from those of another.

So an output needs no file beside it that says whose it is: each of its lines does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.batch.lines import RawLine
from server.commands.batch_config import BatchConfig
from server.model_identity import digest, model_parts
from server.text.tokenizer_files import chat_template

PARTS = "input, model, served_model_name, dtype, chat template or seed"
"""The parts that a job's name is made from, for messages."""


def peek(lines: Iterator[list[RawLine]]) -> tuple[bytes, Iterator[list[RawLine]]]:
    """Return the first line, and an iterator over all of them."""
    taken: list[list[RawLine]] = []
    for some in lines:
        taken.append(some)
        if some:
            return some[0][1] or b"", chain(taken, lines)
    return b"", iter(taken)


def job_name(config: BatchConfig, engine: EngineConfig, first: bytes) -> str:
    """Return a name that is the same whenever the same results are made. It is made from the
    input's first line, the model, and what else a result depends on. All shards have one name; a
    folder's own name is not in it, so that the model may move."""
    parts = [
        *(first, str(config.seed).encode(), engine.compute_dtype.encode()),
        *model_parts(engine.model),
        (chat_template(engine.model, config.chat_template) or "").encode(),
    ]
    if config.served_model_name not in ("", engine.model.resolve().name):
        parts.append(config.served_model_name.encode())
    return f"batch_{digest(parts)}"


def check_shard(config: BatchConfig, output: Path, number: int) -> None:
    """Raise ConfigError for a line of an earlier run that is not of the shard."""
    if not config.has(number):
        raise ConfigError(
            f"output = {output} has line {number}, which is not of shard = {config.shard}: "
            "go on with the shard that it was made with, or name another output"
        )
