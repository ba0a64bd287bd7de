"""Requests and tokens a minute, by a clock that the test turns, of all processes together."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RateLimited
from server.http.limits import Limits, memory
from tests.serving import ROOT


class Key:
    """One key of a server with these limits, at a time."""

    def __init__(self, requests_per_minute: float, tokens_per_minute: float, fd: int = -1) -> None:
        self.now = 0.0
        limits = Limits(requests_per_minute, tokens_per_minute, fd, lambda: self.now)
        self.account = limits.account("a")

    def wait_s(self, now: float) -> int:
        """What a request is told to wait; 0 if it is admitted."""
        self.now = now
        try:
            self.account.admit()
        except RateLimited as error:
            return error.retry_after_s
        return 0


def test_a_minutes_requests_may_come_at_once_and_then_one_at_a_time() -> None:
    key = Key(requests_per_minute=6, tokens_per_minute=0)
    assert [key.wait_s(0) for _ in range(8)] == [0] * 6 + [10] * 2
    assert [key.wait_s(now) for now in (9.5, 10, 10)] == [1, 0, 10]
    assert [key.wait_s(1_000) for _ in range(7)] == [0] * 6 + [10]
    for per_minute in (1, 7, 11, 61, 999):  # exactly
        key = Key(per_minute, 0)
        admitted = [key.wait_s(123_456.7) == 0 for _ in range(per_minute + 1)]
        assert admitted == [*([True] * per_minute), False]


def test_tokens_are_charged_afterwards_and_may_be_overdrawn() -> None:
    key = Key(requests_per_minute=0, tokens_per_minute=60)
    assert key.wait_s(0) == 0
    key.account.charge(100)
    assert [key.wait_s(now) for now in (0, 41)] == [41, 0]
    key.account.charge(1_000_000)
    assert key.wait_s(41) == 120
    key = Key(requests_per_minute=2, tokens_per_minute=60)
    key.account.charge(60)
    assert [key.wait_s(0) for _ in range(9)] == [1] * 9  # and counts nothing
    assert [key.wait_s(1) for _ in range(3)] == [0, 0, 30]


def test_each_key_has_an_account_of_its_own_and_none_waits_without_limits() -> None:
    limits = Limits(1, 0)
    limits.account("a").admit()
    with pytest.raises(RateLimited, match="1 requests a minute"):
        limits.account("a").admit()
    limits.account("b").admit()
    key = Key(0, 0)
    key.account.charge(10**9)
    assert key.wait_s(0) == 0


def elsewhere(fd: int, then: str) -> subprocess.Popen[str]:
    """Another process with the same memory, and 20 requests a minute."""
    code = f"""
import os
from server.http.limits import Limits, RateLimited
account = Limits(20, 0, {fd}, lambda: 0.0).account("a")
{then}
"""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, pass_fds=[fd], stdin=pipe, stdout=pipe, text=True
    )


def test_limits_hold_over_all_processes_together() -> None:
    fd = memory()
    asked = """
for _ in range(20):
    try:
        account.admit()
        print("admitted")
    except RateLimited:
        pass
"""
    both = [elsewhere(fd, asked) for _ in range(2)]
    said = [one.communicate()[0] for one in both]
    assert "".join(said).count("admitted") == 20
    assert Key(20, 0, fd).wait_s(0) == 3
    os.close(fd)


def test_a_process_that_is_killed_while_it_counts_stops_nobody() -> None:
    fd = memory()
    killed = elsewhere(fd, "with account._full_at(): print('in', flush=True); input()")
    assert killed.stdout is not None and killed.stdout.readline() == "in\n"
    killed.kill()
    key = Key(20, 0, fd)
    assert [key.wait_s(0) for _ in range(21)] == [0] * 20 + [3]
    killed.communicate()
    os.close(fd)


@given(st.floats(0.5, 1_000), st.lists(st.floats(0, 30), min_size=1, max_size=200))
def test_no_key_gets_more_than_its_rate(per_minute: float, pauses: list[float]) -> None:
    fd = memory()
    key, now, admitted = Key(per_minute, 0, fd), 0.0, 0
    for pause in pauses:
        now += pause
        admitted += key.wait_s(now) == 0
    os.close(fd)
    assert admitted <= max(per_minute, 1) + per_minute * now / 60 + 1e-3
