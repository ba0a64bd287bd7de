"""The watchdog ends what makes no progress, with stacks, and leaves alone what does; the heartbeat
ends nothing."""

from __future__ import annotations

import os
import struct
import subprocess

import pytest

from srm.engine.process import watchdog
from srm.engine.process.watchdog import REARM_S, Heartbeat, Watchdog
from tests.kit.serving import run_python


def run(script: str) -> subprocess.CompletedProcess[str]:
    """As a process of its own: there is one clock in each."""
    return run_python(f"import time\nfrom engine.process.watchdog import Watchdog\n{script}")


def test_a_hang_ends_the_process_and_is_named() -> None:
    hung = run("def hang():\n    time.sleep(50)\nWatchdog(0.3).note_progress()\nhang()\n")
    assert hung.returncode == 1
    assert "Timeout" in hung.stderr and "in hang" in hung.stderr
    stopped = "dog = Watchdog(0.3)\ndog.note_progress()\ndog.stop()\n"
    assert run(f"{stopped}Watchdog(0).note_progress()\ntime.sleep(0.6)\n").returncode == 0


def test_who_feeds_it_puts_its_end_off(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ends = 100.0, list[float]()
    monkeypatch.setattr("srm.engine.process.watchdog.time.monotonic", lambda: now)
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda timeout_s, exit: ends.append(now + timeout_s)
    )
    dog = Watchdog(30)
    for _ in range(50):
        dog.note_progress()
        assert ends[-1] > now + 30 - 2 * REARM_S
        now += REARM_S / 3
    assert len(ends) < 20


def test_a_watchdog_that_gets_no_thread_ends_nothing_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where others had taken all processes of a container, the engine ended."""

    def refuse(timeout_s: float, exit: bool) -> None:
        raise RuntimeError("unable to start watchdog thread")

    monkeypatch.setattr(watchdog, "REARM_S", 0.0)
    monkeypatch.setattr("faulthandler.dump_traceback_later", refuse)
    dog = Watchdog(30)
    for _ in range(3):
        dog.note_progress()
    assert caplog.text.count("nobody watches this process for now: unable to start") == 1


def test_a_heartbeat_shows_its_time_and_number_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "REARM_S", 0.0)
    fd = os.memfd_create("heartbeat")
    os.ftruncate(fd, Heartbeat.BYTES)
    beating = Heartbeat(fd)
    first, steps = struct.unpack("dd", os.pread(fd, Heartbeat.BYTES, 0))
    assert first > 0 and steps == 0
    beating.beat(7)
    last, steps = struct.unpack("dd", os.pread(fd, Heartbeat.BYTES, 0))
    assert last >= first and steps == 7
