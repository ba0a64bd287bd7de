"""What a client's headers say of its patience, and which requests are retries."""

from __future__ import annotations

from typing import Any

import pytest

from server.http.retries import _is_retry, _read_timeout_s


def scope(method: str = "POST", kind: str = "http", **headers: str) -> dict[str, Any]:
    named = [(f"x-stainless-{name.replace('_', '-')}", value) for name, value in headers.items()]
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in named]
    return {"type": kind, "method": method, "headers": encoded}


@pytest.mark.parametrize("given", ["", "abc", "0", "-1", "nan", "inf", "1e999"])
def test_no_time_out_is_known_of_what_is_no_time(given: str) -> None:
    assert _read_timeout_s(scope(read_timeout=given)) is None


def test_the_time_out_of_reading_comes_first() -> None:
    assert _read_timeout_s(scope(read_timeout="0.5")) == 0.5
    assert _read_timeout_s(scope(timeout="7")) == 7
    assert _read_timeout_s(scope(read_timeout="3", timeout="7")) == 3
    assert _read_timeout_s(scope("GET", read_timeout="3")) is None
    assert _read_timeout_s(scope(kind="websocket", read_timeout="3")) is None


COUNTS = {"": False, "0": False, "1": True, "9" * 5_000: True, "²": False, "-1": False}


@pytest.mark.parametrize("count", COUNTS, ids=lambda count: count[:2] or "empty")
def test_a_retry_counts_above_0(count: str) -> None:
    assert _is_retry(scope(retry_count=count)) == COUNTS[count]
    assert not _is_retry(scope())
