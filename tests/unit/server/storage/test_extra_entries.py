"""Files and folders in the data folder that the store has not made stop nothing."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from srm.errors import StoreError
from srm.server.storage.records import new_file_id
from srm.server.storage.store import Store
from srm.server.storage.upkeep import ABANDONED_S
from tests.unit.server.storage.test_store import NOW, a_batch, a_file, names_in


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a store with a file and a batch."""
    with closing(Store(tmp_path / "data")) as store:
        a_batch(store, a_file(store))
    return tmp_path / "data"


def used(folder: Path) -> tuple[int, str]:
    """How many files a new process has after it has added one, and its database's name."""
    with closing(Store(folder)) as store:
        a_file(store)
        store.expire(NOW)
        result = store.list_files("", 10) or []
        opened = {Path(file.path) for file in psutil.Process().open_files()}
        (name,) = {path.name for path in opened & {*folder.glob("*.sqlite3")}}
        return len(result), name


@pytest.mark.parametrize(
    "name",
    ["store-02.sqlite3", "store-1.sqlite3", "store-0.sqlite3", "store-999999999.sqlite3"],
)
def test_leaves_odd_names_alone(folder: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    (folder / name).touch()
    with caplog.at_level(logging.ERROR):
        assert used(folder) == (2, "store.sqlite3")
    assert caplog.messages == []
    assert (folder / name).stat().st_size == 0


def test_a_folder_named_as_a_database_is_not_taken_for_one(folder: Path) -> None:
    (folder / "store-2.sqlite3").mkdir()
    assert used(folder) == (2, "store.sqlite3")
    (folder / "store.sqlite3").write_bytes(b"damaged")
    assert used(folder) == (3, "store-3.sqlite3")


def test_a_folder_in_the_way_of_a_new_database_is_removed(folder: Path) -> None:
    (folder / "store.making" / "deeper").mkdir(parents=True)
    (folder / "store.sqlite3").write_bytes(b"damaged")
    assert used(folder) == (2, "store-2.sqlite3")


def test_a_folder_in_place_of_the_lock_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "store.lock").mkdir(parents=True)
    with closing(Store(folder)) as store, pytest.raises(StoreError, match=r"store\.lock"):
        a_file(store)


def test_a_folder_named_as_a_file_keeps_nothing_abandoned(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Store(folder)) as store:
        retained = names_in(store)
        odd, abandoned = new_file_id(), new_file_id()
        (folder / "files" / odd).mkdir()
        (folder / "files" / abandoned).touch()
        for name in (odd, abandoned):
            os.utime(folder / "files" / name, (0, 0))
        listed = [folder / "files" / name for name in (odd, abandoned)]
        entries = Path.iterdir
        monkeypatch.setattr(  # in this order
            Path, "iterdir", lambda self: iter(listed) if self.name == "files" else entries(self)
        )
        with caplog.at_level(logging.ERROR):
            store.expire(ABANDONED_S + 1)
        monkeypatch.undo()
        assert names_in(store) == sorted([*retained, odd])
    assert [odd in message for message in caplog.messages] == [True]


def test_mends_beside_a_folder_in_place_of_a_sidecar(folder: Path) -> None:
    with closing(Store(folder)) as store:
        odd, lost = (folder / "files" / f"{a_file(store).id}.json" for _ in range(2))
        for path in (odd, lost):
            path.unlink()
        odd.mkdir()
        store.expire(NOW)
    assert lost.is_file()
