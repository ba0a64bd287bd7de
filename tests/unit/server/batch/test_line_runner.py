"""The lines of one job: all answered once, whatever earlier runs did and the disk does."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.client.client import EngineClient
from engine.errors import InvalidRequest, NotFinite
from server import metrics
from server.batch import line_runner, result_files
from server.batch.concurrency_limiter import ConcurrencyLimiter
from server.batch.engine_retry import EngineRetry
from server.batch.line_runner import LineRunner
from server.batch.lines import BatchLine, LineResult, RawLine, answer_line, parse_line
from server.batch.part_file import PartFile
from server.batch.result_files import LineSet, ResultCounts, ResultFiles
from server.generation.request_owner import RequestOwner

JOB = "batch_ab"


def raw_line(number: int, **body: Any) -> RawLine:
    line = {
        "custom_id": f"line {number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"number": number, **body},
    }
    return number, json.dumps(line).encode()


class Model:
    """Answers a line with its own body."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.flying = self.most_flying = 0
        self.meet: Callable[[int], Awaitable[Any]] | None = None
        """What happens to the line of a number."""

    async def whole(self, body: bytes, id: str, sender: RequestOwner) -> bytes:
        number = json.loads(body)["number"]
        self.asked.append(number)
        self.flying += 1
        self.most_flying = max(self.flying, self.most_flying)
        try:
            await asyncio.sleep(0)
            if self.meet is not None:
                await self.meet(number)
            return body
        finally:
            self.flying -= 1


class Job:
    """One run of a job in a folder."""

    def __init__(self, folder: Path, lines: list[RawLine], size: int = 8) -> None:
        self.model = Model()
        self.room = ConcurrencyLimiter(size, 1000)
        self.read = 0
        self.output, self.errors = folder / "output", folder / "errors"
        self.results = ResultFiles(PartFile(self.output), PartFile(self.errors), 0.01)
        self.results.recover()
        client = SimpleNamespace(status=SimpleNamespace(state="ready"), losses=0, is_closed=False)
        self.runner = LineRunner(
            job=JOB,
            source=self._read(lines),
            parse=parse_line,
            answer=self._answer,
            results=self.results,
            sending=EngineRetry(cast(EngineClient, client)),
            share=self.room.share(),
        )

    def _read(self, lines: list[RawLine]) -> Iterator[list[RawLine]]:
        for begin in range(0, len(lines), 5):
            self.read += 5
            yield lines[begin : begin + 5]
            yield []  # as of a chunk without the end of a line

    async def _answer(self, line: BatchLine) -> LineResult:
        return await answer_line(line, {"/v1/completions": self.model}, RequestOwner(), JOB)

    async def run(self) -> None:
        try:
            await asyncio.wait_for(self.runner.run(), 120)
        finally:
            self.results.close()

    @asynccontextmanager
    async def running(self, meet: Callable[[int], Awaitable[Any]]) -> AsyncIterator[None]:
        """Runs meanwhile, and is cut off at the end."""
        self.model.meet = meet
        task = asyncio.create_task(self.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def records(self, is_failed: bool = False) -> dict[str, Any]:
        path = self.errors if is_failed else self.output
        found = [json.loads(line) for line in path.read_bytes().splitlines()]
        by_id = {record["custom_id"]: record for record in found}
        assert len(by_id) == len(found), "an id is there twice"
        return by_id


def numbers(records: dict[str, Any]) -> list[int]:
    return sorted(int(id.removeprefix("line ")) for id in records)


@pytest.mark.parametrize(
    ("body", "max_flying"),
    [({}, 8), ({"n": 4}, 2), ({"text": "x" * 400}, 3)],
    ids=["lines", "sequences", "bytes"],
)
async def test_every_line_is_answered_once_in_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], max_flying: int
) -> None:
    monkeypatch.setattr(line_runner, "MAX_FLYING_BYTES", 3 * 440)
    job = Job(tmp_path, [raw_line(number, **body) for number in range(1, 101)])
    await job.run()
    assert numbers(job.records()) == list(range(1, 101))
    assert job.results.counts.completed == 100
    assert max_flying // 2 < job.model.most_flying <= max_flying
    assert (job.room.lines, job.room._sequences) == (0, 0)


async def test_it_reads_no_further_than_there_is_room(tmp_path: Path) -> None:
    job = Job(tmp_path, [raw_line(number) for number in range(1, 1001)])
    async with job.running(lambda _: asyncio.Event().wait()):
        while job.model.flying < 8:
            await asyncio.sleep(0.001)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert job.read <= 10


async def test_what_fails_is_in_the_error_file(tmp_path: Path) -> None:
    async def meet(number: int) -> None:
        if number == 3:
            raise InvalidRequest("n", "n")
        if number == 4:
            raise NotFinite("no numbers")
        if number == 5:
            raise ZeroDivisionError  # a bug of ours

    job = Job(tmp_path, [*(raw_line(number) for number in range(1, 11)), (11, b"{"), (12, None)])
    job.model.meet = meet
    await job.run()
    failed = {
        record["id"]: record["response"]["status_code"]
        if record["response"]
        else record["error"]["code"]
        for record in map(json.loads, job.errors.read_bytes().splitlines())
    }
    assert failed == {
        "batch_req_ab_3": 400,
        "batch_req_ab_4": "step_failed",
        "batch_req_ab_5": 500,
        "batch_req_ab_11": "invalid_json_line",
        "batch_req_ab_12": "line_too_long",
    }
    assert (job.results.counts.completed, job.results.counts.failed) == (7, 5)


@pytest.mark.parametrize(
    ("first", "tail"),
    [(0, b""), (7, b'{"id":"batch_req_ab_3","cus'), (14, b"\0" * 9), (21, b"[]\n"), (28, b"\n")],
)
async def test_a_run_that_is_cut_off_anywhere_is_gone_on_with(
    tmp_path: Path, first: int, tail: bytes
) -> None:
    """At any line, with the end of the file damaged in any way."""
    lines = [raw_line(number) for number in range(1, 41)]
    job = Job(tmp_path, lines)
    async with job.running(lambda number: asyncio.sleep(60 if number > first else 0)):
        while len(job.model.asked) < first:
            await asyncio.sleep(0.001)
    with (tmp_path / "output").open("ab") as file:
        file.write(tail)
    before = set(numbers(Job(tmp_path, lines).records()))
    job = Job(tmp_path, lines)
    await job.run()
    assert numbers(job.records()) == list(range(1, 41))
    assert before or not first
    assert before.isdisjoint(job.model.asked)
    assert job.results.counts.completed == 40


async def test_what_is_ended_is_told_of_every_line_that_is_left(tmp_path: Path) -> None:
    job = Job(tmp_path, [raw_line(number) for number in range(1, 101)])
    job.model.meet = lambda number: asyncio.sleep(60 if number > 20 else 0)
    task = asyncio.create_task(job.run())
    while job.model.flying < 8 or len(job.model.asked) < 28:
        await asyncio.sleep(0.001)
    assert job.runner.ended_with == ""
    job.runner.end("batch_cancelled", "it was")
    await task
    assert numbers(job.records()) == list(range(1, 21))
    assert numbers(job.records(is_failed=True)) == list(range(21, 101))
    record = job.records(is_failed=True)["line 21"]
    assert (record["response"], record["error"]["code"]) == (None, "batch_cancelled")
    assert job.runner.ended_with == "batch_cancelled"
    assert (job.room.lines, job.room._sequences) == (0, 0)
    again = ResultFiles(PartFile(job.output), PartFile(job.errors), 0)
    again.recover()
    assert again.codes == {"", "batch_cancelled"}
    assert again.counts == ResultCounts(20, 80)
    again.close()


async def test_a_line_that_is_given_up_before_its_task_began_has_its_result_and_its_room_back(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, [raw_line(number) for number in range(1, 21)])

    def parse(raw: bytes | None, number: int) -> Any:
        if number == 5:  # the tasks of lines before it were made, and are to run before this
            asyncio.get_running_loop().call_soon(job.runner.end, "batch_cancelled", "it was")
        return parse_line(raw, number)

    job.runner.parse = parse
    await job.run()
    assert 5 not in job.model.asked
    assert numbers(job.records(is_failed=True)) == list(range(1, 21))
    assert job.runner.ended_with == "batch_cancelled"
    assert (job.room.lines, job.room._sequences) == (0, 0)


@pytest.mark.parametrize("of", ["input", "results"])
async def test_a_bug_or_an_input_that_cannot_be_read_ends_the_job_and_takes_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """Rather than have it wait for ever."""
    job = Job(tmp_path, [])

    def source() -> Iterator[list[RawLine]]:
        yield [raw_line(number) for number in range(1, 6)]
        if of == "input":
            raise OSError(errno.EIO, "Input/output error")

    def fail() -> None:
        raise KeyError("a bug of ours")

    job.runner.source = source()
    if of == "input":
        job.model.meet = lambda _: asyncio.Event().wait()
    else:
        monkeypatch.setattr(job.results, "_sync", fail)
        monkeypatch.setattr(job.results, "close", lambda: None)
    with pytest.raises(OSError if of == "input" else KeyError):
        await job.run()
    assert (job.room.lines, job.room._sequences) == (0, 0)


async def test_a_full_disk_holds_the_job_up_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(result_files, "MAX_PENDING_BYTES", 3000)
    monkeypatch.setattr(result_files, "_RETRY_S", 0.01)
    caplog.set_level(logging.INFO)
    real, is_full = os.pwrite, True

    def pwrite(fd: int, data: Any, offset: int) -> int:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    failures = metrics.BATCH_JOURNAL_ERRORS._value.get()
    job = Job(tmp_path, [raw_line(number) for number in range(1, 201)])
    task = asyncio.create_task(job.run())
    while metrics.BATCH_JOURNAL_ERRORS._value.get() < failures + 3 or job.model.flying:
        await asyncio.sleep(0.01)
    assert job.results.trouble == "No space left on device"
    assert job.results.counts == ResultCounts()  # nothing counts before it is on the disk
    assert len(job.model.asked) < 50  # what waits in memory is bounded
    is_full = False
    await task
    assert numbers(job.records()) == list(range(1, 201))
    assert len(job.model.asked) == 200
    assert job.results.trouble == ""
    said = [message for message in caplog.messages if "written" in message]
    assert ["No space left" in message for message in said] == [True, False]


def test_a_set_of_lines_is_a_bit_each() -> None:
    lines = LineSet()
    for number in (1, 8, 9, 100_000):
        lines.add(number)
    assert [number for number in range(100_100) if number in lines] == [1, 8, 9, 100_000]
    assert len(lines._bits) < 17_000
