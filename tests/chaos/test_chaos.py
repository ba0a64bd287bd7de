"""Processes are killed during a job of some hundred lines: `make chaos` for every day.

Also what a server finds when it starts: files that a crash, or something worse, has damaged.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from server.storage.store import Store
from tests.chaos.jobs import (
    KilledServer,
    completion_line,
    copied,
    results,
    submit,
    wait_for,
    wait_for_results,
)
from tests.chaos.run import WHO, harass, markdown
from tests.serving import SERVER_FLAGS

NUM_LINES = 300
WITHIN_S = 60
FLAGS = (*SERVER_FLAGS, "--batch-fsync-s=0")
"""Results are seen as soon as they are there, so that kills come when they are to."""

Results = dict[str, list[bytes]]


def some_lines() -> list[dict[str, Any]]:
    """Long enough to be met in flight, and a line at fault here and there."""
    return [
        completion_line(number, n=1, max_tokens=30 + number % 40, top_p=2 if _is_bad(number) else 1)
        for number in range(NUM_LINES)
    ]


def _is_bad(number: int) -> bool:
    return number % 50 == 7


class Reference:
    """A new batch in a folder, and what it gives when it is left alone."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.model = model
        self.new = folder / "new"
        self.batch = submit(self.new, some_lines())
        done = copied(self.new, folder / "done")
        with KilledServer(model, done, *FLAGS):
            self.record = wait_for(done, self.batch, WITHIN_S)
        self.results = results(done, self.record)

    def again(self, folder: Path) -> tuple[Path, KilledServer]:
        """The same batch in a folder of its own, and a server that runs it."""
        data = copied(self.new, folder / "data")
        return data, KilledServer(self.model, data, *FLAGS)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory, text_model: Path) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"), text_model)


def test_left_alone_it_answers_every_line(reference: Reference) -> None:
    assert reference.record.status == "completed"
    assert (reference.record.completed, reference.record.failed) == (294, 6)
    ids = [json.loads(line)["custom_id"] for lines in reference.results.values() for line in lines]
    assert sorted(ids) == [f"line {number:07}" for number in range(NUM_LINES)]


def test_kills_change_no_byte(reference: Reference, tmp_path: Path) -> None:
    """Each process, while it works; the supervisor takes all others along."""
    data, server = reference.again(tmp_path)
    rng = random.Random(1)
    with server:
        for turn, who in enumerate(["jobs", "engine", "api", "supervisor"]):
            wait_for_results(data, reference.batch, turn * 50 + rng.randrange(1, 50))
            assert server.kill(who)
        record = wait_for(data, reference.batch, WITHIN_S)
    assert record.status == "completed"
    assert (record.completed, record.failed) == (294, 6)
    assert (record.input_tokens, record.output_tokens) == (
        reference.record.input_tokens,
        reference.record.output_tokens,
    )
    assert results(data, record) == reference.results


def test_damaged_result_files(reference: Reference, tmp_path: Path) -> None:
    """As a disk leaves them that loses its power; tests of PartFile have more kinds of damage."""
    data, server = reference.again(tmp_path)
    with server:
        wait_for_results(data, reference.batch, 20)
        server.process.kill()
        server.process.wait()
        store = Store(data)
        record = store.get_batch(reference.batch.id)
        assert record is not None and record.output_file_id and record.error_file_id
        output, error = map(store.path_of, (record.output_file_id, record.error_file_id))
        store.close()
        os.truncate(output, output.stat().st_size // 2)
        with error.open("ab") as file:
            file.write(b'{"id":"batch_req_' + b"\0" * 5000 + b"\ngarbage\n")
        server.start()
        record = wait_for(data, reference.batch, WITHIN_S)
    assert results(data, record) == reference.results


def test_a_second_server_waits_and_takes_over(reference: Reference, tmp_path: Path) -> None:
    data, first = reference.again(tmp_path)
    with first:
        wait_for_results(data, reference.batch, 1)
        log = tmp_path / "second.log"
        with KilledServer(reference.model, data, *FLAGS, log=log) as second:
            while "another server runs its batches" not in second.log_text():
                assert second.process.poll() is None
            first.process.kill()
            first.process.wait()
            record = wait_for(data, reference.batch, WITHIN_S)
    assert results(data, record) == reference.results


def test_an_input_file_that_is_gone_fails_the_batch(reference: Reference, tmp_path: Path) -> None:
    data = copied(reference.new, tmp_path / "data")
    shutil.rmtree(data / "files")
    (data / "files").mkdir()
    with KilledServer(reference.model, data, *FLAGS):
        record = wait_for(data, reference.batch, WITHIN_S)
    assert record.status == "failed"
    assert record.errors is not None
    assert [error.code for error in record.errors] == ["input_file_missing"]


@pytest.mark.slow
def test_the_program_of_make_chaos(text_model: Path, tmp_path: Path) -> None:
    lines = [completion_line(number) for number in range(3000)]
    outcome = harass(text_model, tmp_path, lines, 12, 0.6, 3, 300)
    assert outcome.kills.total() >= 8
    assert (outcome.lost, outcome.differing) == (0, 0)
    assert outcome.batch is not None
    assert outcome.batch.completed == 3000
    assert all(f"x {who}" in markdown(outcome) for who in WHO)
