"""The store of states: whose they are, how long, how many bytes, and what is on the disk."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srm.engine.state_file import ROW_BYTES, StateContent
from srm.errors import StoreError, StoreFull
from srm.server.errors import Conflict, QuotaExceeded
from srm.server.storage.states import StateRecord, StateStore, new_state_id
from tests.attack.damage import Disk
from tests.kit.serving import ROOT

NOW = 1_000_000


@dataclass
class Clock:
    now: float = NOW

    def __call__(self) -> float:
        return self.now


@dataclass
class Made:
    """A store and a clock that stands."""

    folder: Path
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.store = StateStore(self.folder, self.clock)

    def add(self, owner: str = "", ttl_s: int = 60, size: int = 40, limit: int = 0) -> StateRecord:
        content = StateContent(b"\1\0\0\0" * 2, bytes(size))
        record = StateRecord(
            id=new_state_id(),
            owner=owner,
            num_tokens=2,
            num_bytes=content.num_bytes,
            fingerprint="f",
            arithmetic="a",
            created_at=NOW,
            expires_at=int(self.clock.now) + ttl_s,
            digest=content.digest("f", "a"),
        )
        return self.store.add(record, content, limit)


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "data")


def test_nothing_is_made_before_the_first_state(made: Made) -> None:
    assert made.store.get(new_state_id(), "") is None and made.store.list("", 9) == []
    assert made.store.list("", 9, after=new_state_id()) is None
    assert not made.store.delete(new_state_id(), "") and made.store.bytes_of("") == 0
    assert not made.folder.exists()
    record = made.add()
    assert made.store.get(record.id, "") == (record, StateContent(b"\1\0\0\0" * 2, bytes(40)))
    assert (made.folder / "states.sqlite3").stat().st_mode & 0o777 == 0o600


def test_another_process_sees_the_same(made: Made) -> None:
    record = made.add()
    other = StateStore(made.folder, made.clock)
    assert other.list("", 9) == [record]
    assert other.delete(record.id, "") and made.store.list("", 9) == []


def test_pages_go_on_and_leave_out_what_has_expired(made: Made) -> None:
    ids = [made.add(ttl_s=ttl_s).id for ttl_s in (60, 5, 60, 60)]
    made.add("another")
    made.clock.now += 5
    assert [record.id for record in made.store.list("", 2) or ()] == [ids[3], ids[2]]
    assert [record.id for record in made.store.list("", 2, after=ids[2]) or ()] == [ids[0]]
    assert made.store.get(ids[1], "") is None and not made.store.delete(ids[1], "")


def test_the_same_again_changes_nothing_and_another_is_refused(made: Made) -> None:
    record = made.add()
    _, content = made.store.get(record.id, "") or (record, StateContent(b"", b""))
    later = msgspec.structs.replace(record, expires_at=NOW + 90)
    assert made.store.add(later, content) == record
    with pytest.raises(Conflict, match="another state"):
        made.store.add(msgspec.structs.replace(record, digest="0"), content)
    of_another = msgspec.structs.replace(record, owner="b")  # whose ids are their own
    assert made.store.add(of_another, content) == of_another
    made.clock.now += 60
    assert made.store.add(later, content) == later  # the first one has expired


OWNERS = st.sampled_from(["a", "b"])
STEPS = st.lists(
    st.tuples(st.just("add"), OWNERS, st.integers(1, 50), st.integers(1, 3000))
    | st.tuples(st.just("delete"), OWNERS, st.integers(0, 9), st.just(0))
    | st.tuples(st.just("wait"), OWNERS, st.integers(1, 30), st.just(0)),
    max_size=40,
)


@given(STEPS)
def test_a_quota_counts_what_has_not_expired(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, str, int, int]]
) -> None:
    made, limit = Made(tmp_path_factory.mktemp("quota")), 8_000
    alive: list[StateRecord] = []
    for kind, owner, number, size in steps:
        own = [record for record in alive if record.owner == owner]
        if kind == "wait":
            made.clock.now += number
            alive = [record for record in alive if record.expires_at > made.clock.now]
        elif kind == "delete" and number < len(own):
            assert made.store.delete(own[number].id, owner)
            alive.remove(own[number])
        elif kind == "add":
            fits = sum(record.num_bytes for record in own) + size + 8 + ROW_BYTES <= limit
            try:
                alive.append(made.add(owner, number, size, limit))
            except QuotaExceeded:
                assert not fits
            else:
                assert fits
    for owner in "ab":
        listed = made.store.list(owner, 99) or []
        assert listed[::-1] == [record for record in alive if record.owner == owner]


def test_what_has_expired_leaves_the_disk(made: Made) -> None:
    for _ in range(200):
        made.add(size=9_000, ttl_s=5)
    made.clock.now += 5
    made.store.expire()
    assert made.store.bytes_of("") == 0


def test_what_is_deleted_gives_its_room_back(made: Made) -> None:
    path = made.folder / "states.sqlite3"
    ids = [made.add(size=20_000).id for _ in range(100)]
    made.store.close()
    full = path.stat().st_size
    for id in ids:
        assert made.store.delete(id, "")
    made.store.close()
    assert path.stat().st_size < full / 20


def test_many_writers_lose_nothing(made: Made) -> None:
    stores = [Made(made.folder) for _ in range(4)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda number: stores[number % 4].add(), range(200)))
    assert len(made.store.list("", 999) or ()) == 200
    assert made.store.bytes_of("") == 200 * (48 + ROW_BYTES)


def test_a_full_disk_refuses_more_and_lets_delete(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = made.add()
    pending, nothing = pending_of(record, f"resp_{'0' * 32}")
    made.store.add(pending, nothing)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=15 * 1024**2))
    full = pytest.raises(StoreFull, match="less than the 16 MiB that must stay free is left")
    with full:
        made.add()
    content = StateContent(b"\1\0\0\0" * 2, bytes(40))
    with full:
        made.store.add(msgspec.structs.replace(record, id=pending.id), content, is_end=True)
    cancelled = msgspec.structs.replace(pending, is_pending=False)
    made.store.add(cancelled, nothing, is_end=True)
    assert made.store.get(pending.id, "") == (cancelled, nothing)
    assert made.store.delete(record.id, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="a disk of one's own needs root")
def test_a_disk_without_a_byte_is_said_to_be_full(tmp_path: Path) -> None:
    with closing(Disk(tmp_path / "disk", 20)) as disk:
        made = Made(disk.folder)
        records = [made.add() for _ in range(9)]
        made.store.close()
        disk.fill()
        with pytest.raises(StoreFull, match="no space is left"):
            made.store.get(records[0].id, "")
        disk.free()
        assert made.store.list("", 99) == records[::-1]
        made.store.close()


def test_damage_is_said_and_nothing_else_is_lost(made: Made) -> None:
    record, other = made.add(), made.add()
    made.store.close()
    path = made.folder / "states.sqlite3"
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE states SET state = ? WHERE id = ?", (bytes(39), record.id))
    with pytest.raises(StoreError, match=f"state {record.id} is damaged in .*: delete it"):
        made.store.get(record.id, "")
    assert made.store.get(other.id, "") and made.store.delete(record.id, "")
    made.store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE states SET record = ?", (b"{",))
    with pytest.raises(StoreError, match=r"a record in .* is damaged"):
        made.store.list("", 9)
    assert made.store.delete(other.id, "")
    made.store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    with pytest.raises(StoreError, match="has version 2 and this program knows 1"):
        made.store.list("", 9)


def pending_of(record: StateRecord, id: str) -> tuple[StateRecord, StateContent]:
    nothing = StateContent(b"", b"")
    pending = msgspec.structs.replace(
        record, id=id, is_pending=True, num_bytes=ROW_BYTES, num_tokens=0, fingerprint="",
        arithmetic="", digest=nothing.digest("", ""),
    )  # fmt: skip
    return pending, nothing


def test_what_is_pending_ends_once(made: Made) -> None:
    content, record = StateContent(b"\1\0\0\0" * 2, bytes(40)), made.add()
    pending, nothing = pending_of(record, f"resp_{'0' * 32}")
    whole = msgspec.structs.replace(record, id=pending.id)
    made.store.add(whole, content, is_end=True)  # it was never there, or was deleted
    assert made.store.get(pending.id, "") is None
    made.store.add(pending, nothing)
    limit = made.store.bytes_of("") - ROW_BYTES + whole.num_bytes
    with pytest.raises(QuotaExceeded):
        made.store.add(whole, content, limit - 1, is_end=True)
    assert made.store.get(pending.id, "") == (pending, nothing)
    made.store.add(whole, content, limit, is_end=True)
    made.store.add(msgspec.structs.replace(pending, is_pending=False), nothing, is_end=True)
    assert made.store.get(pending.id, "") == (whole, content)
    assert made.store.bytes_of("") == record.num_bytes + whole.num_bytes


def test_what_is_pending_expires_once_nobody_makes_it(made: Made) -> None:
    made_on, lost = (pending_of(made.add(), f"resp_{digit * 32}") for digit in "01")
    for pair in (made_on, lost):
        made.store.add(*pair)
    made.clock.now += 60
    made.store.expire()
    for pair in (made_on, lost):
        assert made.store.get(pair[0].id, "") == pair
    made.store.release(lost[0].id)
    assert made.store.get(lost[0].id, "") is None and not made.store.delete(lost[0].id, "")
    made.store.expire()
    assert made.store.bytes_of("") == made_on[0].num_bytes
    end = msgspec.structs.replace(made_on[0], is_pending=False, expires_at=NOW + 90)
    made.store.add(end, made_on[1], is_end=True)
    assert made.store.get(end.id, "") == (end, made_on[1])


HOLDER = """
import sys; from pathlib import Path; import msgspec
from srm.server.storage.states import StateContent, StateRecord, StateStore
store = StateStore(Path(sys.argv[1]))
for text in sys.argv[2:]:
    record = msgspec.json.decode(text, type=StateRecord)
    store.add(record, StateContent(b"", b""))
store.release(record.id)
print("held", flush=True); sys.stdin.read()
"""


def test_what_is_pending_is_lost_with_its_process(made: Made) -> None:
    record = msgspec.structs.replace(made.add(), expires_at=2**33)  # for the other process too
    items = [pending_of(record, new_state_id())[0] for _ in range(3)]
    made.store.add(items[0], StateContent(b"", b""))

    def are_lost() -> list[bool]:
        there = [made.store.get(item.id, "") for item in items]
        return [pair is None or pair[0].is_lost for pair in there]

    texts = [msgspec.json.encode(item).decode() for item in items[1:]]
    arguments = [sys.executable, "-c", HOLDER, str(made.folder), *texts]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, cwd=ROOT, stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert are_lost() == are_lost() == [False, False, True]  # to look holds nothing
        now, made.clock.now = made.clock.now, 2**33  # when all have expired
        assert are_lost() == [False, False, True]
        made.clock.now = now
        holder.kill()
        holder.wait()
    assert are_lost() == [False, True, True]
    made.store.release(items[0].id)
    assert are_lost() == [True] * 3
    made.store.close()
    made.store.release(items[0].id)  # by what ends after it
