"""Runs the lines of one job: a window of them in flight, results in the order they end.

Reads as far ahead as there is room, so neither the length of the input nor that of the results
shows in memory. A line is answered once: those that earlier runs have answered are skipped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from srm.errors import SRMError
from srm.server.batch.concurrency_limiter import LimiterShare
from srm.server.batch.lines import BatchLine, LineResult, RawLine, never_run, refused
from srm.server.batch.result_files import ResultFiles
from srm.server.http.bodies import parsed
from srm.server.storage.records import LineError
from srm.tasks import beside, task_group

log = logging.getLogger(__name__)

MAX_FLYING_BYTES = 64 * 1024**2
"""Most bytes of bodies in flight; a line alone in flight may be larger."""

Answer = Callable[[BatchLine], Awaitable[LineResult]]
Parse = Callable[[bytes | None, int], BatchLine | LineError]


@dataclass
class LineRunner:
    """Runs the lines of one job."""

    job: str
    source: Iterator[list[RawLine]]
    """Groups of the input's lines, each read in a thread."""
    parse: Parse
    answer: Answer
    """Raises SRMError if the line cannot be answered, however often it is sent."""
    results: ResultFiles
    share: LimiterShare
    _flying: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks of lines in flight, kept so that all of them can be cancelled."""
    _flying_bytes: int = 0
    _has_landed: asyncio.Event = field(default_factory=asyncio.Event)
    _ending: tuple[str, str] | None = None
    """Why lines are no longer run: OpenAI's code, such as batch_expired, and a message."""
    _num_given_up: int = 0

    async def run(self) -> None:
        """Run until the results of all lines are durably on disk.

        When cancelled, lines in flight are given up; whoever runs the job again sends them again.
        Raises OSError if the input cannot be read.
        """
        async with beside(self.results.keep_writing()):
            async with task_group() as group:
                while (lines := await asyncio.to_thread(next, self.source, None)) is not None:
                    for number, raw in lines:
                        if number not in self.results.done:
                            await self._begin(group, number, raw)
            await self.results.finish()

    @property
    def ended_with(self) -> str:
        """The code that lines were given up with; empty if all were run."""
        return self._ending[0] if self._ending is not None and self._num_given_up else ""

    def end(self, code: str, message: str) -> None:
        """Give up lines in flight, and give every line without a result this code and message."""
        if self._ending is None:
            self._ending = code, message
            self.share.give_up()
            for task in self._flying:
                task.cancel()

    async def _begin(self, group: asyncio.TaskGroup, number: int, raw: bytes | None) -> None:
        line = await parsed(lambda _: self.parse(raw, number), raw or b"")
        await self.results.wait_for_room()
        if isinstance(line, LineError):
            self.results.put(never_run(number, None, self.job, line.code, line.message))
            return
        num_bytes = len(line.body)
        while self._flying and self._flying_bytes + num_bytes > MAX_FLYING_BYTES:
            await self._landing()
        if self._ending is None and await self.share.acquire(line.size):
            self._flying_bytes += num_bytes
            task = group.create_task(self._fly(line))
            self._flying.add(task)
            task.add_done_callback(partial(self._landed, line))
        else:
            self._put_given_up(line)

    def _landed(self, line: BatchLine, task: asyncio.Task[None]) -> None:
        """Release what a line held when its task ends, even if that was cancelled before it
        began."""
        self._flying.remove(task)
        self._flying_bytes -= len(line.body)
        self.share.free(line.size)
        self._has_landed.set()
        if task.cancelled() and self._ending is not None:
            self._put_given_up(line)

    async def _fly(self, line: BatchLine) -> None:
        try:
            result = await self.answer(line)
        except SRMError as error:
            message = f"given up after several attempts: {error.message}"
            result = never_run(line.number, line.custom_id, self.job, error.code, message)
        except Exception:
            # A bug of ours that one line meets must not end the process, which would meet it again.
            log.exception("%s line %d", self.job, line.number)
            result = refused(line, self.job, None)
        self.results.put(result)

    def _put_given_up(self, line: BatchLine) -> None:
        assert self._ending is not None
        self._num_given_up += 1
        code, message = self._ending
        self.results.put(never_run(line.number, line.custom_id, self.job, code, message))

    async def _landing(self) -> None:
        """Wait until a line ends."""
        self._has_landed.clear()
        await self._has_landed.wait()
