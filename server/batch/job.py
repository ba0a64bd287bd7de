"""BatchJob: one batch from its creation, or from wherever an earlier process left it, to its end.

All that lasts is in the store and in the part files, so it may be cut off at any moment and be run
again by another process. Knows the store, and lines only as what the line runner runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from srm.errors import StoreError
from srm.files import open_file
from srm.server.batch.concurrency_limiter import LimiterShare
from srm.server.batch.engine_retry import EngineRetry
from srm.server.batch.job_input import Checked, Stopped, check_input
from srm.server.batch.line_runner import LineRunner
from srm.server.batch.lines import (
    Answerer,
    BatchLine,
    LineResult,
    answer_line,
    parse_line,
    read_lines,
)
from srm.server.batch.part_file import PartFile
from srm.server.batch.result_files import ResultFiles
from srm.server.config import ServerConfig
from srm.server.generation.engine_request import BATCH_PRIORITY, RequestOwner
from srm.server.storage.clock import Clock
from srm.server.storage.records import RUNNABLE, BatchRecord, FileRecord, LineError
from srm.server.storage.store import Store
from srm.tasks import beside

log = logging.getLogger(__name__)

EXPIRED = "batch_expired"
CANCELLED = "batch_cancelled"
_COUNT_EVERY_S = 1.0
_MESSAGES = {
    EXPIRED: "This request could not be executed before the completion window expired.",
    CANCELLED: "This request was not executed since the batch was cancelled.",
}


@dataclass(frozen=True, slots=True)
class Workplace:
    """Resources shared by all jobs of a process."""

    config: ServerConfig
    store: Store
    clock: Clock
    answerers: Mapping[str, Answerer]
    sending: EngineRetry


class BatchJob:
    """One batch in this process."""

    def __init__(self, record: BatchRecord, place: Workplace, share: LimiterShare) -> None:
        self.id = record.id
        self.owner = record.owner
        self._record = record
        self._config = place.config
        self._store = place.store
        self._clock = place.clock
        self._answerers = place.answerers
        self._sending = place.sending
        self._share = share
        self._owner = self._make_owner(share.weight)
        self._runner: LineRunner | None = None
        self._is_cancelled = record.status == "cancelling"
        self._is_stopped = False

    def see(self, record: BatchRecord, weight: float) -> None:
        """Take in a cancellation in the stored record, and the job's current weight."""
        if record.status == "cancelling":
            self._is_cancelled = True
            self._end(CANCELLED)
        if weight != self._owner.weight:
            self._share.weight = weight
            self._owner = self._make_owner(weight)

    async def run(self) -> None:
        """Run the batch to its final status; if cancelled, leave it for another process.

        Raises StoreError, and OSError if its files cannot be read or written; the job is then to be
        run again.
        """
        record = await asyncio.to_thread(self._store.get_batch, self.id)
        if record is None or not record.is_runnable:  # it ended while somebody looked
            return
        self._record = record
        self._is_cancelled = record.status == "cancelling"
        try:
            if self._record.status == "validating" and not await self._validate():
                return
            if self._is_cancelled and not self._record.total:
                await asyncio.to_thread(self._finish, "cancelled")
                return
            await self._run_lines()
        finally:
            self._is_stopped = True

    @property
    def is_late(self) -> bool:
        """Whether the batch has reached its `expires_at`."""
        return self._clock.now() >= self._record.expires_at

    def fail(self, why: str) -> None:
        """Mark the batch failed and keep the results so far. Raises StoreError and OSError."""
        error = LineError(code="internal_error", message=why)
        self._finish("failed", self._files(), errors=[error])

    async def _validate(self) -> bool:
        """Check the input file; returns whether lines are to be run."""
        path = self._store.path_of(self._record.input_file_id)
        log.info("%s: looking through %s", self.id, self._record.input_file_id)
        check = partial(
            check_input,
            path,
            self._record.endpoint,
            self._config.max_body_bytes,
            self._config.max_batch_lines,
            lambda: self._is_stopped or self._is_cancelled,
        )
        try:
            checked = await asyncio.to_thread(check)
        except FileNotFoundError:
            missing = LineError(code="input_file_missing", message="the input file is gone")
            checked = Checked(errors=[missing])
        except Stopped:
            return self._is_cancelled
        if checked.errors:
            log.info("%s: failed: %s", self.id, checked.errors[0].message)
            await asyncio.to_thread(partial(self._finish, "failed", errors=checked.errors))
            return False
        name = self._record.model or self._config.model_name
        fields = {"total": checked.total, "model": name}
        begin = partial(self._change, "validating", status="in_progress", **fields)
        changed = await asyncio.to_thread(begin)
        if changed is None:
            self._is_cancelled = True
        else:
            self._record = changed
        return True

    async def _run_lines(self) -> None:
        record = await asyncio.to_thread(self._store.allocate_output_ids, self._record)
        self._record = record
        path_of = self._store.path_of
        assert record.output_file_id and record.error_file_id
        output, errors = path_of(record.output_file_id), path_of(record.error_file_id)
        with open_file(path_of(record.input_file_id)) as file:
            with ExitStack() as opened:  # closes the first where the second cannot be opened
                parts = [opened.enter_context(closing(PartFile(path))) for path in (output, errors)]
                opened.pop_all()
            results = ResultFiles(
                parts[0],
                parts[1],
                self._config.batch_fsync_s,
                self.id,
                os.fstat(file.fileno()).st_size + 1,
            )
            try:
                await asyncio.to_thread(results.recover)
                if num_ended := results.counts.completed + results.counts.failed:
                    log.info("%s: going on after %d of %d lines", self.id, num_ended, record.total)
                self._runner = LineRunner(
                    job=self.id,
                    source=read_lines(file, self._config.max_body_bytes),
                    parse=partial(parse_line, endpoint=record.endpoint),
                    answer=self._answer,
                    results=results,
                    share=self._share,
                )
                if self._is_cancelled:
                    self._end(CANCELLED)
                elif self.is_late:
                    self._end(EXPIRED)
                async with beside(self._watch(results)):
                    await self._runner.run()
                await asyncio.to_thread(self._complete, results, self._runner.ended_with)
            finally:
                self._runner = None
                results.close()

    async def _watch(self, results: ResultFiles) -> None:
        """Update the counts in the store periodically, and end the batch when it expires."""
        stored: dict[str, Any] = {}
        while True:
            if self.is_late and self._record.status != "finalizing":
                self._end(EXPIRED)
            now = {**_counts(results), "errors": _errors(results.trouble)}
            changes = {name: value for name, value in now.items() if stored.get(name) != value}
            if changes:
                try:
                    await asyncio.to_thread(self._change, RUNNABLE, **changes)
                    stored = now
                except StoreError as error:  # counts are found out again from the results
                    log.warning("%s: %s", self.id, error.message)
            await asyncio.sleep(_COUNT_EVERY_S)

    def _complete(self, results: ResultFiles, ended_with: str) -> None:
        """Give the batch its final status once all lines have results."""
        codes = {ended_with, *results.codes}
        counts = {**_counts(results), "errors": None}
        status = "completed"
        if self._is_cancelled:
            status = "cancelled"
        elif EXPIRED in codes:
            status = "expired"
        elif self._change(("in_progress", "finalizing"), status="finalizing", **counts) is None:
            status = "cancelled"  # meanwhile
        self._finish(status, self._files(), **counts)

    def _files(self) -> list[FileRecord]:
        """Return the result files that there are; those without a line are deleted."""
        record, now = self._record, int(time.time())
        after = record.output_expires_after
        files = []
        for name, id in (("output", record.output_file_id), ("error", record.error_file_id)):
            if not id or not (path := self._store.path_of(id)).exists():
                continue
            if not (size := path.stat().st_size):
                path.unlink()
                continue
            file = FileRecord(
                id=id,
                owner=record.owner,
                filename=f"{self.id}_{name}.jsonl",
                purpose="batch_output",
                num_bytes=size,
                created_at=now,
                expires_at=None if after is None else now + after,
            )
            files.append(file)
        return files

    def _finish(self, status: str, files: Sequence[FileRecord] = (), **fields: Any) -> None:
        self._store.finish_batch(self.id, status, files, **fields)
        log.info("%s: %s", self.id, status)

    async def _answer(self, line: BatchLine) -> LineResult:
        return await self._sending.until_answered(
            lambda: answer_line(line, self._answerers, self._owner, self.id)
        )

    def _end(self, code: str) -> None:
        if self._runner is not None:
            self._runner.end(code, _MESSAGES[code])

    def _change(self, expected: Any, **fields: Any) -> BatchRecord | None:
        return self._store.change_batch(self.id, expected, **fields)

    def _make_owner(self, weight: float) -> RequestOwner:
        record = self._record
        return RequestOwner(
            *(f"batch:{record.id}", weight, BATCH_PRIORITY, True, record.created_at),
            prompts_of="" if self._config.share_prompts else record.owner,
            key=record.owner,
        )


def _counts(results: ResultFiles) -> dict[str, Any]:
    counts = results.counts
    return {
        "completed": counts.completed,
        "failed": counts.failed,
        "input_tokens": counts.usage.prompt_tokens,
        "output_tokens": counts.usage.completion_tokens,
    }


def _errors(trouble: str) -> list[LineError] | None:
    if not trouble:
        return None
    message = f"results cannot be written, and are kept and tried again: {trouble}"
    return [LineError(code="results_not_written", message=message)]
