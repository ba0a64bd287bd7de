"""How many cores a process may use, how many API processes that makes, and those near a GPU."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from srm import cores
from srm.server.supervise import launch
from tests.kit.serving import run_python


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


GPU = "0000:4E:00.0"


def write_sysfs(folder: Path, online: str, node: str, cores_of_node: str) -> None:
    """What the kernel says of a machine's nodes, and of a GPU at one of them."""
    device = folder / "bus" / "pci" / "devices" / GPU.lower()
    nodes = folder / "devices" / "system" / "node"
    device.mkdir(parents=True)
    nodes.mkdir(parents=True)
    (nodes / "online").write_text(f"{online}\n")
    (device / "numa_node").write_text(f"{node}\n")
    (device / "local_cpulist").write_text(f"{cores_of_node}\n")


PINNED = """
import json, logging, os, sys, threading
from pathlib import Path
from srm import cores
logging.basicConfig(level=logging.INFO, format="%(message)s")
cores.SYSFS = Path(sys.argv[1])
ready, results = threading.Event(), []
def look():
    ready.wait()
    results.append(sorted(os.sched_getaffinity(0)))
early = threading.Thread(target=look)
early.start()
cores.stay_near(sys.argv[2])
ready.set()
late = threading.Thread(target=look)
late.start()
early.join(), late.join()
print(json.dumps([*results, sorted(os.sched_getaffinity(0))]))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
@pytest.mark.parametrize(("online", "is_pinned"), [("0-1", True), ("0,2-3", True), ("0", False)])
def test_threads_stay_at_the_node_of_their_gpu(
    tmp_path: Path, online: str, is_pinned: bool
) -> None:
    own = sorted(os.sched_getaffinity(0))
    write_sysfs(tmp_path, online, "1", f"{own[-1]},64-127")
    ran = run_python(PINNED, str(tmp_path), GPU)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == [own[-1:] if is_pinned else own] * 3
    log = f"GPU {GPU} is at NUMA node 1: cores {own[-1:]}\n"
    assert ran.stderr == (log if is_pinned else "")


def test_a_machine_that_pins_nothing_ends_no_engine(
    machine: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "not allowed")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    monkeypatch.setattr(cores, "SYSFS", machine.parent / "sys")
    write_sysfs(machine.parent / "sys", "0-1", "1", "0-127")
    cores.stay_near(GPU)
    assert "stays on all of its cores ([Errno 1] not allowed)" in caplog.text


@pytest.mark.parametrize(
    ("node", "cores_of_node", "reason"),
    [
        ("1", "64-127", "is at NUMA node 1: this process has no cores there"),
        ("-1", "0-127", "is at NUMA node -1: this process has no cores there"),
        ("?", "0", "stays on all of its cores (invalid literal"),
    ],
)
def test_where_no_core_is_near_that_is_said_and_nothing_done(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    node: str,
    cores_of_node: str,
    reason: str,
) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("nothing is to be done"))
    monkeypatch.setattr(cores, "SYSFS", machine.parent / "sys")
    write_sysfs(machine.parent / "sys", "0-1", node, cores_of_node)
    with caplog.at_level(logging.WARNING):
        cores.stay_near(GPU)
    assert reason in caplog.text
