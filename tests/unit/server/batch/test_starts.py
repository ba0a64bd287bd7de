"""Batches that may kill the process which runs them: run alone, and given up in the end."""

from __future__ import annotations

import asyncio
import os
import signal
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from srm.server.batch.jobs import lock_name
from srm.server.batch.starts import MAX_ALONE, MAX_TOGETHER, Starts
from srm.server.generation.engine_request import RequestOwner
from srm.server.storage.records import BatchRecord, new_file_id
from srm.server.storage.store import Store
from tests.chaos.jobs import results, submit
from tests.unit.server.batch.test_jobs import Model, lines, running


class Deadly(Model):
    """Kills the process at a line that says so."""

    def __init__(self, asked: Path) -> None:
        super().__init__()
        self.file = asked

    async def answer_whole(self, body: bytes, id: str, owner: RequestOwner) -> bytes:
        with self.file.open("a") as file:
            file.write(f"{id}\n")
        if b"deadly" in body:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().answer_whole(body, id, owner)


def asked_of(folder: Path) -> tuple[int, set[str]]:
    """Run the batches in a process; returns its exit code and the batches whose lines it asked."""
    file = folder / "asked"
    file.write_text("")

    async def work() -> None:
        async with running(folder) as here:
            here.answerers["/v1/completions"] = Deadly(file)
            await here.until_ended()

    process = get_context("fork").Process(target=lambda: asyncio.run(work()))
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, {id.rpartition("-")[0] for id in file.read_text().split()}


def read_batch(folder: Path, batch: BatchRecord) -> BatchRecord:
    record = Store(folder).get_batch(batch.id)
    assert record is not None
    return record


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_gives_up_a_batch_that_kills_the_process(tmp_path: Path) -> None:
    deadly = submit(tmp_path, lines(3, prompt="deadly"))
    others = [submit(tmp_path, lines(2)) for _ in range(3)]
    deaths = []
    while (asked := asked_of(tmp_path)) and asked[0]:
        deaths.append(asked)
        assert len(deaths) <= MAX_TOGETHER + MAX_ALONE + 1  # the first looked through the input
    last = deaths[1 - MAX_ALONE :]  # the first may have cleared another suspect before
    assert last == [(-signal.SIGKILL, {deadly.id})] * (MAX_ALONE - 1)
    assert deadly.id not in asked[1]
    record = read_batch(tmp_path, deadly)
    assert record.status == "failed" and record.errors is not None
    assert record.errors[0].code == "internal_error"
    assert f"died {MAX_ALONE} times" in record.errors[0].message
    for batch in others:
        record = read_batch(tmp_path, batch)
        assert record.status == "completed" and len(results(tmp_path, record)["output"]) == 2


def started(folder: Path, batch: BatchRecord, times: int, is_reported: bool = False) -> Starts:
    """Start processes with a batch, which are killed or told to stop; returns the next one's."""
    starts = Starts(folder / "starts", Store(folder))
    starts.load()
    if not times:
        return starts
    starts.begin([batch], {batch.id})
    if is_reported:
        starts.take_back()
    return started(folder, batch, times - 1, is_reported)


async def test_suspects_run_alone_until_they_get_on(tmp_path: Path) -> None:
    batches = [submit(tmp_path, lines(20), model_id="mine") for _ in range(3)]

    seen: list[set[str]] = []
    for _ in range(MAX_TOGETHER):
        starts = Starts(tmp_path / lock_name("mine").replace(".lock", ".starts"), Store(tmp_path))
        starts.load()
        starts.begin(batches[:2], {batch.id for batch in batches})
    async with running(tmp_path) as here:
        while here.store.runnable_batches():
            await here.look()
            if (now := here.running) and seen[-1:] != [now]:
                seen.append(now)
            await asyncio.sleep(0.001)
        assert seen[:2] == [{batch.id} for batch in batches[:2]]
        assert [here.read_batch(batch).completed for batch in batches] == [20] * 3


def test_counts_starts_killed_in_vain(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    batch = submit(tmp_path, lines(1))
    assert not started(tmp_path, batch, 20, is_reported=True).suspects([batch])
    assert not started(tmp_path, batch, MAX_TOGETHER - 1).suspects([batch])
    moved = Store(tmp_path).change_batch(batch.id, "validating", status="in_progress")
    assert moved is not None
    assert not started(tmp_path, moved, MAX_TOGETHER - 1).suspects([moved])
    starts = started(tmp_path, moved, 1)
    assert starts.suspects([moved]) == {batch.id}
    starts.clear(batch.id)  # it failed by an error, say
    assert not started(tmp_path, moved, 0).suspects([moved])
    assert started(tmp_path, moved, MAX_TOGETHER).suspects([moved])
    most = MAX_TOGETHER + MAX_ALONE  # this start is counted before it runs
    assert not started(tmp_path, moved, most - MAX_TOGETHER).is_hopeless(batch.id)
    assert started(tmp_path, moved, 1).is_hopeless(batch.id)
    (tmp_path / "starts").write_text("[")
    assert not started(tmp_path, moved, 0).suspects([moved])
    assert "is left out" in caplog.text
    (tmp_path / "starts").unlink()
    (tmp_path / "starts").mkdir()
    started(tmp_path, moved, 1)
    assert "cannot be written" in caplog.text


def test_counts_with_an_unreadable_result_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, file = Store(tmp_path), tmp_path / "counts"
    batch = submit(tmp_path, lines(1))
    record = msgspec.structs.replace(batch, output_file_id=new_file_id())
    starts = Starts(file, store)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", Mock(side_effect=OSError(5, "Input/output error")))
        starts.begin([record], {record.id})
    assert b'"starts":1' in file.read_bytes()
    starts.clear(record.id)  # it failed with an error, and is tried again
    starts.begin([record], {record.id})
    assert b'"starts":1' in file.read_bytes()
