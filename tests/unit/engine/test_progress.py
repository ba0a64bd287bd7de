"""Progress of long work as a log shows it."""

from __future__ import annotations

import pytest

from srm.progress import LINE_S, show_progress


def test_a_log_has_a_line_every_half_minute_with_the_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    with show_progress("training", 1_000, 500, clock=lambda: now) as tell:
        for second in range(100):
            now = float(second)
            tell(500 + second, f"loss {second}")
    assert LINE_S == 30
    assert capsys.readouterr().err.splitlines() == [
        "training: 53%, loss 30, 0:07:50 left",
        "training: 56%, loss 60, 0:07:20 left",
        "training: 59%, loss 90, 0:06:50 left",
        "training: 60%, loss 99",
    ]


def test_work_of_unknown_length_and_work_that_is_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = 0.0
    with (
        show_progress("reading", None, clock=lambda: now) as tell,
        show_progress("reading", 7, is_shown=False, clock=lambda: now) as tell_nobody,
    ):
        now = 31.0
        tell(9, "9 characters")
        tell_nobody(5, "5 characters")
    assert capsys.readouterr().err == "reading: 9 characters\n" * 2
