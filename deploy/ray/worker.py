"""An actor of a batch over a cluster: one engine, and the shards that it answers with it.

It answers as `srm batch` does, by the same code. Several shards are under way at once, the oldest
first, so that the engine's steps stay full from one to the next.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from deploy.ray.files import Piece, Shard, publish, read_shard
from srm.engine.client.client import EngineClient
from srm.engine.config import EngineConfig
from srm.server.batch.line_runner import LineRunner
from srm.server.batch.lines import BatchLine, LineResult
from srm.server.batch.result_files import ResultCounts, ResultFiles
from srm.server.commands import batch_parquet
from srm.server.commands.batch_config import BatchConfig
from srm.server.commands.batch_input import parse
from srm.server.commands.batch_output import open_part
from srm.server.commands.batch_run import LineService, line_service, most_slots
from srm.server.supervise.embedded_engine import with_engine
from srm.server.text.text import Text

PARQUET = "parquet"
_WRITE_S = 1.0
"""Seconds results may wait to be written together."""

T = TypeVar("T")


class Job(NamedTuple):
    """Settings that all shards share."""

    name: str
    input: str
    output: str
    suffix: str
    """Suffix of output files, which tells their format."""
    batch: BatchConfig
    engine: EngineConfig
    engine_module: str


class ShardWorker:
    """Answers shards; any number of threads may call it. The engine ends with this process."""

    def __init__(self, job: Job) -> None:
        """Start the engine and wait until it is ready. Raises SRMError."""
        self._job = job
        self._text = Text(job.engine.model)
        self._engine_config = msgspec.structs.replace(
            job.engine, max_slots=most_slots(job.engine, self._text)
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._stopped = asyncio.Event()
        self._num_done = 0  # lines
        self._service: Future[LineService] = Future()
        self._engine = self._begin(
            with_engine(self._engine_config, job.engine_module, self._serve, lambda: self._num_done)
        )
        self._either(self._service)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[int]]:
        """Answer the one shard of a batch; its results are in the output when this returns. Raises
        SRMError if the engine was given up, and OSError."""
        shard = shard_of(batch)
        work = self._begin(self._answer(shard))
        counts = self._either(work)
        return {
            "first": [shard.first],
            "completed": [counts.completed],
            "failed": [counts.failed],
            "completion_tokens": [counts.usage.completion_tokens],
        }

    def close(self) -> None:
        """End the engine; no shard may be under way. Raises SRMError if the engine was given up."""
        self._loop.call_soon_threadsafe(self._stopped.set)
        try:
            self._engine.result()
        finally:
            self._begin(_wait_for_others()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _either(self, work: Future[T]) -> T:
        """Return the result of what needs the engine; raises what the engine ended with."""
        waited: tuple[Future[Any], ...] = (work, self._engine)
        wait(waited, return_when=FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            self._engine.result()
        return work.result()

    async def _serve(self, client: EngineClient) -> None:
        job = self._job
        with line_service(client, job.batch, self._engine_config, self._text, job.name) as service:
            self._service.set_result(service)
            await self._stopped.wait()

    async def _answer(self, shard: Shard) -> ResultCounts:
        job, service = self._job, self._service.result()
        lines = await asyncio.to_thread(read_shard, job.input, shard, job.batch.max_body_bytes)
        name = shard.file_name(job.name, job.suffix)
        with tempfile.TemporaryDirectory(prefix="srm-shard-") as folder:
            rows = Path(folder) / name
            local = rows.with_suffix(".jsonl") if job.suffix == PARQUET else rows
            part = open_part(local)
            try:
                results = ResultFiles(part, part, _WRITE_S, job.name)
                await LineRunner(
                    job=job.name,
                    source=iter([lines]),
                    parse=parse,
                    answer=self._line,
                    results=results,
                    share=service.room.share(priority=-shard.first),
                ).run()
            finally:
                part.close()
            if job.suffix == PARQUET:
                await asyncio.to_thread(_as_rows, local, rows)
            await asyncio.to_thread(publish, rows, job.output, name)
        return results.counts

    async def _line(self, line: BatchLine) -> LineResult:
        result = await self._service.result().answer(line)
        self._num_done += 1
        return result


def batch_of(shard: Shard) -> dict[str, Any]:
    """Return a shard as a row of a dataset."""
    return {"first": shard.first, "last": shard.last, **shard.piece._asdict()}


def shard_of(batch: dict[str, Any]) -> Shard:
    """Return the shard of a batch of one such row, a column for each of its values."""
    (path,), numbers = batch["path"], ("lines", "group", "start", "end")
    piece = Piece(str(path), *(int(batch[name][0]) for name in numbers))
    return Shard(int(batch["first"][0]), int(batch["last"][0]), piece)


def _as_rows(lines: Path, rows: Path) -> None:
    with lines.open("rb") as records:
        batch_parquet.write_results(records, rows)


async def _wait_for_others() -> None:
    """Wait for the loop's other tasks: one that was cancelled may not have ended yet."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
