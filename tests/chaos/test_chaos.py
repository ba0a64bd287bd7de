"""Processes are killed during a job of some hundred lines; `make attack` kills them at random."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import msgspec

from srm.server.storage.records import BatchRecord
from srm.server.storage.store import Store
from tests.chaos.jobs import (
    KilledServer,
    completion_line,
    results,
    submit,
    wait_for,
    wait_for_results,
)
from tests.kit.processes.held_engine import held
from tests.kit.serving import SERVER_FLAGS

NUM_LINES = 200
WITHIN_S = 600  # of a busy machine


def some_lines() -> list[dict[str, Any]]:
    """Long enough to be met in flight, and every fiftieth at fault."""
    return [
        completion_line(
            number, n=1, max_tokens=30 + number % 40, top_p=2 if number % 50 == 7 else 1
        )
        for number in range(NUM_LINES)
    ]


def started(model: Path, data: Path, log: Path | None = None) -> KilledServer:
    """Results are seen as soon as they are there, so that kills come when they are to."""
    flags = (*SERVER_FLAGS, "--batch-fsync-s=0")
    return KilledServer(
        model, data, *flags, engine_module="tests.kit.processes.held_engine", log=log
    )


def damage(data: Path, batch: BatchRecord) -> None:
    """As a disk leaves files that loses its power; tests of PartFile have more kinds of damage."""
    store = Store(data)
    record = store.get_batch(batch.id)
    assert record is not None and record.output_file_id and record.error_file_id
    output, error = map(store.path_of, (record.output_file_id, record.error_file_id))
    store.close()
    os.truncate(output, output.stat().st_size // 2)
    with error.open("ab") as file:
        file.write(b'{"id":"batch_req_' + b"\0" * 5000 + b"\ngarbage\n")


def test_kills_a_second_server_and_damage_change_no_byte(text_model: Path, tmp_path: Path) -> None:
    """Each process is killed while it works; the supervisor takes all others along, first where
    another server waits to take over, then where files are damaged before it is started again."""
    data = tmp_path / "data"
    batch = submit(data, some_lines())
    alone = shutil.copytree(data, tmp_path / "alone")
    with started(text_model, alone):
        wanted = wait_for(alone, batch, WITHIN_S)
    assert (wanted.status, wanted.completed, wanted.failed) == ("completed", 196, 4)
    rng = random.Random(1)
    with started(text_model, data) as first:
        for turn, who in enumerate(["jobs", "engine", "api"]):
            wait_for_results(data, batch, turn * 25 + rng.randrange(1, 25))
            assert first.kill(who)
        log = tmp_path / "second.log"
        with started(text_model, data, log=log) as second:
            with held(text_model):  # or the batch might end meanwhile
                while "another server runs its batches" not in second.log_text():
                    assert second.process.poll() is None
                first.process.kill()
                first.process.wait()
            wait_for_results(data, batch, 100)
            second.process.kill()
            second.process.wait()
            damage(data, batch)
            second.start()
            record = wait_for(data, batch, WITHIN_S)
    names = [
        struct_field
        for struct_field in record.__struct_fields__
        if struct_field.endswith(("_at", "_file_id"))
    ]
    own = {name: getattr(record, name) for name in names}
    assert record == msgspec.structs.replace(wanted, **own)
    assert results(data, record) == results(alone, wanted)
