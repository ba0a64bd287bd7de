"""Which completions a watch says have stopped: once each, and not those that the engine ended."""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.messages import REASONS, FinishReason, Output
from engine.steps.token_deltas import TokenDeltas, of_outputs
from server.generation.stop_strings import StopStringWatch
from server.text.byte_table import ByteTable
from server.text.sample import StopStrings

WORDS = ["x", "a", "b", "ab", "xa"]
N = 2


def watch() -> StopStringWatch:
    return StopStringWatch(ByteTable([word.encode() for word in WORDS]), StopStrings(["ab"]), 2 * N)


def tokens(*words: str) -> bytes:
    return np.array([WORDS.index(word) for word in words], "<i4").tobytes()


def news(*rows: tuple[int, str, FinishReason | None]) -> TokenDeltas:
    """A token of each of these completions."""
    indices, words, reasons = zip(*rows, strict=True) if rows else ((), (), ())
    return TokenDeltas(
        np.array(indices, np.int64),
        np.arange(len(rows) + 1),
        np.array([WORDS.index(word) for word in words], np.int32),
        np.empty(0, np.float32),
        np.array([REASONS.index(reason) for reason in reasons], np.uint8),
    )


def test_a_stop_string_is_found_across_deliveries() -> None:
    watched = watch()
    assert watched.stopped(news((0, "a", None), (1, "xa", None), (3, "b", None))) == []
    assert watched.stopped(news((0, "x", None), (1, "b", None), (3, "b", None))) == [1]
    assert watched.stopped(news((0, "b", None), (3, "ab", None))) == [3]
    assert watched.stopped(news((1, "b", None))) == [], "what was found begins nothing"


def test_what_the_engine_ended_is_not_named() -> None:
    assert watch().stopped(news((0, "ab", "length"), (2, "ab", None))) == [2]


def test_outputs_become_arrays_in_order_and_joined() -> None:
    def output(index: int, *words: str, **fields: Any) -> tuple[int, Output]:
        return index, Output("r", index % N, tokens(*words), **fields)

    top = np.arange(4, dtype="<i4").tobytes()
    found = of_outputs(
        [
            output(3, "a", logprobs=b"1234", top_ids=top[:8], top_logprobs=top[:8]),
            output(1, "x", logprobs=b"abcd", top_ids=top[:8], top_logprobs=top[:8]),
            output(3, "b", logprobs=b"5678", top_ids=top[8:], top_logprobs=top[8:]),
            output(3, finish_reason="length"),
        ]
    )
    assert list(found.entries()) == [
        (1, (tokens("x"), b"abcd", top[:8], top[:8], None)),
        (3, (tokens("a", "b"), b"12345678", top, top, "length")),
    ]
    assert watch().stopped(of_outputs([output(1, "a"), output(1, "b"), output(0, "x")])) == [1]
