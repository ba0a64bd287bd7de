"""The process that runs batches: none of them holds up or ends the others."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import psutil
import pytest

from srm.server.batch import jobs
from srm.server.batch.engine_retry import EngineRetry
from srm.server.batch.job_input import Checked, check_input
from srm.server.batch.jobs import MAX_FAILURES, BatchServices, Jobs, lock_name, sort_by_turn, weigh
from srm.server.generation.engine_request import RequestOwner
from srm.server.storage.clock import Clock
from srm.server.storage.records import BatchRecord
from srm.server.storage.store import Store
from srm.server.wiring import ServerWiring
from srm.tasks import task_group
from tests.chaos.jobs import completion_line, results, submit
from tests.kit.engines.served_engine import until
from tests.kit.serving import ROOT


class Model:
    """Answers a line with its own body, as soon as `may_answer`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def answer_whole(self, body: bytes, id: str, owner: RequestOwner) -> bytes:
        self.asked.append(id)
        await self.may_answer.wait()
        return body


class Here(Jobs):
    """Jobs with a model in the place of an engine, which look when they are told to."""

    def __init__(
        self, folder: Path, model_id: str = "mine", wall: Callable[[], float] = time.time
    ) -> None:
        config = ServerWiring(data_dir=str(folder), batch_fsync_s=0, model_id=model_id)
        self.clock = Clock(folder / "clock.json", wall)
        super().__init__(config, self.clock)
        self.store = self._store
        self.model = Model()
        self.status = SimpleNamespace(state="ready", num_slots=8, max_waiting=100)
        client: Any = SimpleNamespace(status=self.status, losses=0, is_closed=False)
        self.answerers = {"/v1/completions": self.model}
        services = SimpleNamespace(
            client=client, answerers=self.answerers, sending=EngineRetry(client)
        )
        self._answering = cast(BatchServices, services)

    @asynccontextmanager
    async def work(self) -> AsyncIterator[None]:
        """Has tasks for batches meanwhile, which have all ended at the end."""
        self._starts.load()
        async with task_group() as self._group:
            yield
        assert (self.limiter.lines, self.limiter.sequences, self.running) == (0, 0, set())

    @property
    def running(self) -> set[str]:
        """Ids of the batches that run."""
        return {*self._running}

    async def tidy(self) -> None:
        await self._tidy()

    async def look(self) -> None:
        await self._look(self.store.runnable_batches())

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(120):
            while not is_so():
                await self.look()
                await asyncio.sleep(0.001)

    async def until_ended(self) -> None:
        await self.until(lambda: not self.store.runnable_batches())

    async def until_asked(self, count: int = 1) -> None:
        await self.until(lambda: len(self.model.asked) >= count)

    def read_batch(self, batch: BatchRecord) -> BatchRecord:
        record = self.store.get_batch(batch.id)
        assert record is not None
        return record

    def failed(self, batch: BatchRecord) -> list[tuple[str, str]]:
        """Codes and messages of the errors with which it failed."""
        record = self.read_batch(batch)
        assert record.status == "failed"
        return [(error.code, error.message) for error in record.errors or ()]


@asynccontextmanager
async def running(folder: Path, model_id: str = "mine") -> AsyncIterator[Here]:
    here = Here(folder, model_id)
    async with here.work():
        try:
            yield here
        finally:  # also behind a test that failed while it held answers back
            here.model.may_answer.set()


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Here]:
    async with running(tmp_path) as result:
        yield result


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_AGAIN_AFTER_S", 0.0)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """As another server holds a lock."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    return [completion_line(number, **body) for number in range(count)]


async def test_a_bug_fails_one_batch_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned, good = (submit(tmp_path, lines(count)) for count in (3, 20))
    change, tries = Store.change_batch, 0

    def fail(store: Store, id: str, expected: Any, **fields: Any) -> BatchRecord | None:
        nonlocal tries
        if id == poisoned.id and fields.get("status") == "finalizing":
            tries += 1
            raise KeyError("a bug of ours")
        return change(store, id, expected, **fields)

    monkeypatch.setattr(Store, "change_batch", fail)
    async with running(tmp_path) as here:
        await here.until_ended()
    assert tries == MAX_FAILURES
    message = "it could not be run: KeyError: 'a bug of ours'"
    assert here.failed(poisoned) == [("internal_error", message)]
    answered = results(tmp_path, here.read_batch(poisoned))
    assert len(answered["output"]) == 3, "what had been answered is not lost"
    assert here.read_batch(good).status == "completed"


async def test_a_hanging_look_stops_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_LOOK_EVERY_S", 0.0)
    answers, hangs, look = threading.Event(), threading.Event(), Store.runnable_batches

    def hang(store: Store) -> list[BatchRecord]:
        hangs.set()
        assert answers.wait(120)
        return look(store)

    here = Here(tmp_path)
    here.model.may_answer.clear()
    runs = submit(tmp_path, lines(20))
    runs_all = asyncio.create_task(here.run())
    try:
        await until(lambda: bool(here.model.asked))
        monkeypatch.setattr(Store, "runnable_batches", hang)
        await until(hangs.is_set)
        waits = submit(tmp_path, lines(3))
        here.model.may_answer.set()
        await until(lambda: here.read_batch(runs).status == "completed")
        assert here.read_batch(waits).status == "validating" and len(here.model.asked) == 20
        answers.set()
        await until(lambda: here.read_batch(waits).status == "completed")
    finally:
        answers.set()
        runs_all.cancel()
        await asyncio.gather(runs_all, return_exceptions=True)


async def test_a_batch_whose_disk_hangs_holds_up_no_other(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung, other = (submit(tmp_path, lines(count)) for count in (3, 20))
    answers, hangs = threading.Event(), threading.Event()

    def hang(path: Path, *more: Any) -> Checked:
        if path == here.store.path_of(hung.input_file_id):
            hangs.set()
            assert answers.wait(120)
        return check_input(path, *more)

    monkeypatch.setattr("srm.server.batch.job.check_input", hang)
    try:
        await here.until(lambda: here.read_batch(other).status == "completed")
        assert hangs.is_set() and here.read_batch(hung).status == "validating"
    finally:
        answers.set()
    await here.until_ended()
    assert here.read_batch(hung).status == "completed"


async def test_waits_for_files(
    here: Here, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone, late, back = (submit(tmp_path, lines(3), **some) for some in ({}, {"expires_at": 1}, {}))
    path_of, aside = here.store.path_of, tmp_path / "aside"
    path_of(gone.input_file_id).unlink()
    path_of(late.input_file_id).unlink()
    path_of(late.input_file_id).mkdir()
    path_of(back.input_file_id).rename(aside)
    path_of(back.input_file_id).mkdir()
    again = f"{back.id}: cannot go on, tried again in 0 s: must be a regular file"
    await here.until(lambda: caplog.messages.count(again) > MAX_FAILURES)
    assert here.failed(gone) == [("input_file_missing", "the input file is gone")]
    assert here.failed(late) == [("internal_error", "it could not be run: must be a regular file")]
    path_of(back.input_file_id).rmdir()
    aside.rename(path_of(back.input_file_id))
    await here.until_ended()
    assert here.read_batch(back).status == "completed"


def test_owners_have_equal_parts_their_batches_by_weight(tmp_path: Path) -> None:
    one = submit(tmp_path, lines(1))

    def weights(*given: tuple[str, float]) -> list[float]:
        """Of batches of these owners and weights."""
        batches = [
            msgspec.structs.replace(one, id=str(number), owner=owner, weight=weight)
            for number, (owner, weight) in enumerate(given)
        ]
        return [*weigh(batches).values()]

    assert weights(("x", 1), ("x", 3), ("y", 5), ("z", 1e9)) == [0.25, 0.75, 1.0, 1.0]
    # As earlier versions stored them: a quotient that is nothing would be divided by.
    assert all(weight > 1e-9 for weight in weights(("x", 1000.0), ("x", 5e-324), ("x", -1.0)))


def test_priority_orders_one_owners_batches_and_nobody_elses(tmp_path: Path) -> None:
    one = submit(tmp_path, lines(1))
    made = [
        msgspec.structs.replace(one, id=str(number), owner=owner, priority=priority)
        for number, (owner, priority) in enumerate(
            [("x", 0), ("x", 1000), ("y", -1000), ("x", 1000)]
        )
    ]
    assert [*weigh(made).values()] == [0.001, 0.5, 1.0, 0.5]
    assert [record.id for record in sort_by_turn(made, Counter())] == ["1", "2", "3", "0"]


async def test_cancels_a_batch_while_others_have_all_room(here: Here, tmp_path: Path) -> None:
    here.model.may_answer.clear()
    first = submit(tmp_path, lines(20), priority=1)
    await here.until_asked(8)
    second = submit(tmp_path, lines(20))
    await here.until(lambda: here.read_batch(second).status == "in_progress")
    here.store.change_batch(second.id, "in_progress", status="cancelling")
    await here.until(lambda: here.read_batch(second).status == "cancelled")
    assert here.read_batch(second).failed == 20
    here.model.may_answer.set()
    await here.until_ended()
    assert here.read_batch(first).completed == 20


@pytest.mark.parametrize(("max_waiting", "most"), [(100, 8 + 8), (6, 8 + 3)])
async def test_leaves_half_the_queue(
    here: Here, tmp_path: Path, max_waiting: int, most: int
) -> None:
    here.status.max_waiting = max_waiting
    here.model.may_answer.clear()
    submit(tmp_path, lines(100, n=1))
    await here.until_asked(most)
    await here.until(lambda: here.limiter.waiting)
    assert here.limiter.lines == len(here.model.asked) == most
    here.model.may_answer.set()
    await here.until_ended()


async def test_who_waits_for_another_server_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(jobs, "_LOOK_EVERY_S", 0.0)
    caplog.set_level(logging.INFO, "srm.server.batch.jobs")
    path = tmp_path / lock_name("mine")
    path.mkdir()
    runs_all = asyncio.create_task(Here(tmp_path).run())
    await until(lambda: len(caplog.messages) == 1)
    path.rmdir()
    with held(path):
        await until(lambda: len(caplog.messages) == 2)
        for _ in range(50):
            await asyncio.sleep(0)
    await until(lambda: len(caplog.messages) == 3)
    runs_all.cancel()
    await asyncio.gather(runs_all, return_exceptions=True)
    assert [message.partition(".lock: ")[2] for message in caplog.messages] == [
        "waiting for it: Is a directory",
        "waiting for it: another server runs its batches",
        "this server runs the batches now",
    ]


async def test_nothing_is_left_of_what_made_answers(text_model: Path, tmp_path: Path) -> None:
    """A stop that failed on the way would leave the template's process behind."""
    before = {*psutil.Process().children()}
    answering = BatchServices(ServerWiring(model=text_model, endpoint=f"ipc://{tmp_path}/engine"))
    await answering.client.connect()
    (template,) = {*psutil.Process().children()} - before
    await answering.close()
    assert not template.is_running()


async def test_a_batch_that_ends_while_somebody_looks_is_not_run_again(
    here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = submit(tmp_path, lines(3))
    looked = here.store.runnable_batches()
    await here.until_ended()
    before = here.read_batch(batch)
    monkeypatch.setattr(Store, "runnable_batches", lambda _: looked)
    await here.look()
    assert here.running == {batch.id}
    while here.running:
        await asyncio.sleep(0.001)
    assert len(here.model.asked) == 3
    assert here.read_batch(batch) == before


async def test_a_batch_of_another_model_waits_for_it(tmp_path: Path) -> None:
    theirs = submit(tmp_path, lines(3), model="theirs", model_id="theirs")
    renamed = submit(tmp_path, lines(3), model="another name", model_id="mine")
    older = submit(tmp_path, lines(3), model="theirs", status="in_progress", total=3)
    async with running(tmp_path) as here:
        await here.until(lambda: not here.read_batch(renamed).is_runnable)
        assert all(id.startswith(renamed.id) for id in here.model.asked)
        assert (here.read_batch(theirs), here.read_batch(older)) == (theirs, older)
    async with running(tmp_path, model_id="theirs") as here:
        await here.look()
    assert here.read_batch(theirs).status == "completed"


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"status": "cancelling"}, "cancelled"), ({"expires_at": 1}, "expired")],
)
async def test_a_batch_of_a_model_that_nobody_serves_is_ended(
    here: Here, tmp_path: Path, fields: dict[str, Any], status: str
) -> None:
    """By whoever is there, and unless a process has the lock of that model."""
    batch = submit(tmp_path, lines(3), model="theirs", model_id="theirs", total=3, **fields)
    with held(tmp_path / lock_name("theirs")):
        await here.look()
        assert not here.running
    await here.until_ended()
    assert not here.model.asked
    assert (here.read_batch(batch).status, here.read_batch(batch).failed) == (status, 3)


async def test_a_jump_of_the_clock_expires_nothing(tmp_path: Path) -> None:
    wall = time.time()
    here = Here(tmp_path, wall=lambda: wall)
    async with here.work():
        here.model.may_answer.clear()
        batch = submit(tmp_path, lines(20))
        await here.until_asked()
        wall += 1e9
        assert here.clock.now() < here.read_batch(batch).expires_at
        assert here.store.expire(int(here.clock.now())) == 0
        here.model.may_answer.set()
        await here.until_ended()
    assert here.read_batch(batch).status == "completed"


def test_a_look_that_fails_ends_the_process(tmp_path: Path) -> None:
    """It waited for its threads, and one of them for a disk that had gone."""
    program = """
import asyncio, sys, threading
from srm.server.batch import jobs

async def look(self):
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    await asyncio.sleep(0)
    raise KeyError("bug")

jobs.Jobs._look_forever = look
raise SystemExit(jobs.main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", program, f"--data-dir={tmp_path}"]
    ended = subprocess.run(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert ended.returncode == 1
    assert "what runs batches failed, which nothing here works without" in ended.stderr
    assert "KeyError: 'bug'" in ended.stderr
