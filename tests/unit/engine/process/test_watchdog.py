"""The watchdog ends what makes no progress, with stacks, and leaves alone what does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from engine.process.watchdog import REARM_S, Watchdog
from tests.serving import ROOT


def run(script: str) -> subprocess.CompletedProcess[str]:
    """As a process of its own: there is one clock in each."""
    head = "import time\nfrom engine.process.watchdog import Watchdog\n"
    command = [sys.executable, "-c", head + script]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


def test_a_hang_ends_the_process_and_is_named() -> None:
    hung = run("def hang():\n    time.sleep(50)\nWatchdog(0.3).feed()\nhang()\n")
    assert hung.returncode == 1
    assert "Timeout" in hung.stderr and "in hang" in hung.stderr
    stopped = "dog = Watchdog(0.3)\ndog.feed()\ndog.stop()\n"
    assert run(f"{stopped}Watchdog(0).feed()\ntime.sleep(0.6)\n").returncode == 0


def test_who_feeds_it_puts_its_end_off(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ends = 100.0, list[float]()
    monkeypatch.setattr("engine.process.watchdog.time.monotonic", lambda: now)
    monkeypatch.setattr(
        "faulthandler.dump_traceback_later", lambda timeout_s, exit: ends.append(now + timeout_s)
    )
    dog = Watchdog(30)
    for _ in range(50):
        dog.feed()
        assert ends[-1] > now + 30 - 2 * REARM_S
        now += REARM_S / 3
    assert len(ends) < 20
