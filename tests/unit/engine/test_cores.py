"""How many cores a process may use, and how many API processes that makes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from srm import cores
from srm.server.supervise import launch


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of a container's limit, on a machine of 64 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cores, "CGROUP", tmp_path)
    return tmp_path / "cpu.max"


def test_a_container_may_have_fewer_cores(machine: Path) -> None:
    assert cores.available_cores() == 64
    for limit, result in [("max 100000", 64), ("250000 100000", 2), ("5000 100000", 1), ("", 64)]:
        machine.write_text(limit + "\n")
        assert cores.available_cores() == result


def test_a_container_of_cgroup_v1_may_have_fewer_cores(machine: Path) -> None:
    folder = machine.parent / "cpu"
    folder.mkdir()
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    for quota, result in [("-1", 64), ("250000", 2), ("5000", 1)]:
        (folder / "cpu.cfs_quota_us").write_text(quota + "\n")
        assert cores.available_cores() == result


@pytest.mark.parametrize(
    ("count", "engines", "processes"),
    [(1, 1, 1), (2, 1, 1), (7, 1, 1), (8, 2, 2), (16, 4, 4), (32, 8, 8), (64, 1, 8), (64, 3, 12)],
)
def test_every_four_cores_have_an_api_process(
    machine: Path, count: int, engines: int, processes: int
) -> None:
    machine.write_text(f"{count * 100_000} 100000\n")
    assert launch.count_api_processes(engines) == processes
