"""One run of `srm batch`: the lines of its input through the engine, and their results.

Knows no files: lines come in and results go out.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from srm.engine.client.client import EngineClient
from srm.engine.config import EngineConfig
from srm.server.batch.concurrency_limiter import ConcurrencyLimiter
from srm.server.batch.engine_retry import EngineRetry
from srm.server.batch.job_input import FirstLines, duplicate
from srm.server.batch.line_runner import LineRunner
from srm.server.batch.lines import Answerer, BatchLine, LineResult, RawLine, answer_line
from srm.server.commands.batch_config import BatchConfig
from srm.server.commands.batch_input import parse
from srm.server.commands.batch_progress import Level, show_progress
from srm.server.commands.batch_results import BatchResults
from srm.server.generation.engine_request import RequestOwner
from srm.server.routes.services import answering
from srm.server.storage.records import LineError
from srm.server.text.text import Text
from srm.tasks import beside, dispensable

_AHEAD = 8
"""Most sequences that wait, per row of a step."""
_SLOTS_A_ROW = 1.5
"""Slots per row of a step: enough that steps are full though prompts have to be read first, and so
few that hardly any sequences take turns: what began first ends first. With 1.0, steps are 82 to 94
% full."""


@dataclass(frozen=True, slots=True)
class _Numbered(RequestOwner):
    """Draws seeds from the line's number and the command's own seed, and from nothing else."""

    base: int = 0

    def seed(self, id: str, prompt: int) -> int | None:
        return RequestOwner.seed(self, f"{self.base}-{id.rpartition('-')[2]}", prompt)


class LineService(NamedTuple):
    """One engine as the lines of a job use it."""

    answer: Callable[[BatchLine], Awaitable[LineResult]]
    """Raises SRMError if the line cannot be answered, however often it is sent."""
    room: ConcurrencyLimiter


@contextmanager
def line_service(
    client: EngineClient, config: BatchConfig, engine: EngineConfig, text: Text, job: str
) -> Iterator[LineService]:
    """Yield what answers lines of `job` by one engine, for the block."""
    owner = _Numbered(durable=True, created_unix=0, base=config.seed)
    names = config.served_model_name, config.chat_template
    with answering(client, text, engine.model, *names) as services:
        answerers: dict[str, Answerer] = {service.path: service for service in services}
        sending = EngineRetry(client)
        yield LineService(
            lambda line: sending.until_answered(partial(answer_line, line, answerers, owner, job)),
            ConcurrencyLimiter(*_count_in_flight(client, engine, text)),
        )


def most_slots(engine: EngineConfig, text: Text) -> int:
    """Return the most slots that raise throughput."""
    rows, _ = engine.step_limits(text.model)
    return math.ceil(_SLOTS_A_ROW * rows)


def most_lines(engine: EngineConfig, text: Text) -> int:
    """Return the most lines that are in flight at once."""
    rows, _ = engine.step_limits(text.model)
    return 2 * rows


def _count_in_flight(client: EngineClient, engine: EngineConfig, text: Text) -> tuple[int, int]:
    """Return how many sequences and lines may be in flight: enough that no step is short of
    any, though a line's sequences count until the last of them has ended."""
    rows, _ = engine.step_limits(text.model)
    slots = client.status.num_slots if client.status else rows
    return slots + min(_AHEAD * rows, engine.max_waiting), most_lines(engine, text)


@dataclass
class BatchRun:
    """One run."""

    config: BatchConfig
    engine: EngineConfig
    text: Text
    job: str
    lines: Iterator[list[RawLine]]
    results: BatchResults
    total: int | None
    """Lines of the shard; None if the input can be read only once."""
    _sampled: int = 0  # as the engine last said
    _before: int = 0  # tokens of what had ended when the engine started
    _first_lines: FirstLines = field(default_factory=FirstLines)  # where `total` is None
    _duplicates: dict[int, LineError] = field(default_factory=dict)

    async def answer(self, client: EngineClient) -> None:
        """Answer lines until every line has its result."""
        self._before = self.results.counts.usage.completion_tokens
        with line_service(client, self.config, self.engine, self.text, self.job) as service:
            runner = LineRunner(
                job=self.job,
                source=self._mine(),
                parse=self._parse,
                answer=service.answer,
                results=self.results,
                share=service.room.share(),
            )
            show = partial(show_progress, partial(self._level, client), lambda: self.total)
            async with beside(dispensable(show, "the progress shown")):
                await runner.run()

    def _mine(self) -> Iterator[list[RawLine]]:
        """Yield the lines of the shard. Raises ConfigError if they do not match earlier results."""
        last = 0
        for lines in self.lines:
            if lines:
                last = lines[-1][0]
            if self.total is None:  # nobody could look through them before
                self._find_duplicates(lines)
            mine = [line for line in lines if self.config.has(line[0])]
            self.results.check_names(mine)
            yield mine
        self.results.check_end(last)

    def _find_duplicates(self, lines: list[RawLine]) -> None:
        for number, raw in lines:
            line = parse(raw, number)
            if isinstance(line, BatchLine):  # others count nowhere, as in a file
                earlier = self._first_lines.line_of(line.custom_id, number)
                if earlier != number and self.config.has(number):
                    self._duplicates[number] = duplicate(line.custom_id, number, earlier)

    def _parse(self, raw: bytes | None, number: int) -> BatchLine | LineError:
        return self._duplicates.pop(number, None) or parse(raw, number)

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
