"""A jump of the wall clock expires nothing, whatever process asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from srm.server.storage.clock import HOLD_S, Clock

JUMP = 1e9


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


def test_a_jump_ahead_is_left_out_until_it_has_lasted(machine: Machine) -> None:
    clock = machine.clock()
    machine.passes(100_000)
    assert clock.now() == machine.wall
    machine.wall += JUMP
    assert clock.now() == machine.wall - JUMP
    machine.passes(HOLD_S - 1)
    assert clock.now() == machine.wall - JUMP
    machine.passes(1)
    assert clock.now() == machine.wall


def test_follows_a_clock_that_is_set_back(machine: Machine) -> None:
    clock = machine.clock()
    machine.wall -= 5000
    assert clock.now() == machine.wall
    machine.wall += JUMP
    clock.now()
    machine.wall -= JUMP
    machine.passes(HOLD_S)
    assert clock.now() == machine.wall
    machine.wall += JUMP
    assert clock.now() == machine.wall - JUMP


def test_the_next_process_leaves_it_out_too_but_not_after_a_boot(machine: Machine) -> None:
    machine.clock().keep()
    machine.wall += JUMP
    machine.passes(10)
    clock = machine.clock()
    assert clock.now() == machine.wall - JUMP
    assert machine.clock("b").now() == machine.wall
    clock.keep()
    machine.passes(HOLD_S)
    assert machine.clock().now() == machine.wall  # since then, not since it was started


def test_a_damaged_file_is_no_clock(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    offset = b'{"boot":"a","offset":%b,"held_at":null}'
    offsets = (offset % data for data in (b"1e300", b"-1", b"1e12"))
    for data in (b"", b"{", b"\xff{}", b'{"boot": "a"}', b"[]", *offsets):
        machine.file.write_bytes(data)
        assert machine.clock().now() == machine.wall
    for folder in (machine.file.with_name("gone"), machine.file):  # which is a file
        machine.file = folder / "clock.json"
        machine.clock().keep()
        assert f"{machine.file} cannot be written" in caplog.text


def test_the_real_one(tmp_path: Path) -> None:
    assert Clock(tmp_path / "clock.json").now() > 1_700_000_000
