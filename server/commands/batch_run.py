"""One run of `srm batch`: the lines of its input through the engine, and their results.

Knows no files: lines come in and results go out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from functools import partial

from engine.client.client import EngineClient
from engine.config import EngineConfig
from server.batch.concurrency_limiter import ConcurrencyLimiter
from server.batch.engine_retry import EngineRetry
from server.batch.line_runner import LineRunner
from server.batch.lines import Answerer, BatchLine, LineResult, RawLine, answer_line
from server.commands.batch_config import BatchConfig
from server.commands.batch_input import parse
from server.commands.batch_progress import Level, show_progress
from server.commands.batch_results import BatchResults
from server.generation.engine_request import RequestOwner
from server.routes.services import answering
from server.text.text import Text

_AHEAD = 8
"""Most sequences that wait, per row of a step."""


@dataclass(frozen=True, slots=True)
class _Numbered(RequestOwner):
    """Draws seeds from the line's number and the command's own seed, and from nothing else."""

    base: int = 0

    def seed(self, id: str, prompt: int) -> int | None:
        return RequestOwner.seed(self, f"{self.base}-{id.rpartition('-')[2]}", prompt)


@dataclass
class BatchRun:
    """One run."""

    config: BatchConfig
    engine: EngineConfig
    text: Text
    job: str
    lines: Iterator[list[RawLine]]
    results: BatchResults
    total: int | None = None
    """Lines of the shard, once that is known."""
    _sampled: int = 0  # as the engine last said
    _before: int = 0  # tokens of what had ended when the engine started

    async def answer(self, client: EngineClient) -> None:
        """Answer lines until every line has its result."""
        room = ConcurrencyLimiter(*self._room(client))
        self._before = self.results.counts.usage.completion_tokens
        sender = _Numbered(durable=True, created_unix=0, base=self.config.seed)
        config, sending = self.config, EngineRetry(client)
        with answering(
            client, self.text, self.engine.model, config.served_model_name, config.chat_template
        ) as (completions, chat):
            answerers: dict[str, Answerer] = {one.path: one for one in (completions, chat)}

            def send(line: BatchLine) -> Awaitable[LineResult]:
                return answer_line(line, answerers, sender, self.job)

            runner = LineRunner(
                job=self.job,
                source=self._mine(),
                parse=parse,
                answer=lambda line: sending.until_answered(partial(send, line)),
                results=self.results,
                share=room.share(),
            )
            progress = asyncio.create_task(
                show_progress(partial(self._level, client), lambda: self.total)
            )
            try:
                await runner.run()
            finally:
                progress.cancel()
                await asyncio.gather(progress, return_exceptions=True)

    def _room(self, client: EngineClient) -> tuple[int, int]:
        """Return how many sequences and lines may be in flight: enough that no step is short of
        any, though a line's sequences count until the last of them has ended."""
        rows, _ = self.engine.step_limits(self.text.model)
        slots = client.status.num_slots if client.status else rows
        return slots + min(_AHEAD * rows, self.engine.max_waiting), 2 * rows

    def _mine(self) -> Iterator[list[RawLine]]:
        """Yield the lines of the shard. Raises ConfigError if they do not match earlier results."""
        last = 0
        for lines in self.lines:
            if lines:
                last = lines[-1][0]
            mine = [line for line in lines if self.config.has(line[0])]
            self.results.check_names(mine)
            yield mine
        self.results.check_end(last)

    def _level(self, client: EngineClient) -> Level:
        counts, status = self.results.counts, client.status
        ended = counts.usage.completion_tokens
        if status is not None:
            if status.sampled < self._sampled:  # another engine
                self._before = ended
            self._sampled = status.sampled
        return Level(
            counts.completed + counts.failed,
            ended,
            max(ended, self._before + self._sampled),
            status.running if status is not None else 0,
        )
