"""ResultFiles: the output and the error file of a job, written a group of lines at a time.

A result counts when the disk has it for certain. While the disk takes nothing, results are kept and
tried again, and the job is held up before they fill the memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from functools import partial

from srm.server import metrics
from srm.server.batch.lines import (
    MAX_LINES,
    NO_USAGE,
    LineResult,
    LineUsage,
    decode_kept,
    record_id,
)
from srm.server.batch.part_file import PartFile

log = logging.getLogger(__name__)

MAX_PENDING_BYTES = 64 * 1024**2
"""Most bytes of results that are not on disk; beyond that no line is begun."""
_HURRY_BYTES = 8 * 1024**2
"""Bytes of these beyond which results are written without waiting for more."""
_RETRY_S = 1.0


@dataclass
class ResultCounts:
    """Numbers of a job's lines by outcome, and the tokens they used."""

    completed: int = 0
    failed: int = 0
    usage: LineUsage = NO_USAGE

    def add(self, other: ResultCounts) -> None:
        self.completed += other.completed
        self.failed += other.failed
        self.usage = LineUsage(
            self.usage.prompt_tokens + other.usage.prompt_tokens,
            self.usage.completion_tokens + other.usage.completion_tokens,
        )


class LineSet:
    """A set of line numbers, with one bit each."""

    def __init__(self) -> None:
        self._bits = bytearray()

    def add(self, number: int) -> None:
        place = number >> 3
        if place >= len(self._bits):
            self._bits.extend(bytes(max(4096, place + 1 - len(self._bits))))
        self._bits[place] |= 1 << (number & 7)

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and bool(self._bits[place] >> (number & 7) & 1)


class ResultFiles:
    """A job's output and error file. `counts` covers only what is durably on disk."""

    def __init__(
        self,
        output: PartFile,
        errors: PartFile,
        fsync_s: float,
        job: str,
        last: int = MAX_LINES,
    ) -> None:
        """`fsync_s` is how long results may wait to be written together, in seconds. No line of the
        job has a number beyond `last`: a result that says so is damaged."""
        self.output = output
        self.errors = errors
        self.counts = ResultCounts()
        self.done = LineSet()
        """Lines that earlier runs have written."""
        self.codes: set[str] = set()
        """Error codes of these lines; an empty string stands for lines with a response."""
        self.trouble = ""
        """Why the disk cannot be written; empty while it can."""
        self._fsync_s = fsync_s
        self._job = job
        self._last = last
        self._fresh = ResultCounts()  # of what was put and is not counted
        self._has_work = asyncio.Event()
        self._hurry = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_synced = asyncio.Event()
        self._is_synced.set()

    @property
    def num_pending_bytes(self) -> int:
        """Bytes of results that may not be on disk."""
        return self.output.num_pending_bytes + self.errors.num_pending_bytes

    def recover(self) -> None:
        """Read what earlier runs have written and cut off what is damaged. Raises OSError."""
        self.output.recover(partial(self._recall, False))
        self.errors.recover(partial(self._recall, True))

    def _recall(self, is_failed: bool, record: bytes) -> bool:
        recalled = decode_kept(record)
        if recalled is None or recalled.number > self._last or recalled.number in self.done:
            return False
        if recalled.id != record_id(self._job, recalled.number) or recalled.is_failed != is_failed:
            return False
        self.done.add(recalled.number)
        self.codes.add(recalled.code)
        self.counts.add(ResultCounts(not is_failed, is_failed, recalled.usage))
        return True

    def put(self, result: LineResult) -> None:
        """Take a result, to be written soon."""
        (self.errors if result.is_failed else self.output).put(result.record)
        self._fresh.add(ResultCounts(not result.is_failed, result.is_failed, result.usage))
        self._is_synced.clear()
        self._has_work.set()
        if self.num_pending_bytes > _HURRY_BYTES:
            self._hurry.set()
        if self.num_pending_bytes > MAX_PENDING_BYTES:
            self._has_room.clear()

    async def wait_for_room(self) -> None:
        """Wait until results fit into memory."""
        await self._has_room.wait()

    async def finish(self) -> None:
        """Wait until all that was put is durably on disk."""
        self._hurry.set()
        await self._is_synced.wait()

    def close(self) -> None:
        """Try once to write what is pending, then close the files; what cannot be written is
        lost."""
        with contextlib.suppress(OSError):
            self._sync()
        self.output.close()
        self.errors.close()

    async def keep_writing(self) -> None:
        """Write what is put, in groups, until cancelled."""
        while True:
            await self._has_work.wait()
            if self._fsync_s:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._fsync_s):
                        await self._hurry.wait()
            self._hurry.clear()
            self._has_work.clear()
            taken, self._fresh = self._fresh, ResultCounts()
            try:
                await asyncio.to_thread(self._sync)
            except OSError as error:
                self._fresh.add(taken)
                self._has_work.set()
                self._note(error)
                await asyncio.sleep(_RETRY_S)
                continue
            self.counts.add(taken)
            metrics.BATCH_LINES.labels("completed").inc(taken.completed)
            metrics.BATCH_LINES.labels("failed").inc(taken.failed)
            self._note(None)
            if self.num_pending_bytes <= MAX_PENDING_BYTES:
                self._has_room.set()
            if not self._has_work.is_set():
                self._is_synced.set()

    def _sync(self) -> None:
        self.output.sync()
        self.errors.sync()

    def _note(self, error: OSError | None) -> None:
        """Log when the disk begins to fail, and when it works again."""
        trouble = "" if error is None else error.strerror or str(error)
        if error is not None:
            metrics.BATCH_JOURNAL_ERRORS.inc()
        if trouble != self.trouble:
            names = " and ".join(dict.fromkeys([self.output.path.name, self.errors.path.name]))
            if trouble:
                log.error(
                    "%s cannot be written: %s; results are kept and tried again", names, trouble
                )
            else:
                log.info("%s can be written again", names)
        self.trouble = trouble
