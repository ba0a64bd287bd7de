"""Whatever the steps and whenever somebody reads, what is read adds up to the whole."""

from __future__ import annotations

import json
import random
from array import array
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client.streams import Stream, Streams
from engine.messages import (
    REASONS,
    Abort,
    Columns,
    FinishReason,
    Output,
    Outputs,
    Request,
    SamplingParams,
    StopSamples,
    ToEngine,
)
from engine.steps.token_deltas import CompletionTokens, TokenDeltas, merge
from server.generation.rendering import Choices, Pieces, Template
from server.generation.stop_strings import StopStringWatch
from server.schema.completion_response import Choice
from server.text.sample import Sample, StopStrings
from server.text.text import Text
from tests.serving import TEXT_MODEL

N = 3
STOPS = ["ab", "bca", "é", "cc"]
STOP_TOKEN = 7


@pytest.fixture(scope="module")
def text(text_model: Path) -> Text:
    return Text(text_model)


def encode_choice(
    index: int, text: str, finish_reason: str | None, stop_reason: str | int | None
) -> bytes:
    choice = Choice(index=index, text=text, finish_reason=finish_reason, stop_reason=stop_reason)
    return msgspec.json.encode(choice)


class FakeEngine:
    """Completions that are known beforehand, a token of some of them in every step."""

    def __init__(self, completions: list[list[int]], reasons: list[FinishReason]) -> None:
        self.streams = Streams(self._receive)
        self.sent: list[ToEngine] = []
        self._tokens = completions
        self._reasons = reasons
        self._count = [0] * len(completions)

    def _receive(self, message: ToEngine) -> None:
        self.sent.append(message)
        if isinstance(message, StopSamples):
            place = int(message.id)
            for index in memoryview(message.indices).cast("i").tolist():
                self._tokens[place * N + index] = []

    def open(self) -> Stream:
        params = SamplingParams(n=N, logprobs=0)
        places = range(len(self._tokens) // N)
        return self.streams.open([Request(str(i), b"", params, emit="columns") for i in places])

    def step(self, rng: random.Random) -> None:
        rows = []
        bases = [message.stream for message in self.sent if isinstance(message, Request)]
        for i, tokens in enumerate(self._tokens):
            at = self._count[i]
            if at < len(tokens) and rng.random() < 0.8:
                self._count[i] += 1
                reason = self._reasons[i] if at + 1 == len(tokens) else None
                rows.append((bases[i // N] + i % N, tokens[at], REASONS.index(reason)))
        rng.shuffle(rows)
        streams, ids, reasons = zip(*rows, strict=True) if rows else ((), (), ())
        columns = Columns(
            streams=np.array(streams, "<i8").tobytes(),
            token_ids=np.array(ids, "<i4").tobytes(),
            reasons=bytes(reasons),
            logprobs=(-np.array(ids, "<f4")).tobytes(),
        )
        self.streams.receive(Outputs([], columns))


completions = st.lists(
    st.lists(st.integers(2, TEXT_MODEL.vocab_size - 1), min_size=1, max_size=40),
    min_size=2 * N,
    max_size=2 * N,
)
ends = st.lists(st.sampled_from(["stop", "length"]), min_size=2 * N, max_size=2 * N)


@settings(max_examples=60, deadline=None)
@given(completions, ends, st.randoms(use_true_random=False), st.booleans())
def test_events_add_up_to_the_text(
    text: Text,
    completions: list[list[int]],
    ends: list[FinishReason],
    rng: random.Random,
    is_single: bool,
) -> None:
    """`is_single`: completions that end in a token that stops them."""
    if is_single:
        completions = [[*tokens, STOP_TOKEN] for tokens in completions]
    engine = FakeEngine([list(tokens) for tokens in completions], ends)
    stream = engine.open()
    choices = Choices(Pieces(text), Template(encode_choice), 2 * N, (STOP_TOKEN,))
    said: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    read: defaultdict[int, list[int]] = defaultdict(list)
    while stream.unfinished:
        engine.step(rng)
        if rng.random() < 0.3:
            news = stream.take().news
            for entry, index in enumerate(news.indices.tolist()):
                ids = memoryview(news.tokens_of(entry)).cast("i").tolist()
                logprobs = memoryview(dict(news.entries())[index].logprobs).cast("f").tolist()
                assert logprobs == [-float(token) for token in ids]
                read[index] += ids
            parts = choices.render(news, is_joined=rng.random() < 0.5)
            for choice in json.loads(b"[" + b",".join(parts) + b"]"):
                said[choice["index"]].append(choice)
    stream.close()
    assert engine.streams.table.num_pages == 0
    assert not any(isinstance(message, Abort) for message in engine.sent)
    for index, tokens in enumerate(completions):
        is_stop = ends[index] == "stop"
        assert read[index] == tokens
        spoken = array("i", tokens[: len(tokens) - is_stop]).tobytes()
        whole = "".join(choice["text"] for choice in said[index])
        assert whole == text.decode(spoken).decode(errors="replace")
        *before, last = said[index]
        assert all(choice["finish_reason"] is None and choice["text"] for choice in before)
        stop_reason = STOP_TOKEN if is_stop and tokens[-1] == STOP_TOKEN else None
        assert (last["finish_reason"], last["stop_reason"]) == (ends[index], stop_reason)
        assert set(last) == set(json.loads(encode_choice(0, "", None, None)))


def fed(sample: Sample, entry: CompletionTokens) -> tuple[str, int]:
    """Text and tokens that a completion's news are."""
    delta = sample.feed(entry)
    assert delta.logprobs == (-np.frombuffer(delta.token_ids, "<i4").astype("<f4")).tobytes()
    return delta.text, delta.num_tokens


@settings(max_examples=60, deadline=None)
@given(st.data(), ends, st.randoms(use_true_random=False))
def test_stop_strings_are_found_as_if_the_text_were_whole(
    text: Text, data: st.DataObject, ends: list[FinishReason], rng: random.Random
) -> None:
    table = {text.decode(token.to_bytes(4, "little")): token for token in range(300)}
    letters = [table[bytes([byte])] for byte in "abcé".encode()] + [table[b"the"]]
    tokens = st.lists(st.sampled_from(letters), min_size=1, max_size=20)
    completions = data.draw(st.lists(tokens, min_size=2 * N, max_size=2 * N))
    stops = StopStrings(STOPS)
    engine = FakeEngine([list(one) for one in completions], ends)
    stream, watch = engine.open(), StopStringWatch(text.table(), stops, 2 * N)
    samples = [Sample(i, text, stops, ()) for i in range(2 * N)]
    waiting: list[TokenDeltas] = []
    said: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
    while stream.unfinished or waiting:
        engine.step(rng)
        delivery = stream.take()
        stopped = watch.stopped(delivery.news)
        if stopped:
            stream.stop(np.array(stopped))
        waiting.append(delivery.news)
        if rng.random() < 0.3:
            news, waiting = merge(waiting), []
            for index, entry in news.entries():
                said[index].append(fed(samples[index], entry))
    stream.close()
    for index, one in enumerate(completions):
        whole = Sample(0, text, stops, ()).feed(
            Output("", 0, array("i", one).tobytes(), finish_reason=ends[index])
        )
        assert "".join(part for part, _ in said[index]) == whole.text
        assert sum(count for _, count in said[index]) == whole.num_tokens
        assert samples[index].finished


LENGTH: FinishReason = "length"
LENGTHS = [LENGTH] * 2 * N


def test_leaving_early_aborts_what_still_runs() -> None:
    engine = FakeEngine([[5]] * N + [[5, 6]] * N, LENGTHS)
    stream = engine.open()
    never_twice = random.Random(0)
    never_twice.random = lambda: 0.0  # type: ignore[method-assign]  # everybody gets a token
    engine.step(never_twice)
    stream.close()
    assert [message.id for message in engine.sent if isinstance(message, Abort)] == ["1"]


def test_samples_are_stopped_request_by_request() -> None:
    engine = FakeEngine([[5] * 9] * 2 * N, LENGTHS)
    stream = engine.open()
    stream.stop(np.array([1, 2, 3]))
    stops = [message for message in engine.sent if isinstance(message, StopSamples)]
    assert [(m.id, memoryview(m.indices).cast("i").tolist()) for m in stops] == [
        ("0", [1, 2]),
        ("1", [0]),
    ]
    assert stream.unfinished == 3
    stream.stop(np.array([0, 4, 5]))
    stream.close()
    assert not any(isinstance(message, Abort) for message in engine.sent)
