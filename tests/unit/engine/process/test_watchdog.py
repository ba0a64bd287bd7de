"""The watchdog ends what makes no progress, with stacks, and leaves alone what does; the heartbeat
ends nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from srm.engine.process import watchdog
from srm.engine.process.watchdog import REARM_S, Heartbeat, Watchdog
from tests.kit.serving import ROOT


def run(script: str) -> subprocess.CompletedProcess[str]:
    """As a process of its own: there is one clock in each."""
    head = "import time\nfrom engine.process.watchdog import Watchdog\n"
    command = [sys.executable, "-c", head + script]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


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


def test_a_heartbeat_on_a_full_disk_ends_nothing_and_says_that_the_process_works(
    tmp_path: Path,
) -> None:
    """It wrote a byte, which a full disk refuses: the engine ended at its first step."""
    path = tmp_path / "heartbeat"
    full = run(
        "import errno, os\nfrom pathlib import Path\nfrom engine.process.watchdog import *\n"
        "def refuse(*_): raise OSError(errno.ENOSPC, 'No space left on device')\n"
        f"os.write = refuse\nbeating = Heartbeat(Path({str(path)!r}))\nbeating.beat(1)\n"
    )
    assert (full.returncode, full.stderr) == (0, "")
    assert path.stat().st_size > 0


def test_a_heartbeat_that_cannot_be_made_is_said_once_and_made_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that a sweeper of temp folders took was never made again, and the engine not watched."""
    monkeypatch.setattr(watchdog, "REARM_S", 0.0)
    folder = tmp_path / "folder"
    beating = Heartbeat(folder / "heartbeat")
    for _ in range(3):
        beating.beat(0)
    assert caplog.text.count("cannot show that this process lives") == 1
    folder.mkdir()
    beating.beat(0)
    assert (folder / "heartbeat").stat().st_size == 0
    (folder / "heartbeat").unlink()
    beating.beat(7)
    assert (folder / "heartbeat").stat().st_size > 0
