"""Progress of long work as a log shows it."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from srm import Engine
from srm.__main__ import main
from srm.engine.__main__ import main as run_engine
from srm.errors import SRMError
from srm.progress import LINE_S, count_seconds, show_progress


def test_a_log_has_a_line_every_ten_seconds_with_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    with show_progress("training", 1_000, 500, clock=lambda: now) as tell:
        for second in range(100):
            now = float(second)
            tell(500 + second, f"loss {second}")
    assert LINE_S == 10
    *lines, end = capsys.readouterr().err.splitlines()
    assert lines[:2] == [
        "training: 51%, loss 10, 0:08:10 left",
        "training: 52%, loss 20, 0:08:00 left",
    ]
    assert len(lines) == 9 and end == "training: 60%, loss 99"


def test_work_of_unknown_length_and_work_that_is_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    with (
        show_progress("reading", None, clock=lambda: now) as tell,
        show_progress("reading", 7, is_shown=False, clock=lambda: now) as tell_nobody,
    ):
        now = 11.0
        tell(9, "9 characters")
        tell_nobody(5, "5 characters")
    assert capsys.readouterr().err == "reading: 9 characters\n" * 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Passing:
    """A clock that goes on while it is waited by; three times, then what is waited for ends."""

    def __init__(self) -> None:
        self.now, self.has_passed = 0.0, threading.Event()
        self.waits: list[float] = []

    def clock(self) -> float:
        return self.now

    def wait(self, done: threading.Event, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        if len(self.waits) < 4:
            return False
        self.has_passed.set()
        return True


def test_a_pause_between_bursts_changes_the_time_left_little(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passing, stderr = Passing(), Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    with show_progress("generating", 1_000, clock=passing.clock) as tell:
        for passing.now, done in ((10.0, 100), (20.0, 200), (61.0, 201), (62.0, 202)):
            tell(done, "")
    assert "0:06:47" in stderr.getvalue()  # 0:13:18 by the last two alone


@pytest.mark.parametrize(
    ("columns", "shown"), [(80, "loading /a/lo\\x1bng"), (24, "loading /a/lo\\")]
)
def test_a_terminal_counts_on_one_row_that_goes(
    columns: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    passing, stderr, reported = Passing(), Terminal(), list[float]()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("COLUMNS", str(columns))
    with count_seconds(
        "loading /a/lo\x1bng", reported.append, clock=passing.clock, wait=passing.wait
    ):
        assert passing.has_passed.wait(120)
    rows = [f"\r{shown}: {second} s\x1b[K" for second in (1, 2, 3)]
    assert stderr.getvalue() == "".join(rows) + "\r\x1b[K"
    assert passing.waits == [1.0] * 4 and not reported


def test_a_pipe_gets_no_count_but_what_its_log_says(capsys: pytest.CaptureFixture[str]) -> None:
    passing, reported = Passing(), list[float]()
    with count_seconds("loading", reported.append, 20.0, passing.clock, passing.wait):
        assert passing.has_passed.wait(120)
    with count_seconds("loading", clock=passing.clock, wait=passing.wait):
        pass
    assert reported == [20.0, 40.0, 60.0] and len(passing.waits) == 4
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("module", "start", "doing"),
    [
        ("engine.__main__", lambda _: run_engine([]), "loading .*demo"),
        ("engine.python.offline", lambda _: Engine("demo"), "loading .*demo"),
        ("engine.weights.inspect_model", lambda _: main(["inspect", "demo"]), "reading .*demo"),
        (
            "engine.weights.convert",
            lambda to: main(["convert", "demo", "--output", to]),
            "converting .*demo",
        ),
        (
            "engine.weights.convert",
            lambda to: main(["convert", "demo", "--output", to, "--delta-of", "regex"]),
            "converting .*demo",
        ),
        (
            "server.commands.admin_cli",
            lambda _: main(["weights", "demo", "--url", "http://a"]),
            "waiting for http://a",
        ),
        (
            "server.commands.batch",
            lambda to: main(["batch", __file__, "-o", to]),
            "reading the results in .*to",
        ),
    ],
)
def test_what_may_take_long_is_counted(
    module: str,
    start: Callable[[str], object],
    doing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A model of 4.6 GB was converted in three minutes, and loaded in as many, without a word."""

    def refuse(counted: str) -> None:
        raise SRMError(counted)

    monkeypatch.setattr(f"srm.{module}.count_seconds", refuse)
    reported = ""
    try:
        assert start(str(tmp_path / "to"))
    except SRMError as error:
        reported = error.message
    assert re.search(doing, reported + capsys.readouterr().err + caplog.text)
