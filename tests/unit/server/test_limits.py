"""Requests and tokens a minute, by a clock that the test turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import RateLimited
from server.limits import Account, Limits


def wait_s(account: Account, now: float) -> int:
    """What a request is told to wait; 0 if it is admitted."""
    try:
        account.admit(now)
    except RateLimited as error:
        return error.retry_after_s
    return 0


def test_a_minutes_requests_may_come_at_once_and_then_one_at_a_time() -> None:
    account = Account("a", requests_per_minute=6, tokens_per_minute=0, now=0)
    assert [wait_s(account, 0) for _ in range(8)] == [0] * 6 + [10] * 2
    assert wait_s(account, 9.5) == 1
    assert wait_s(account, 10) == 0
    assert wait_s(account, 10) == 10
    assert [wait_s(account, 1_000) for _ in range(7)] == [0] * 6 + [10]


def test_tokens_are_charged_afterwards_and_may_be_overdrawn() -> None:
    account = Account("a", requests_per_minute=0, tokens_per_minute=60, now=0)
    assert wait_s(account, 0) == 0
    account.charge(100)
    assert wait_s(account, 0) == 41
    assert wait_s(account, 41) == 0
    account.charge(1_000_000)
    assert wait_s(account, 41) == 120


def test_without_limits_nothing_waits() -> None:
    account = Account("a", 0, 0, 0)
    account.charge(10**9)
    assert wait_s(account, 0) == 0


def test_each_key_has_an_account_of_its_own() -> None:
    limits = Limits(1, 0)
    limits.account("a").admit_now()
    with pytest.raises(RateLimited, match="1 requests a minute"):
        limits.account("a").admit_now()
    limits.account("b").admit_now()


@given(
    st.floats(0.5, 1_000),
    st.lists(st.floats(0, 30, allow_nan=False), min_size=1, max_size=200),
)
def test_no_key_gets_more_than_its_rate(per_minute: float, pauses: list[float]) -> None:
    account, now, admitted = Account("a", per_minute, 0, 0), 0.0, 0
    for pause in pauses:
        now += pause
        admitted += wait_s(account, now) == 0
    assert admitted <= max(per_minute, 1) + per_minute * now / 60 + 1e-6
