"""What a client's headers say of its patience, and which requests are retries."""

from __future__ import annotations

from typing import Any

from server.http.retries import is_retry, read_timeout_s


def scope(method: str = "POST", kind: str = "http", **headers: str) -> dict[str, Any]:
    named = [(f"x-stainless-{name.replace('_', '-')}", value) for name, value in headers.items()]
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in named]
    return {"type": kind, "method": method, "headers": encoded}


TIMEOUTS: list[tuple[dict[str, str], float | None]] = [
    ({"read_timeout": "0.5"}, 0.5),
    ({"timeout": "7"}, 7),
    ({"read_timeout": "3", "timeout": "7"}, 3),
    ({"method": "GET", "read_timeout": "3"}, None),
    ({"kind": "websocket", "read_timeout": "3"}, None),
    *(({"read_timeout": name}, None) for name in ("", "abc", "0", "-1", "nan", "inf", "1e999")),
]
COUNTS = {"": False, "0": False, "1": True, "9" * 5_000: True, "²": False, "-1": False}


def test_what_a_client_says_of_its_patience_and_of_retries() -> None:
    for fields, seconds in TIMEOUTS:
        assert read_timeout_s(scope(**fields)) == seconds, fields
    for count, is_one in COUNTS.items():
        assert is_retry(scope(retry_count=count)) == is_one, count[:9]
    assert not is_retry(scope())
