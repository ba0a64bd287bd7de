"""`srm bench slow-readers` at a small size: what it waits for comes; times are the benchmark's."""

from __future__ import annotations

from bench.server.slow_readers import SlowReadersBenchConfig, markdown, measure


def test_slow_readers_get_every_token_and_those_who_leave_give_their_slots_back() -> None:
    config = SlowReadersBenchConfig(streams=16, leave=5, max_tokens=200, step_s=0.001, pause_s=0.02)
    record = measure(config)  # which raises if a stream that stayed lacks a token
    assert [case["free_slots"] for case in record["cases"]] == [[16, 16]] * 2
    settings = {"streams": 16, "max_tokens": 200, "step_s": 0.001, "leave": 5}
    assert "half slow, 5 leave" in "\n".join(markdown(record | {"settings": settings}))
