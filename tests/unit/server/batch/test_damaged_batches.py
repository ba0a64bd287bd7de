"""A batch whose record or results are damaged ends neither the process nor another batch."""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from srm.errors import InvalidRequest, NotFound
from srm.server.batch import jobs
from srm.server.batch.job import BatchJob
from srm.server.batch.jobs import MAX_FAILURES
from srm.server.batch.part_file import PartFile
from srm.server.batch.result_files import ResultFiles
from srm.server.batch.starts import Starts
from srm.server.storage.records import BatchRecord
from srm.server.storage.store import Store
from tests.attack.damage import flipped
from tests.chaos.jobs import results, submit
from tests.unit.server.batch.test_jobs import lines, running

NUM_LINES, NUM_RESULTS = 3, 12
EVERY = [pytest.param(16, id="some bits"), pytest.param(0, id="every bit", marks=pytest.mark.slow)]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(jobs, "_AGAIN_AFTER_S", 0.0)


def begun(folder: Path, num_lines: int = NUM_LINES) -> BatchRecord:
    """A batch that runs and has no result."""
    batch = submit(folder, lines(num_lines))
    with closing(Store(folder)) as store:
        fields: dict[str, Any] = {"status": "in_progress", "total": num_lines}
        changed = store.change_batch(batch.id, "validating", **fields)
        assert changed is not None
        return store.allocate_output_ids(changed)


async def ends(folder: Path, *batches: BatchRecord) -> list[BatchRecord]:
    """What becomes of batches in a process that is not ended by them."""
    async with running(folder) as here:
        await here.tidy()
        await here.until_ended()
        listed = [here.read_batch(batch) for batch in batches]
    here.store.close()
    return listed


def put_record(folder: Path, batch: BatchRecord, data: bytes) -> None:
    with closing(sqlite3.connect(folder / "store.sqlite3")) as rows, rows:
        rows.execute("UPDATE batches SET record = ? WHERE id = ?", (data, batch.id))


def record_of(folder: Path, batch: BatchRecord) -> bytes:
    with closing(sqlite3.connect(folder / "store.sqlite3")) as rows:
        select = "SELECT record FROM batches WHERE id = ?"
        ((data,),) = rows.execute(select, (batch.id,)).fetchall()
    return bytes(data)


@pytest.mark.parametrize("most", EVERY)
async def test_a_flipped_bit_of_a_record_ends_no_batch(tmp_path: Path, most: int) -> None:
    """Of 5,592 such bits 320 ended the process, at every start."""
    answer_whole = tmp_path / "whole"
    damaged, other = begun(answer_whole), begun(answer_whole)
    for at, changed in enumerate(flipped(record_of(answer_whole, damaged), most)):
        folder = shutil.copytree(answer_whole, tmp_path / f"copy-{at}")
        put_record(folder, damaged, changed)
        for item in await ends(folder, damaged, other):
            assert (item.status, item.completed) == ("completed", NUM_LINES), changed
        shutil.rmtree(folder, ignore_errors=True)  # a thread may still write there


async def test_a_batch_that_cannot_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client may be told is no reason to end a process."""
    poisoned, good = begun(tmp_path), begun(tmp_path)
    starts = failures = 0
    run = BatchJob.run

    async def meet(job: BatchJob) -> None:
        nonlocal starts
        if job.id == poisoned.id:
            starts += 1
            raise InvalidRequest("as a damaged store said")
        await run(job)

    def fail(job: BatchJob, why: str) -> None:
        nonlocal failures
        failures += 1
        raise NotFound("as a damaged store said")

    monkeypatch.setattr(BatchJob, "run", meet)
    monkeypatch.setattr(BatchJob, "fail", fail)
    async with running(tmp_path) as here:
        await here.until(lambda: failures >= 3 and not here.read_batch(good).is_runnable)
        assert here.read_batch(poisoned).is_runnable
    assert starts == failures + MAX_FAILURES - 1


async def test_a_bug_in_what_tidies_up_stops_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    batch = begun(tmp_path)
    caplog.set_level(logging.ERROR, "srm.server.batch.jobs")
    monkeypatch.setattr(Store, "expire", lambda *_: 1 / 0)
    (ended,) = await ends(tmp_path, batch)
    assert ended.status == "completed"
    assert any("files are not tidied up" in record.message for record in caplog.records)


@pytest.mark.parametrize("most", EVERY)
async def test_a_bit_of_a_result_file_costs_no_line(tmp_path: Path, most: int) -> None:
    """A line's number that was flipped into 10 digits would have taken gigabytes, and another
    line's number that line's answer."""
    answer_whole = tmp_path / "whole"
    batch = begun(answer_whole, NUM_RESULTS)
    alone = shutil.copytree(answer_whole, tmp_path / "alone")
    (ended,) = await ends(alone, batch)
    answers = results(alone, ended)["output"]
    assert batch.output_file_id is not None
    ids = {json.loads(line)["id"] for line in answers}
    for at, changed in enumerate(flipped(b"\n".join(answers[: NUM_RESULTS // 2]) + b"\n", most)):
        folder = shutil.copytree(answer_whole, tmp_path / f"copy-{at}")
        output = folder / "files" / batch.output_file_id
        output.write_bytes(changed)
        (ended,) = await ends(folder, batch)
        assert (ended.status, ended.completed) == ("completed", NUM_RESULTS), changed
        records = [json.loads(line) for line in output.read_bytes().splitlines()]
        assert len(records) == NUM_RESULTS, changed
        # by the line's number: a letter of a custom_id or of a text may be another one
        assert {record["id"] for record in records} == ids, changed
        shutil.rmtree(folder, ignore_errors=True)  # a thread may still write there


@pytest.mark.parametrize(
    "result",
    [
        {"id": "batch_req_{job}_9999999999"},
        {"id": "batch_req_{job}_-1"},
        {"id": "batch_req_{job}_0"},
        {"id": "batch_req_another_2"},
        {"id": "batch_req_{job}_2"},  # and a request_id of line 1
        {"usage": {"prompt_tokens": -5, "completion_tokens": 1, "total_tokens": 1}},
        {"usage": {"prompt_tokens": 10**30, "completion_tokens": 1, "total_tokens": 1}},
        {"status_code": 500},
    ],
)
def test_a_result_that_is_none_is_cut_off(tmp_path: Path, result: dict[str, Any]) -> None:
    job = "batch_" + "0" * 32
    fields = {"id": "batch_req_{job}_1", "usage": None, "status_code": 200, **result}
    body = {"usage": fields["usage"]}
    response = {"status_code": fields["status_code"], "request_id": f"{job}-1", "body": body}
    line = {"id": fields["id"].replace("{job}", job[6:]), "custom_id": "a", "response": response}
    path = tmp_path / "output"
    path.write_text(json.dumps({**line, "error": None}) + "\n")
    files = ResultFiles(PartFile(path), PartFile(tmp_path / "errors"), 0, job, last=10)
    files.recover()
    assert path.read_bytes() == b"" and files.counts.completed == 0
    files.close()


@pytest.mark.parametrize("most", EVERY)
def test_a_bit_of_the_counts_of_starts_gives_up_no_batch(tmp_path: Path, most: int) -> None:
    """11 starts were 91, and the batch failed at once."""
    with closing(Store(tmp_path)) as store:
        batch = begun(tmp_path)
        path = tmp_path / "jobs.starts"

        def again() -> Starts:
            result = Starts(path, store)
            result.load()
            return result

        for _ in range(11):
            again().begin([batch], {batch.id})
        for changed in flipped(path.read_bytes(), most):
            path.write_bytes(changed)
            starts = again()
            starts.begin([batch], {batch.id})
            assert not starts.is_hopeless(batch.id), changed


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff", b"{}", b'{"a": 1}'])
def test_what_is_no_count_of_starts_is_left_out(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "jobs.starts"
    path.write_bytes(content)
    with closing(Store(tmp_path)) as store:
        Starts(path, store).load()
