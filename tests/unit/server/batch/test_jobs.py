"""The process that runs batches: none of them holds up or ends the others."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from engine.client.client import EngineClient
from engine.tasks import task_group
from server.batch import jobs
from server.batch.engine_retry import EngineRetry
from server.batch.job import BatchJob
from server.batch.jobs import MAX_FAILURES, BatchServices, Jobs, _locked
from server.batch.result_files import ResultFiles
from server.config import ServerConfig
from server.generation.request_owner import RequestOwner
from server.storage.clock import Clock
from server.storage.records import BatchRecord
from server.storage.store import Store
from tests.chaos.jobs import completion_line, results, submit


class Model:
    """Answers a line with its own body, as soon as `may_answer`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def whole(self, body: bytes, id: str, sender: RequestOwner) -> bytes:
        self.asked.append(id)
        await self.may_answer.wait()
        return body


class Here(Jobs):
    """Jobs with a model in the place of an engine, which look when they are told to."""

    def __init__(self, folder: Path, model_id: str = "mine") -> None:
        super().__init__(ServerConfig(data_dir=str(folder), batch_fsync_s=0, model_id=model_id))
        self.model = Model()
        status = SimpleNamespace(state="ready", num_slots=8, max_waiting=100)
        client = cast(EngineClient, SimpleNamespace(status=status, losses=0, is_closed=False))
        self._answering = cast(
            BatchServices,
            SimpleNamespace(
                client=client,
                answerers={"/v1/completions": self.model},
                sending=EngineRetry(client),
            ),
        )

    async def look(self) -> None:
        await self._look(self._store.runnable_batches())

    async def until_ended(self) -> None:
        async with asyncio.timeout(120):
            while self._store.runnable_batches():
                await self.look()
                await asyncio.sleep(0.001)


def run(folder: Path, work: Callable[[Here], Awaitable[None]], model_id: str = "mine") -> None:
    async def main() -> None:
        here = Here(folder, model_id)
        async with task_group() as here._group:
            await work(here)
        assert (here._room.lines, here._room._sequences, here._running) == (0, 0, {})

    asyncio.run(main())


def found(folder: Path, batch: BatchRecord) -> BatchRecord:
    record = Store(folder).get_batch(batch.id)
    assert record is not None
    return record


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_AGAIN_AFTER_S", 0.0)


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    return [completion_line(number, **body) for number in range(count)]


def test_stored_weights_whose_quotient_is_nothing(tmp_path: Path) -> None:
    batches = [submit(tmp_path, lines(20), weight=weight) for weight in (1000.0, 5e-324, -1.0)]
    run(tmp_path, lambda here: here.until_ended())
    for batch in batches:
        record = found(tmp_path, batch)
        assert (record.status, record.completed) == ("completed", 20)


def test_a_batch_that_meets_a_bug_fails_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned, good = (submit(tmp_path, lines(count)) for count in (3, 20))
    complete, tries = BatchJob._complete, 0

    def fail(job: BatchJob, results: ResultFiles, ended_with: str) -> None:
        nonlocal tries
        if job.id == poisoned.id:
            tries += 1
            raise KeyError("a bug of ours")
        complete(job, results, ended_with)

    monkeypatch.setattr(BatchJob, "_complete", fail)
    run(tmp_path, lambda here: here.until_ended())
    record = found(tmp_path, poisoned)
    assert tries == MAX_FAILURES
    assert record.status == "failed" and record.errors is not None
    assert [(error.code, error.message) for error in record.errors] == [
        ("internal_error", "it could not be run: KeyError: 'a bug of ours'")
    ]
    assert len(results(tmp_path, record)["output"]) == 3  # what had been answered is not lost
    assert found(tmp_path, good).status == "completed"


def test_a_batch_whose_files_cannot_be_read_for_a_while_completes(tmp_path: Path) -> None:
    batch = submit(tmp_path, lines(3))
    path = Store(tmp_path).path_of(batch.input_file_id)
    data = path.read_bytes()
    path.unlink()
    path.mkdir()

    async def work(here: Here) -> None:
        while here._failures[batch.id] <= MAX_FAILURES:
            await here.look()
            await asyncio.sleep(0.001)
        path.rmdir()
        path.write_bytes(data)
        await here.until_ended()

    run(tmp_path, work)
    assert found(tmp_path, batch).status == "completed"


def test_owners_have_equal_parts_and_their_batches_share_them_by_weight(tmp_path: Path) -> None:
    one = submit(tmp_path, lines(1))
    records = [
        msgspec.structs.replace(one, id=id, owner=owner, weight=weight)
        for id, owner, weight in (
            ("a", "x", 1.0),
            ("b", "x", 3.0),
            ("c", "y", 5.0),
            ("d", "z", 1e9),
        )
    ]
    assert jobs._weights(records) == {"a": 0.25, "b": 0.75, "c": 1.0, "d": 1.0}


def test_a_batch_that_is_cancelled_while_others_have_all_the_room_ends(tmp_path: Path) -> None:
    """Its lines need no room any more."""

    async def work(here: Here) -> None:
        here.model.may_answer.clear()
        first = submit(tmp_path, lines(20), priority=1)
        while len(here.model.asked) < 8:
            await here.look()
            await asyncio.sleep(0.001)
        second = submit(tmp_path, lines(20))
        async with asyncio.timeout(120):
            while found(tmp_path, second).status != "cancelled":
                if found(tmp_path, second).status == "in_progress":
                    here._store.change_batch(second.id, "in_progress", status="cancelling")
                await here.look()
                await asyncio.sleep(0.001)
        assert found(tmp_path, second).failed == 20
        here.model.may_answer.set()
        await here.until_ended()
        assert found(tmp_path, first).completed == 20

    run(tmp_path, work)


@pytest.mark.parametrize(("max_waiting", "most"), [(100, 8 + 8), (6, 8 + 3)])
def test_half_of_the_engines_queue_is_left_to_those_who_ask_over_http(
    tmp_path: Path, max_waiting: int, most: int
) -> None:
    async def work(here: Here) -> None:
        assert here._answering is not None
        cast(Any, here._answering.client.status).max_waiting = max_waiting
        here.model.may_answer.clear()
        submit(tmp_path, lines(100, n=1))
        async with asyncio.timeout(120):
            while not here._room._waiting:
                await here.look()
                await asyncio.sleep(0.001)
        assert here._room.lines == most
        here.model.may_answer.set()
        await here.until_ended()

    run(tmp_path, work)


def test_who_waits_for_another_server_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "_LOOK_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "server.batch.jobs")

    async def work(here: Here) -> None:
        held = _locked(here._lock_of("mine"))
        assert isinstance(held, int)
        waits = asyncio.create_task(here._lock())
        for _ in range(50):
            await asyncio.sleep(0)
        os.close(held)
        await waits

    run(tmp_path, work)
    said = [message.partition(".lock: ")[2] for message in caplog.messages]
    assert said == [
        "waiting for it: another server runs its batches",
        "this server runs the batches now",
    ]


def test_nothing_is_left_of_what_made_answers(text_model: Path, tmp_path: Path) -> None:
    """A stop that failed on the way would leave the template's process behind."""

    async def work() -> None:
        config = ServerConfig(model=text_model, endpoint=f"ipc://{tmp_path}/engine")
        answering = BatchServices(config)
        await answering.client.connect()
        template = cast(Any, answering.answerers["/v1/chat/completions"])._template
        await answering.close()
        assert template._process.poll() is not None

    asyncio.run(work())


def test_a_batch_that_ends_while_somebody_looks_is_not_run_again(tmp_path: Path) -> None:
    async def work(here: Here) -> None:
        batch = submit(tmp_path, lines(3))
        looked = here._store.runnable_batches()
        await here.until_ended()
        before = found(tmp_path, batch)
        await here._look(looked)
        while here._running:
            await asyncio.sleep(0.001)
        assert len(here.model.asked) == 3
        assert found(tmp_path, batch) == before

    run(tmp_path, work)


def test_a_batch_of_another_model_waits_for_it(tmp_path: Path) -> None:
    theirs = submit(tmp_path, lines(3), model="theirs", model_id="theirs")
    renamed = submit(tmp_path, lines(3), model="another name", model_id="mine")
    older = submit(tmp_path, lines(3), model="theirs", status="in_progress", total=3)

    async def work(here: Here) -> None:
        async with asyncio.timeout(120):
            while found(tmp_path, renamed).is_runnable:
                await here.look()
                await asyncio.sleep(0.001)
        assert all(id.startswith(renamed.id) for id in here.model.asked)
        assert found(tmp_path, theirs) == theirs
        assert found(tmp_path, older) == older

    run(tmp_path, work)
    run(tmp_path, lambda here: here.look(), model_id="theirs")
    assert found(tmp_path, theirs).status == "completed"


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"status": "cancelling"}, "cancelled"), ({"expires_at": 1}, "expired")],
)
def test_a_batch_of_a_model_that_nobody_serves_is_ended(
    tmp_path: Path, fields: dict[str, Any], status: str
) -> None:
    """By whoever is there, and unless a process has the lock of that model."""
    batch = submit(tmp_path, lines(3), model="theirs", model_id="theirs", total=3, **fields)

    async def work(here: Here) -> None:
        lock = _locked(here._lock_of("theirs"))
        assert isinstance(lock, int)
        await here.look()
        assert not here._running
        os.close(lock)
        await here.until_ended()
        assert not here.model.asked

    run(tmp_path, work)
    record = found(tmp_path, batch)
    assert (record.status, record.failed) == (status, 3)


def test_a_jump_of_the_wall_clock_expires_no_batch_and_deletes_no_file(tmp_path: Path) -> None:
    wall = time.time()

    async def work(here: Here) -> None:
        nonlocal wall
        here._clock = Clock(tmp_path / "clock.json", lambda: wall)
        here.model.may_answer.clear()
        batch = submit(tmp_path, lines(20))
        while not here.model.asked:
            await here.look()
            await asyncio.sleep(0.001)
        wall += 1e9
        assert not here._running[batch.id].is_late
        assert here._store.expire(int(here._clock.now())) == 0
        here.model.may_answer.set()
        await here.until_ended()
        assert found(tmp_path, batch).status == "completed"

    run(tmp_path, work)


def test_a_batch_whose_files_cannot_be_read_fails_when_its_time_is_over(tmp_path: Path) -> None:
    batch = submit(tmp_path, lines(3), expires_at=1)
    path = Store(tmp_path).path_of(batch.input_file_id)
    path.unlink()
    path.mkdir()
    run(tmp_path, lambda here: here.until_ended())
    record = found(tmp_path, batch)
    assert record.status == "failed" and record.errors is not None
    assert record.errors[0].message == "it could not be run: Is a directory"
