"""A jump of the wall clock expires nothing, whatever process asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.storage.clock import HOLD_S, Clock


class Machine:
    """With a wall clock that is set, and an uptime that goes on."""

    def __init__(self, folder: Path) -> None:
        self.wall, self.uptime = 1_000_000.0, 50.0
        self.file = folder / "clock.json"

    def clock(self, boot: str = "a") -> Clock:
        return Clock(self.file, lambda: self.wall, lambda: self.uptime, boot)

    def passes(self, seconds: float) -> None:
        self.wall += seconds
        self.uptime += seconds


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_time_passes(machine: Machine) -> None:
    clock = machine.clock()
    machine.passes(100_000)
    assert clock.now() == machine.wall


def test_a_jump_ahead_is_left_out_until_it_has_lasted(machine: Machine) -> None:
    clock = machine.clock()
    machine.wall += 1e9
    assert clock.now() == machine.wall - 1e9
    machine.passes(HOLD_S - 1)
    assert clock.now() == machine.wall - 1e9
    machine.passes(1)
    assert clock.now() == machine.wall


def test_a_jump_that_is_taken_back_is_forgotten(machine: Machine) -> None:
    clock = machine.clock()
    machine.wall += 1e9
    clock.now()
    machine.wall -= 1e9
    machine.passes(HOLD_S)
    assert clock.now() == machine.wall
    machine.wall += 1e9
    assert clock.now() == machine.wall - 1e9


def test_a_clock_that_is_set_back_is_followed(machine: Machine) -> None:
    clock = machine.clock()
    machine.wall -= 5000
    assert clock.now() == machine.wall


def test_the_next_process_leaves_it_out_too(machine: Machine) -> None:
    machine.clock().keep()
    machine.wall += 1e9
    machine.passes(10)
    clock = machine.clock()
    assert clock.now() == machine.wall - 1e9
    clock.keep()
    machine.passes(HOLD_S)
    assert machine.clock().now() == machine.wall  # since then, not since it was started


def test_nothing_is_known_after_a_boot(machine: Machine) -> None:
    machine.clock().keep()
    machine.wall += 1e9
    assert machine.clock("b").now() == machine.wall


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"\xff{}", b'{"boot": "a"}', b"[]"),
        *(
            b'{"boot":"a","offset":%b,"held_at":null}' % one
            for one in (b"1e300", b"-1e300", b"1e12")
        ),
    ],
)
def test_a_damaged_file_is_none(machine: Machine, data: bytes) -> None:
    machine.file.write_bytes(data)
    assert machine.clock().now() == machine.wall


def test_the_real_one(tmp_path: Path) -> None:
    assert Clock(tmp_path / "clock.json").now() > 1_700_000_000
