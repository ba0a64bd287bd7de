"""`srm batch` over a Ray cluster: shards of the input, answered by actors of a Ray Data pipeline.

Every shard's results are a file of the output, which an actor writes when all its lines have
ended. So what a lost actor had not written is answered again, and a run that ended early is gone on
with by the shards that have no file.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import ray
import ray.data

from deploy.ray.config import RayBatchConfig
from deploy.ray.files import (
    Shard,
    forget_unfinished,
    in_order,
    input_files,
    output_names,
    pieces,
    read_shard,
    whole_uri,
)
from deploy.ray.worker import Job, ShardWorker, batch_of
from srm.engine.config import EngineConfig
from srm.errors import ConfigError
from srm.logs import configure_command
from srm.server.commands.batch_config import BatchConfig
from srm.server.commands.batch_results import PARTS, job_name
from srm.server.commands.batch_run import most_lines
from srm.server.supervise.embedded_engine import PRIVATE
from srm.server.text.text import Text
from srm.settings import Command, build, read_settings

log = logging.getLogger(__name__)

_OF_BATCH = ("seed", "served_model_name", "chat_template", "max_body_bytes")
"""Settings of `srm batch` that mean the same here."""
_LOG_S = 10.0


def main(argv: list[str], engine_module: str = "srm.engine") -> int:
    """Answer the lines of files; returns the exit code. Raises SRMError."""
    others = set(BatchConfig.__struct_fields__) - {*_OF_BATCH, *RayBatchConfig.__struct_fields__}
    given = read_settings(
        (RayBatchConfig, BatchConfig, EngineConfig),
        argv,
        Command(
            "python -m deploy.ray",
            "Answer the lines of files on a Ray cluster.",
            private=PRIVATE | others,
            positional="input",
            short={"output": "-o"},
        ),
    )
    config = build(RayBatchConfig, given)
    batch = build(BatchConfig, {name: given[name] for name in _OF_BATCH if name in given})
    engine = build(EngineConfig, {"log_level": "warning", **given})
    configure_command()
    return run(config, batch, engine, engine_module)


def run(
    config: RayBatchConfig,
    batch: BatchConfig,
    engine: EngineConfig,
    engine_module: str = "srm.engine",
) -> int:
    """Answer the lines on the cluster that Ray is connected to, or finds as `ray.init()` does.

    Returns 1 if lines failed, else 0. Raises SRMError.
    """
    engine = msgspec.structs.replace(engine, model=engine.model.absolute())
    if batch.chat_template:
        template = str(Path(batch.chat_template).absolute())
        batch = msgspec.structs.replace(batch, chat_template=template)
    # So many shards that one after the other is through while the engine's steps are full.
    width = math.ceil(most_lines(engine, Text(engine.model)) / config.shard_lines) + 1
    if not ray.is_initialized():
        ray.init()
    source, output = whole_uri(config.input), whole_uri(config.output)
    shards = _shards(source, config.shard_lines)
    raw = (line for shard in shards for _, line in read_shard(source, shard, batch.max_body_bytes))
    name = job_name(batch, engine, next(raw, b"") or b"")
    job = Job(name, source, output, config.output_format, batch, engine, engine_module)
    missing = _missing(job, shards, config.resume)
    is_failed = False
    if missing:
        rows = _answered(config, job, missing, width)
        is_failed = _follow(rows, sum(each.last + 1 - each.first for each in missing))
    forget_unfinished(output)
    return 1 if is_failed else 0


def _shards(source: str, lines: int) -> list[Shard]:
    """Cut the input into shards; the cluster reads the files, each in a task of its own."""
    cut = ray.remote(pieces)
    return in_order(ray.get([cut.remote(source, path, lines) for path in input_files(source)]))


def _missing(job: Job, shards: list[Shard], is_resumed: bool) -> list[Shard]:
    """Return the shards that have no results yet. Raises ConfigError if the output has others'."""
    names = {shard.file_name(job.name, job.suffix): shard for shard in shards}
    there = output_names(job.output)
    if there and not is_resumed:
        raise ConfigError(
            f"output = {job.output} has files already: --resume goes on with it, or name another"
        )
    if foreign := sorted(there - names.keys()):
        raise ConfigError(
            f"output = {job.output} is of another {PARTS}, shard_lines or output_format: it has "
            f"{foreign[0]}"
        )
    if there:
        log.info("%d of %d shards have their results", len(there), len(names))
    return [shard for name, shard in names.items() if name not in there]


def _answered(
    config: RayBatchConfig, job: Job, shards: list[Shard], width: int
) -> Iterable[dict[str, int]]:
    """Yield counts of each shard as it ends, in any order."""
    rows = ray.data.from_items(
        [batch_of(shard) for shard in shards], override_num_blocks=len(shards)
    )
    counts: Iterable[dict[str, int]] = rows.map_batches(
        ShardWorker,
        fn_constructor_args=[job],
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(
            min_size=config.actors,
            max_size=config.max_actors or config.actors,
            max_tasks_in_flight_per_actor=width,
            enable_true_multi_threading=True,
        ),
        max_concurrency=width,
        num_cpus=config.cpus_per_actor,
        num_gpus=1 if job.engine.device == "gpu" else 0,
    ).iter_rows()
    return counts


def _follow(rows: Iterable[dict[str, int]], total: int) -> bool:
    """Log how far the job is; returns whether lines failed."""
    completed = failed = tokens = 0
    started = reported_at = time.monotonic()
    for row in rows:
        completed += row["completed"]
        failed += row["failed"]
        tokens += row["completion_tokens"]
        if (now := time.monotonic()) > reported_at + _LOG_S:
            reported_at = now
            rate = tokens / (now - started)
            log.info("%s of %s lines, %.0f tok/s", f"{completed + failed:,}", f"{total:,}", rate)
    log.info(
        "%s lines: %s answered, %s failed; %s tokens sampled",
        *(f"{value:,}" for value in (completed + failed, completed, failed, tokens)),
    )
    return failed > 0
