"""The lines of one job: all answered once, whatever earlier runs did and the disk does."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from srm.engine.client.client import EngineClient
from srm.errors import InvalidRequest
from srm.server.batch import line_runner, result_files
from srm.server.batch.concurrency_limiter import ConcurrencyLimiter
from srm.server.batch.engine_retry import EngineRetry
from srm.server.batch.line_runner import LineRunner
from srm.server.batch.lines import BatchLine, LineResult, RawLine, answer_line, parse_line
from srm.server.batch.part_file import PartFile
from srm.server.batch.result_files import ResultCounts, ResultFiles
from srm.server.errors import NotFinite
from srm.server.generation.engine_request import RequestOwner
from tests.kit.engines.making import sample_value
from tests.kit.engines.served_engine import until

JOB = "batch_ab"


def raw_lines(count: int, **body: Any) -> list[RawLine]:
    """From number 1 on."""
    line = {"method": "POST", "url": "/v1/completions"}
    return [
        (i, json.dumps({**line, "custom_id": f"line {i}", "body": {"number": i, **body}}).encode())
        for i in range(1, count + 1)
    ]


class Model:
    """Answers a line with its own body."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.flying = self.most_flying = 0
        self.meet: Callable[[int], Awaitable[Any]] = lambda _: asyncio.sleep(0)
        """What happens to the line of a number."""

    async def answer_whole(self, body: bytes, id: str, owner: RequestOwner) -> bytes:
        number = json.loads(body)["number"]
        self.asked.append(number)
        self.flying += 1
        self.most_flying = max(self.flying, self.most_flying)
        try:
            await asyncio.sleep(0)
            await self.meet(number)
            return body
        finally:
            self.flying -= 1


class Job:
    """One run of a job in a folder; its room is free again at the end."""

    def __init__(self, folder: Path, lines: list[RawLine], size: int = 8) -> None:
        self.model = Model()
        self.room = ConcurrencyLimiter(size, 1000)
        self.read = 0
        self.output, self.errors = folder / "output", folder / "errors"
        self.results = ResultFiles(PartFile(self.output), PartFile(self.errors), 0.01, JOB)
        self.results.recover()
        client = SimpleNamespace(status=SimpleNamespace(state="ready"), losses=0, is_closed=False)
        self.sending = EngineRetry(cast(EngineClient, client))
        self.runner = LineRunner(
            job=JOB,
            source=self._read(lines),
            parse=parse_line,
            answer=self._answer,
            results=self.results,
            share=self.room.share(),
        )

    def _read(self, lines: list[RawLine]) -> Iterator[list[RawLine]]:
        for begin in range(0, len(lines), 5):
            self.read += 5
            yield lines[begin : begin + 5]
            yield []  # as of a chunk without the end of a line

    async def _answer(self, line: BatchLine) -> LineResult:
        answerers = {"/v1/completions": self.model}
        return await self.sending.until_answered(
            lambda: answer_line(line, answerers, RequestOwner(), JOB)
        )

    async def run(self) -> None:
        try:
            await asyncio.wait_for(self.runner.run(), 120)
        finally:
            self.results.close()
            assert (self.room.lines, self.room.sequences) == (0, 0)

    @asynccontextmanager
    async def running(self, meet: Callable[[int], Awaitable[Any]]) -> AsyncIterator[None]:
        """Runs meanwhile, and is cut off at the end."""
        self.model.meet = meet
        task = asyncio.create_task(self.run())
        yield
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def records(self, is_failed: bool = False) -> dict[int, Any]:
        path = self.errors if is_failed else self.output
        results = [json.loads(line) for line in path.read_bytes().splitlines()]
        by_number = {int(record["id"].rpartition("_")[2]): record for record in results}
        assert len(by_number) == len(results), "an id is there twice"
        return by_number


@pytest.mark.parametrize(
    ("body", "max_flying"),
    [({}, 8), ({"n": 4}, 2), ({"text": "x" * 400}, 3)],
    ids=["lines", "sequences", "bytes"],
)
async def test_every_line_is_answered_once_in_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any], max_flying: int
) -> None:
    monkeypatch.setattr(line_runner, "MAX_FLYING_BYTES", 3 * 440)
    job = Job(tmp_path, raw_lines(100, **body))
    await job.run()
    assert sorted(job.records()) == list(range(1, 101))
    assert job.results.counts.completed == 100
    assert max_flying // 2 < job.model.most_flying <= max_flying


async def test_it_reads_no_further_than_there_is_room(tmp_path: Path) -> None:
    job = Job(tmp_path, raw_lines(1000))
    async with job.running(lambda _: asyncio.Event().wait()):
        await until(lambda: job.model.flying == 8)
        await asyncio.sleep(0.02)
        assert job.read <= 10


async def test_what_fails_is_in_the_error_file(tmp_path: Path) -> None:
    fails = {3: InvalidRequest("n", "n"), 4: NotFinite("no numbers"), 5: ZeroDivisionError()}

    async def meet(number: int) -> None:
        if number in fails:
            raise fails[number]

    job = Job(tmp_path, [*raw_lines(10), (11, b"{"), (12, None)])
    job.model.meet = meet
    await job.run()
    assert {
        number: record["response"]["status_code"] if record["response"] else record["error"]["code"]
        for number, record in job.records(is_failed=True).items()
    } == {3: 400, 4: "step_failed", 5: 500, 11: "invalid_json_line", 12: "line_too_long"}
    assert (job.results.counts.completed, job.results.counts.failed) == (7, 5)


@pytest.mark.parametrize(
    ("first", "tail"),
    [(0, b""), (7, b'{"id":"batch_req_ab_3","cus'), (14, b"\0" * 9), (21, b"[]\n"), (28, b"\n")],
)
async def test_goes_on_with_a_run_cut_off_anywhere(tmp_path: Path, first: int, tail: bytes) -> None:
    lines = raw_lines(40)
    job = Job(tmp_path, lines)
    async with job.running(lambda number: asyncio.sleep(60 if number > first else 0)):
        await until(lambda: len(job.model.asked) >= first)
    with job.output.open("ab") as file:
        file.write(tail)
    before = set(Job(tmp_path, lines).records())
    job = Job(tmp_path, lines)
    await job.run()
    assert sorted(job.records()) == list(range(1, 41))
    assert before or not first
    assert before.isdisjoint(job.model.asked)
    assert job.results.counts.completed == 40


async def test_what_is_ended_is_told_of_every_line_that_is_left(tmp_path: Path) -> None:
    job = Job(tmp_path, raw_lines(100))
    job.model.meet = lambda number: asyncio.sleep(60 if number > 20 else 0)
    task = asyncio.create_task(job.run())
    await until(lambda: job.model.flying == 8 and len(job.model.asked) >= 28)
    assert job.runner.ended_with == ""
    job.runner.end("batch_cancelled", "it was")
    await task
    assert sorted(job.records()) == list(range(1, 21))
    given_up = job.records(is_failed=True)
    assert sorted(given_up) == list(range(21, 101))
    assert given_up[21]["response"] is None
    assert given_up[21]["error"]["code"] == job.runner.ended_with == "batch_cancelled"
    again = Job(tmp_path, []).results
    assert again.codes == {"", "batch_cancelled"}
    assert again.counts == ResultCounts(20, 80)
    again.close()


async def test_a_line_given_up_before_its_task_began(tmp_path: Path) -> None:
    job = Job(tmp_path, raw_lines(20))

    def parse(raw: bytes | None, number: int) -> Any:
        if number == 5:  # the tasks of lines before it were made, and are to run before this
            asyncio.get_running_loop().call_soon(job.runner.end, "batch_cancelled", "it was")
        return parse_line(raw, number)

    job.runner.parse = parse
    await job.run()
    assert 5 not in job.model.asked
    assert sorted(job.records(is_failed=True)) == list(range(1, 21))
    assert job.runner.ended_with == "batch_cancelled"


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyError("a bug")])
async def test_a_bug_or_an_unreadable_input_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    job = Job(tmp_path, [])

    def source() -> Iterator[list[RawLine]]:
        yield raw_lines(5)
        if isinstance(error, OSError):
            raise error

    job.runner.source = source()
    if isinstance(error, OSError):
        job.model.meet = lambda _: asyncio.Event().wait()
    else:
        monkeypatch.setattr(job.results, "_sync", Mock(side_effect=error))
        monkeypatch.setattr(job.results, "close", lambda: None)
    with pytest.raises(type(error)):
        await job.run()


async def test_a_full_disk_holds_the_job_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(result_files, "MAX_PENDING_BYTES", 3000)
    monkeypatch.setattr(result_files, "_RETRY_S", 0.01)
    caplog.set_level(logging.INFO)
    before = sample_value("srm_batch_journal_errors_total")
    job = Job(tmp_path, raw_lines(200))
    with monkeypatch.context() as full:
        full.setattr(os, "pwrite", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
        task = asyncio.create_task(job.run())
        most = before + 3
        await until(
            lambda: sample_value("srm_batch_journal_errors_total") >= most and not job.model.flying
        )
        assert job.results.trouble == "No space left"
        assert job.results.counts == ResultCounts(), "nothing counts before it is on the disk"
        assert len(job.model.asked) < 50, "what waits in memory is bounded"
    await task
    assert sorted(job.records()) == list(range(1, 201))
    assert len(job.model.asked) == 200
    assert job.results.trouble == ""
    messages = [message for message in caplog.messages if "written" in message]
    assert ["No space left" in message for message in messages] == [True, False]


async def test_a_hanging_disk_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_files, "MAX_PENDING_BYTES", 3000)
    answers, hangs, fsync = threading.Event(), threading.Event(), os.fsync

    def hang(file: int) -> None:
        hangs.set()
        assert answers.wait(120)
        fsync(file)

    job = Job(tmp_path, raw_lines(200))
    monkeypatch.setattr(os, "fsync", hang)
    task = asyncio.create_task(job.run())
    try:
        await until(lambda: job.results.num_pending_bytes > 3000 and not job.model.flying)
        await until(hangs.is_set)
        begun = len(job.model.asked)
        assert 8 < begun < 50, "what waits in memory is bounded"
        assert job.results.counts == ResultCounts(), "nothing counts before it is on the disk"
    finally:
        answers.set()
    await task
    assert sorted(job.records()) == list(range(1, 201))
    assert len(job.model.asked) == 200
