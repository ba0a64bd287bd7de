"""Which completions a watch says have stopped: once each, and not those that the engine ended."""

from __future__ import annotations

import numpy as np

from engine.client.streams import Delivery
from engine.messages import PROMPT, REASONS, FinishReason, Output
from engine.steps.token_deltas import TokenDeltas
from server.generation.stop_strings import StopStringWatch
from server.text.byte_table import ByteTable
from server.text.sample import StopStrings

WORDS = ["x", "a", "b", "ab", "xa"]
N = 2


def watch() -> StopStringWatch:
    return StopStringWatch(ByteTable([word.encode() for word in WORDS]), StopStrings(["ab"]), 2 * N)


def tokens(*words: str) -> bytes:
    return np.array([WORDS.index(word) for word in words], "<i4").tobytes()


def columns(*rows: tuple[int, str, FinishReason | None]) -> Delivery:
    """A token of each of these completions."""
    indices, words, reasons = zip(*rows, strict=True) if rows else ((), (), ())
    return Delivery(
        [],
        TokenDeltas(
            np.array(indices, np.int64),
            np.arange(len(rows) + 1),
            np.array([WORDS.index(word) for word in words], np.int32),
            np.empty(0, np.float32),
            np.array([REASONS.index(reason) for reason in reasons], np.uint8),
        ),
    )


def outputs(*some: tuple[int, Output]) -> Delivery:
    return Delivery(list(some), columns().news)


def test_a_stop_string_is_found_across_deliveries() -> None:
    watched = watch()
    assert watched.stopped(columns((0, "a", None), (1, "xa", None), (3, "b", None)), N) == []
    assert watched.stopped(columns((0, "x", None), (1, "b", None), (3, "b", None)), N) == [1]
    assert watched.stopped(columns((0, "b", None), (3, "ab", None)), N) == [3]
    assert watched.stopped(columns((1, "b", None)), N) == [], "what was found begins nothing"


def test_what_the_engine_ended_is_not_named() -> None:
    assert watch().stopped(columns((0, "ab", "length"), (2, "ab", None)), N) == [2]
    ended = Output("r", 1, tokens("ab"), finish_reason="stop")
    assert watch().stopped(outputs((1, ended), (1, Output("r", 0, tokens("ab")))), N) == [2]
    late = (1, Output("r", 1, finish_reason="length"))
    assert watch().stopped(outputs((1, Output("r", 1, tokens("ab"))), late), N) == []


def test_a_completion_is_named_once_a_delivery_and_a_prompt_never() -> None:
    twice = [(0, Output("r", 1, tokens("xa", "b"))), (0, Output("r", 1, tokens("ab")))]
    assert watch().stopped(outputs(*twice), N) == [1]
    apart = [(0, Output("r", 1, tokens("a"))), (0, Output("r", 1, tokens("b")))]
    assert watch().stopped(outputs(*apart), N) == [1]
    assert watch().stopped(outputs((0, Output("r", PROMPT, tokens("ab")))), N) == []
