"""One flipped bit in what the store keeps of a file or batch costs nothing, and no other anything.

With `every_bit` (the slow tests) each bit; else some of each byte's eight places.
"""

from __future__ import annotations

import logging
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from srm.errors import RequestError, StoreError
from srm.server.storage import upkeep
from srm.server.storage.records import BatchRecord, FileRecord, decode, encode
from srm.server.storage.store import Store
from tests.attack.damage import flipped
from tests.unit.server.storage.test_store import NOW, a_batch, a_file, all_of, execute, finish

EVERY = [pytest.param(100, id="some bits"), pytest.param(0, id="every bit", marks=pytest.mark.slow)]
COLUMNS = {
    "batches": ("id", "owner", "status", "input_file_id", "output_file_id", "error_file_id"),
    "files": ("id", "owner", "purpose", "num_bytes", "expires_at", "deleted_at"),
}


@pytest.fixture
def made(tmp_path: Path) -> Iterator[tuple[Store, BatchRecord, list[str]]]:
    """A store with a running batch and others, all in the database's one file."""
    store = Store(tmp_path / "data")
    file = a_file(store, owner="a", expires_at=NOW + 5)
    running = store.allocate_output_ids(a_batch(store, file))
    changed = store.change_batch(running.id, "validating", status="in_progress", total=5)
    assert changed is not None
    finish(store, a_batch(store, file))
    execute(store, "PRAGMA wal_checkpoint(TRUNCATE)")
    yield store, changed, all_of(store)
    store.close()


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "srm.server.storage")


def upkept(folder: Path) -> list[str]:
    """What a new process has, once it has looked at everything."""
    with closing(Store(folder)) as store:
        store.expire(NOW)
        return all_of(store)


@pytest.mark.parametrize("most", EVERY)
@pytest.mark.parametrize("table", ["batches", "files"])
def test_of_a_record_in_the_database(
    made: tuple[Store, BatchRecord, list[str]], table: str, most: int
) -> None:
    store, batch, before = made
    id = batch.id if table == "batches" else batch.input_file_id
    with closing(sqlite3.connect(store.folder / "store.sqlite3", isolation_level=None)) as rows:
        select = f"SELECT record FROM {table} WHERE id = ?"
        ((record,),) = rows.execute(select, (id,)).fetchall()
        for changed in flipped(record, most):
            rows.execute(f"UPDATE {table} SET record = ? WHERE id = ?", (changed, id))
            assert all_of(store) == before, changed
    assert not (store.folder / "store-2.sqlite3").exists(), "one record costs no rebuild"


@pytest.mark.parametrize(("table", "column"), [(t, c) for t in COLUMNS for c in COLUMNS[t]])
def test_of_a_column(made: tuple[Store, BatchRecord, list[str]], table: str, column: str) -> None:
    """Which hides a record from queries that go by it, until somebody looks at all."""
    store, batch, before = made
    id = batch.id if table == "batches" else batch.input_file_id
    with closing(sqlite3.connect(store.folder / "store.sqlite3", isolation_level=None)) as rows:
        select = f"SELECT seq, {column} FROM {table} WHERE id = ?"
        ((seq, value),) = rows.execute(select, (id,)).fetchall()
        if isinstance(value, str):
            others: list[object] = [
                data.decode() for data in flipped(value.encode(), 20) if data.isascii()
            ]
        else:  # no owner has a file then, or it is long past its time
            others = [0] if value is None else [value ^ 1 << place for place in range(0, 40, 3)]
        for other in others:
            rows.execute(f"UPDATE {table} SET {column} = ? WHERE seq = ?", (other, seq))
            store.expire(NOW)
            if column == "deleted_at":
                store.expire(NOW)  # its row has been forgotten: the sidecar brings it back
            assert all_of(store) == before, other
            select = f"SELECT seq FROM {table} WHERE id = ?"
            ((seq,),) = rows.execute(select, (id,)).fetchall()
    assert store.path_of(batch.input_file_id).exists()


@pytest.mark.parametrize("most", EVERY)
@pytest.mark.parametrize("kind", ["batches", "files"])
def test_of_a_sidecar(made: tuple[Store, BatchRecord, list[str]], kind: str, most: int) -> None:
    store, batch, before = made
    id = batch.id if kind == "batches" else batch.input_file_id
    path = store.folder / kind / f"{id}.json"
    data = path.read_bytes()
    for changed in flipped(data, most):
        path.write_bytes(changed)
        store.expire(NOW)
        assert all_of(store) == before
        named = BatchRecord if kind == "batches" else FileRecord
        assert decode(path.read_bytes(), named) == decode(data, named)


@pytest.mark.parametrize(
    "most", [pytest.param(60, id="some"), pytest.param(0, id="every", marks=pytest.mark.slow)]
)
def test_of_the_database_file(
    made: tuple[Store, BatchRecord, list[str]], tmp_path: Path, most: int
) -> None:
    store, _, before = made
    store.close()
    data = (store.folder / "store.sqlite3").read_bytes()
    for number, changed in enumerate(flipped(data, most)):
        folder = shutil.copytree(store.folder, tmp_path / "copy")
        (folder / "store.sqlite3").write_bytes(changed)
        assert upkept(folder) == before, number
        shutil.rmtree(folder)


def test_what_is_damaged_in_both_places_is_left_out_and_no_other(
    made: tuple[Store, BatchRecord, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    store, batch, _ = made
    caplog.set_level(logging.WARNING, "srm.server.storage")
    (store.folder / "batches" / f"{batch.id}.json").write_bytes(b"{")
    execute(store, f"UPDATE batches SET record = x'00' WHERE id = '{batch.id}'")
    listed = store.list_batches("a", 10)
    assert listed is not None and [batch.status for batch in listed] == ["completed"]
    assert store.get_batch(batch.id) is None and store.runnable_batches() == []
    assert f"the record of {batch.id} is damaged" in caplog.text and "left out" in caplog.text
    for _ in range(3):
        store.expire(NOW)
    assert caplog.text.count("set aside") == 1, "told once"
    assert (store.folder / "batches" / f"{batch.id}.damaged").read_bytes() == b"{"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", "batch_" + "G" * 32),
        ("input_file_id", "../../etc/passwd"),
        ("output_file_id", "gile-" + "0" * 32),
        ("endpoint", "/v1/completionr"),
        ("completion_window", "24hh"),
        ("created_at", -1),
        ("expires_at", 2**62),
        ("completed", -5),
        ("input_tokens", 2**63),
        ("status", "in_progresr"),
        ("priority", 10**30),
        ("metadata", {"k": "v" * 513}),
        ("metadata", {str(number): "" for number in range(17)}),
    ],
)
def test_checks_records_without_a_checksum_by_value(
    made: tuple[Store, BatchRecord, list[str]], field: str, value: object
) -> None:
    """As earlier versions wrote it."""
    store, batch, before = made
    fields = msgspec.to_builtins(batch)
    old = msgspec.json.encode(fields)
    assert decode(old, BatchRecord) == batch
    changed = msgspec.json.encode(fields | {field: value}).hex()
    execute(store, f"UPDATE batches SET record = x'{changed}' WHERE id = '{batch.id}'")
    assert all_of(store) == before


def test_reads_a_record_as_an_older_one(made: tuple[Store, BatchRecord, list[str]]) -> None:
    _, batch, _ = made
    assert msgspec.json.decode(encode(batch), type=BatchRecord) == batch


def test_blames_no_client_for_damage(made: tuple[Store, BatchRecord, list[str]]) -> None:
    store, _, _ = made
    with pytest.raises(StoreError) as caught:
        store.path_of("&ile-" + "0" * 32)
    assert not isinstance(caught.value, RequestError)


def test_all_are_looked_at_in_turn(
    made: tuple[Store, BatchRecord, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _, before = made
    monkeypatch.setattr(upkeep, "LOOKED_AT", 1)
    for path in [*store.folder.glob("*/*.json")]:
        path.write_bytes(b"")
    for _ in range(4):
        store.expire(NOW)
    execute(store, "DELETE FROM batches")
    execute(store, "DELETE FROM files")
    store.expire(NOW)
    assert all_of(store) == before
