"""Pools, copies of slots, and memory or waits that fail."""

from __future__ import annotations

from pathlib import Path

from srm.engine.state.tables import TABLE_ENTRIES
from tests.kit.fake_driver.driver import FakeDriver, calls_of, launches_of, parts, read_log, words

GIB = 2**30
SLOTS = 4_194_304


def test_a_pool_of_64_gib_is_one_fill_and_its_highest_slots_are_copied(
    fake: FakeDriver, graphs: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.touch()
    ran = fake.run("copy_slots", graphs, SLOTS, log=log)
    assert ran["same"]
    lines = parts(read_log(log))
    fills = calls_of(lines["pool"], "cuMemsetD8Async")
    of_slots = [SLOTS * 4 * n for n in (ran["width"], 1, 9)]
    assert [fill["bytes"] for fill in fills] == [*of_slots, 2 * TABLE_ENTRIES]
    assert fills[0]["bytes"] == 64 * GIB
    assert sum(call["bytes"] for call in calls_of(lines["pool"], "cuMemCreate")) >= 64 * GIB
    for name, copy in (("write", "up"), ("read", "down")):
        (launch,) = launches_of(lines[name])
        assert fills[0]["to"] in words(launch["parameters"][0])
        *_, copied = (line for line in lines[name] if line.get("copy") == copy)
        assert copied["bytes"] == 4 * 700 * (ran["width"] + 1)
        assert copied["stream"] == launch["stream"]


def test_memory_that_is_not_there_is_refused_by_name(fake: FakeDriver, graphs: Path) -> None:
    held = fake.run("start", graphs, 4_194_304, held_mib=40_000)["refused"]
    assert held.startswith("num_slots = 4194304 does not fit")
    failed = fake.run("start", graphs, 65_536, fail="cuMemCreate#4+=2,cuMemAlloc_v2#1+=2")
    assert "GiB of memory on" in failed["refused"] and "not free" in failed["refused"]


def test_without_virtual_memory_pools_are_allocated_one_by_one(
    fake: FakeDriver, graphs: Path, tmp_path: Path
) -> None:
    ran = fake.run("start", graphs, 65_536, fail="cuMemCreate#1+=801", log=tmp_path / "log")
    assert ran["slots"] == 65_536
    sizes = [call["bytes"] for call in calls_of(read_log(tmp_path / "log"), "cuMemAlloc")]
    assert max(sizes) >= GIB


def test_a_wait_that_fails_raises_what_the_device_said(fake: FakeDriver, graphs: Path) -> None:
    ran = fake.run("wait_for_a_step", graphs, fail="cuEventSynchronize#1+=700")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in ran["failed"]


def test_other_threads_run_while_a_wait_takes_long(
    fake: FakeDriver, graphs: Path, tmp_path: Path
) -> None:
    """One of them ends it."""
    log, until = tmp_path / "log", tmp_path / "until"
    log.touch()
    fail = f"cuEventSynchronize#1~{until}"
    assert fake.run("wait_for_a_step", graphs, until, fail=fail, log=log)["failed"] == ""
    assert until.exists()
