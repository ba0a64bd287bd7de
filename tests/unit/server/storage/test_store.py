"""The store: what is put in is there, for its owner alone, in order, and as often as it was put."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from srm.errors import StoreError, StoreFull
from srm.server.errors import Conflict, QuotaExceeded, RateLimited
from srm.server.storage import database
from srm.server.storage.records import (
    BatchRecord,
    FileRecord,
    is_file_id,
    new_batch_id,
    new_file_id,
)
from srm.server.storage.store import LEAST_BYTES, Store
from srm.server.storage.upkeep import ABANDONED_S, CURSORS_KEPT_S
from tests.kit.serving import ROOT

NOW = 1_800_000_000
BAD_SQL = {
    "no records": "UPDATE files SET record = x'00'",
    "records that are no UTF-8": "UPDATE batches SET record = x'7b226964223a22ff227d'",
    "a status that is no UTF-8": "UPDATE batches SET status = CAST(x'ff' AS TEXT)",
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "data")


FILE = FileRecord(id="", filename="in.jsonl", purpose="batch", num_bytes=0, created_at=NOW)
BATCH = BatchRecord(
    id="",
    endpoint="/v1/completions",
    input_file_id="",
    completion_window="24h",
    created_at=NOW,
    expires_at=NOW + 24 * 3600,
)


def a_file(store: Store, data: bytes = b"{}\n", max_bytes: int = 0, **fields: Any) -> FileRecord:
    record = replace(FILE, id=new_file_id(), num_bytes=len(data), **fields)
    store.upload_path(record.id).write_bytes(data)
    store.add_upload(record, max_bytes)
    return record


def a_batch(store: Store, file: FileRecord, max_running: int = 0) -> BatchRecord:
    record = replace(BATCH, id=new_batch_id(), owner=file.owner, input_file_id=file.id)
    store.add_batch(record, max_running)
    return record


def names_in(store: Store) -> list[str]:
    """Of all that is there of files."""
    return sorted(path.name for path in (store.folder / "files").iterdir())


def finish(store: Store, batch: BatchRecord, output: bytes = b"out\n") -> BatchRecord:
    """What the process that runs batches does in the end."""
    batch = store.allocate_output_ids(batch)
    assert batch.output_file_id is not None
    store.path_of(batch.output_file_id).write_bytes(output)
    named = {"id": batch.output_file_id, "owner": batch.owner, "purpose": "batch_output"}
    file = replace(FILE, **named, num_bytes=len(output), created_at=NOW + 1)
    done = store.finish_batch(batch.id, "completed", [file], completed=1)
    assert done is not None
    return done


def test_a_file_is_what_was_put_in_until_it_is_deleted(store: Store) -> None:
    assert store.list_files("", 10) == []
    assert store.runnable_batches() == store.list_batches("", 10) == []
    assert store.get_file(new_file_id()) is None
    assert store.bytes_of() == store.expire(NOW) == 0
    assert not store.folder.exists(), "nothing is made before it is needed"
    record = a_file(store, b"hello")
    assert store.get_file(record.id, "") == record
    assert store.path_of(record.id).read_bytes() == b"hello"
    assert store.bytes_of("") == LEAST_BYTES
    assert [store.delete_file(record.id, "") for _ in range(2)] == [True, False]
    assert store.get_file(record.id) is None and names_in(store) == []
    a_batch(store, a_file(store))
    store.folder.chmod(0o755)
    for path in store.folder.iterdir():
        assert path.stat().st_mode & 0o077 == 0, f"{path.name} is for others too"


NO_IDS = (
    *("", "x", "..", "../../etc/passwd", "file-../../x", "file-" + "g" * 32, "/etc/passwd"),
    *("file-" + "0" * 31, "file-" + "0" * 33, "file-" + "0" * 32 + "\n", "file-\0" + "0" * 31),
    *("FILE-" + "0" * 32, "file-" + "٠" * 32, "batch_" + "0" * 32, "file-" + "0" * 10_000),
)


def test_what_is_no_id_never_becomes_a_path(store: Store) -> None:
    for id in NO_IDS:
        with pytest.raises(StoreError, match="is no id of a file"):
            store.path_of(id)
        assert not (is_file_id(id) or store.get_file(id) or store.delete_file(id, "")), id


def test_a_quota_counts_small_files_too(store: Store) -> None:
    most = 3 * LEAST_BYTES
    a_file(store, b"x", max_bytes=most)
    a_file(store, b"x" * LEAST_BYTES, max_bytes=most)
    a_file(store, owner="another", max_bytes=most)
    with pytest.raises(QuotaExceeded, match=f"max_store_bytes = {most}"):
        a_file(store, b"x" * (LEAST_BYTES + 1), max_bytes=most)
    assert len(names_in(store)) == 2 * 3  # and nothing of the one refused
    a_file(store, b"", max_bytes=most)


def test_a_batch_goes_from_state_to_state_once(tmp_path: Path) -> None:
    store, *others = stores = [Store(tmp_path) for _ in range(4)]
    file = a_file(store)
    batch = a_batch(store, file)
    assert store.runnable_batches() == [batch]
    begin = {"status": "in_progress", "total": 7}
    begun = [item.change_batch(batch.id, "validating", **begin) for item in stores]
    assert [start and (start.total, start.in_progress_at is None) for start in begun] == [
        (7, False),
        *[None] * len(others),
    ]
    assert store.change_batch(new_batch_id(), "validating", status="in_progress") is None
    outcomes = [item.allocate_output_ids(batch) for item in stores]
    assert outcomes == [store.get_batch(batch.id)] * len(stores)
    done = finish(store, batch)
    assert (done.status, done.error_file_id, done.completed) == ("completed", None, 1)
    assert done.completed_at is not None
    assert store.finish_batch(batch.id, "cancelled") is None
    assert store.change_batch(batch.id, ("in_progress", "validating"), status="cancelling") is None
    assert store.runnable_batches() == []
    assert store.count_batches() == {"completed": 1}


def test_progress_is_not_worth_a_sidecar(store: Store) -> None:
    batch = a_batch(store, a_file(store))
    sidecars = {path: path.read_bytes() for path in store.folder.rglob("*") if ".json" in path.name}
    assert any(batch.id in path.name for path in sidecars)
    tokens = ("input_tokens", "output_tokens", "cached_tokens")
    counts = dict.fromkeys(("completed", "failed", *tokens), 3)
    assert store.change_batch(batch.id, "validating", **counts) == replace(batch, **counts)
    assert sidecars == {path: path.read_bytes() for path in sidecars}
    store.change_batch(batch.id, "validating", total=3, **counts)
    assert sidecars != {path: path.read_bytes() for path in sidecars}


def test_a_file_that_a_batch_needs_stays_until_that_has_ended(store: Store) -> None:
    batch = store.allocate_output_ids(a_batch(store, a_file(store, expires_at=NOW), max_running=1))
    with pytest.raises(Conflict, match=batch.id):
        store.delete_file(batch.input_file_id, "")
    file = a_file(store)
    with pytest.raises(RateLimited, match="max_batches = 1"):
        a_batch(store, file, max_running=1)
    assert store.expire(NOW) == 0
    finish(store, batch)
    assert store.expire(NOW) == 1
    assert store.list_files("", 10) == [store.get_file(batch.output_file_id or ""), file]
    a_batch(store, file, max_running=1)


def test_what_a_crash_left_goes_and_what_is_being_written_stays(store: Store) -> None:
    batch = store.allocate_output_ids(a_batch(store, a_file(store)))
    uploading, abandoned = (store.upload_path(new_file_id()) for _ in range(2))
    forgotten = store.path_of(new_file_id())
    paths = [uploading, abandoned, forgotten, store.path_of(batch.output_file_id or "")]
    now = int(time.time())
    for path in paths:
        path.write_bytes(b"x")
        if path is not uploading:
            os.utime(path, (now - ABANDONED_S - 1, now - ABANDONED_S - 1))
    store.expire(now)
    assert [path.exists() for path in paths] == [True, False, False, True]


def test_a_list_goes_on_after_what_was_deleted(store: Store) -> None:
    files = [a_file(store) for _ in range(4)]
    store.delete_file(files[1].id, "")
    assert store.list_files("", 10, files[1].id, is_ascending=True) == files[2:]
    assert store.list_files("", 10, files[1].id) == files[:1]
    store.expire(int(time.time()) + CURSORS_KEPT_S + 1)
    assert store.list_files("", 10, files[1].id) is None
    output = a_file(store, purpose="batch_output")
    assert store.list_files("", 10, purpose="batch_output") == [output]
    assert output not in (store.list_files("", 10, purpose="batch") or [output])


@given(st.lists(st.integers(0, 20), min_size=1, max_size=20), st.integers(1, 5), st.booleans())
@settings(max_examples=12)
def test_a_walk_sees_everything_once_whatever_happens_meanwhile(
    tmp_path_factory: pytest.TempPathFactory, actions: list[int], limit: int, is_ascending: bool
) -> None:
    """An action deletes the file of its number, or makes one; a page is read after each."""
    store = Store(tmp_path_factory.mktemp("walk"))
    files = [a_file(store).id for _ in range(8)]
    first = set(files)
    deleted: set[str] = set()
    seen: list[str] = []

    def read() -> int:
        page = store.list_files("", limit, seen[-1] if seen else None, is_ascending)
        assert page is not None
        seen.extend(record.id for record in page)
        return len(page)

    for action in actions:
        if action < len(files):
            store.delete_file(files[action], "")
            deleted.add(files[action])
        else:
            files.append(a_file(store).id)
        read()
    while read():
        pass
    assert len(seen) == len(set(seen))
    assert first - deleted <= set(seen) <= set(files)
    order = [files.index(id) for id in seen]
    assert order == sorted(order, reverse=not is_ascending)
    store.close()


# What can be wrong with the disk


def test_a_newer_database_is_refused_and_left_alone(store: Store) -> None:
    a_file(store)
    store.close()
    newer = database.VERSION + 1
    execute(store, "ALTER TABLE files ADD COLUMN more TEXT")
    execute(store, f"PRAGMA user_version = {newer}")
    with pytest.raises(StoreError, match=rf"has version {newer} .* another data_dir"):
        store.list_files("", 10)
    assert not (store.folder / "store-2.sqlite3").exists()


@pytest.mark.parametrize("damage", ["gone", "empty", "garbage", "half", *BAD_SQL, "other tables"])
def test_rebuilds_a_database(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    store, other = Store(tmp_path), Store(tmp_path)
    file = a_file(store, owner="a")
    running = store.allocate_output_ids(a_batch(store, file))
    assert store.change_batch(running.id, "validating", status="in_progress", total=5)
    done = finish(store, a_batch(store, file))
    deleted = a_file(store, owner="a")
    store.delete_file(deleted.id, "a")
    before = all_of(store)
    assert all_of(other) == before
    if damage in {"gone", "half", "other tables"}:  # which is found at a start
        store.close()
        other.close()
    spoil(store, damage)
    for item in (Store(tmp_path), store, other):
        assert all_of(item) == before
        assert item.path_of(done.output_file_id or "").read_bytes() == b"out\n"
    assert store.change_batch(running.id, "in_progress", completed=1) == other.get_batch(running.id)
    mended = {"no records", "records that are no UTF-8"}
    reported = "mended" if damage in mended else "making it anew"
    assert damage == "gone" or reported in caplog.text


def all_of(store: Store) -> list[str]:
    """What there is of the owner "a", whatever its order."""
    counts = store.count_batches()
    result = (store.list_files("a", 10), store.list_batches("a", 10), store.runnable_batches())
    return [repr(counts), *sorted(repr(item) for some in result for item in some or ())]


def execute(store: Store, statement: str) -> None:
    with closing(sqlite3.connect(store.folder / "store.sqlite3")) as connection, connection:
        connection.execute(statement)


def spoil(store: Store, damage: str) -> None:
    # Without such a statement: everything is in this file then.
    execute(store, BAD_SQL.get(damage, "PRAGMA wal_checkpoint(TRUNCATE)"))
    path = store.folder / "store.sqlite3"
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
        return
    spoiled = {
        "empty": b"",
        "garbage": b"\xff" * len(data),
        "half": data[: len(data) // 2],
        "other tables": data.replace(b"num_bytes INTEGER", b"num_bytds INTEGER"),
    }
    path.write_bytes(spoiled.get(damage, data))


def test_a_damaged_sidecar_costs_no_other(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    retained, without_bytes, *damaged = (a_file(store).id for _ in range(5))
    store.path_of(without_bytes).unlink()
    for id, content in zip(damaged, (b"{", b'{"id": "\xff"}', b"[" * 100_000), strict=True):
        (store.folder / "files" / f"{id}.json").write_bytes(content)
    spoil(store, "garbage")
    assert [record.id for record in store.list_files("", 10) or []] == [retained]
    assert all(f"{id}.json is left out" in caplog.text for id in damaged)


def test_a_transaction_that_was_lost_comes_back(store: Store) -> None:
    file = a_file(store)
    batch = a_batch(store, file)
    for table in ("files", "batches"):
        execute(store, f"DELETE FROM {table}")
    assert store.list_files("", 10) == []
    store.expire(NOW)
    assert store.list_files("", 10) == [file]
    assert store.runnable_batches() == [batch]


@pytest.mark.parametrize("full_at", ["os.fsync", "srm.server.storage.rows.put"])
def test_a_full_disk_keeps_none(
    store: Store, monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    retained = a_file(store)
    before = names_in(store)
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    at_sidecar = OSError(errno.ENOSPC, "No space left on device")
    refuse = Mock(side_effect=at_sidecar if full_at == "os.fsync" else full)
    monkeypatch.setattr(full_at, refuse)
    with pytest.raises(StoreFull, match=r"no space is left .* delete files"):
        a_file(store)
    monkeypatch.setattr("srm.server.storage.rows.put", refuse)
    with pytest.raises(StoreFull):
        a_batch(store, retained)
    monkeypatch.undo()
    assert names_in(store) == before
    assert store.expire(NOW) == 0
    assert store.list_files("", 10) == [retained] and store.runnable_batches() == []


# Several processes

HAMMER = """
import sys
from pathlib import Path
from srm.server.storage.store import Store
from tests.unit.server.storage.test_store import a_batch, a_file

store = Store(Path(sys.argv[1]))
for number in range(int(sys.argv[2])):
    file = a_file(store, owner="a")
    print(file.id, flush=True)
    batch = a_batch(store, file)
    print(batch.id, flush=True)
    store.change_batch(sys.argv[3], "validating", completed=0)
    if number % 2:
        store.delete_file(file.id, "b")
"""


def hammer(folder: Path, times: int, shared: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HAMMER, str(folder), str(times), shared]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_processes_share_it_and_one_may_be_killed(store: Store) -> None:
    """What a process was told is done, is done, even if it is killed at once."""
    shared = a_batch(store, a_file(store))
    doomed = hammer(store.folder, 100_000, shared.id)
    others = [hammer(store.folder, 20, shared.id) for _ in range(2)]
    assert doomed.stdout is not None
    acknowledged = [doomed.stdout.readline().strip() for _ in range(41)]
    doomed.send_signal(signal.SIGKILL)
    acknowledged += doomed.communicate()[0].split("\n")[:-1]
    for other in others:
        acknowledged += other.communicate()[0].split()
        assert other.returncode == 0
    files = {record.id for record in store.list_files("a", 10_000) or []}
    batches = {record.id for record in store.runnable_batches()}
    assert len(acknowledged) >= 41 + 2 * 40
    assert set(acknowledged) <= files | batches
    assert not (store.folder / "store-2.sqlite3").exists()
