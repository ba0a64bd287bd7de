"""What `srm bench streams` counts and how it sorts samples; times are the benchmark's."""

from __future__ import annotations

import pytest

from research.bench.server.bare_streams import bare_streams
from research.bench.server.profile import divided, part_of

LOOP = ["main (server/__main__.py:110)", "run (uvicorn/server.py:86)"]


@pytest.mark.parametrize(
    ("inner", "part"),
    [
        ([], "loop"),
        (["take (/home/us/srm/engine/client/streams.py:9)"], "engine message"),
        (["write (server/reply/stream_writer.py:80)"], "rendering"),
        (["write (server/reply/stream_writer.py:80)", "__send (libc.so.6)"], "system call"),
        (["write (server/http/connection.py:70)", "uv__write (uvloop/loop.so)"], "requests"),
        (["push (server/generation/text.py:3)", "step (server/text/text.py:4)"], "decoding"),
        (["sender (fancy/write.py:1)"], "loop"),
    ],
)
def test_the_innermost_frame_of_ours_says_what_a_sample_is_of(inner: list[str], part: str) -> None:
    assert part_of([*LOOP, *inner]) == part


def test_samples_are_added_up() -> None:
    stacks = ";".join([*LOOP, "take (engine/client/streams.py:9)"]) + " 7\n"
    counts = divided(stacks + ";".join(LOOP) + " 3\n" + stacks)
    assert {part: count for part, count in counts.items() if count} == {
        "engine message": 14,
        "loop": 3,
    }


@pytest.mark.parametrize("streams", [1, 5])
def test_the_bare_program_writes_an_event_a_step_to_each_stream(streams: int) -> None:
    bare, reading = bare_streams(streams, 40, 0.0)
    assert reading.events == 40 * streams
    assert bare.events_per_s > 0
