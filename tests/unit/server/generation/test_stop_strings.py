"""Which completions a watch says have stopped: once each, and not those that the engine ended."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client.streams import Streams
from engine.messages import (
    Abort,
    FinishReason,
    Output,
    Request,
    SamplingParams,
    StopSamples,
    ToEngine,
)
from engine.steps.token_deltas import of_outputs
from server.generation.stop_strings import StopStringWatch
from server.text.sample import Delta, Sample, StopStrings, join
from server.text.text import Text
from tests.unit.server.generation.test_rendering import NUM_CHOICES, deliveries, randoms, reasons

STOPS = StopStrings(["ab", "bca", "é", "cc"])


def ints(*values: int) -> bytes:
    return array("i", values).tobytes()


@settings(max_examples=60)
@given(st.data(), reasons, randoms)
def test_stop_strings_are_found_as_if_the_text_were_whole(
    text: Text, data: st.DataObject, reasons: list[FinishReason], rng: random.Random
) -> None:
    pieces = text.pieces(ints(*range(300)))
    letters = [pieces.index(bytes([byte])) for byte in "abcé".encode()] + [pieces.index(b"the")]
    tokens = st.lists(st.sampled_from(letters), min_size=1, max_size=20)
    completions = data.draw(st.lists(tokens, min_size=NUM_CHOICES, max_size=NUM_CHOICES))
    watch, stopped = StopStringWatch(text.table(), STOPS, NUM_CHOICES), set[int]()
    samples = [Sample(i, text, STOPS, ()) for i in range(NUM_CHOICES)]
    said: defaultdict[int, list[Delta]] = defaultdict(list)
    for news in deliveries(completions, reasons, rng, stopped):
        found = watch.stopped(news)
        stopped |= set(found)
        for index, entry in news.entries():
            delta = samples[index].feed(entry)
            said[index].append(delta)
            ends_here = delta.finish_reason is not None and entry.finish_reason is None
            assert (index in found) == ends_here
    for index, ids in enumerate(completions):
        output = Output("", 0, ints(*ids), finish_reason=reasons[index])
        assert join(said[index]) == Sample(index, text, STOPS, ()).feed(output)


def test_outputs_become_arrays_in_order_and_joined() -> None:
    top = ints(0, 1, 2, 3)
    one = Output("r", 1, ints(5), logprobs=b"abcd", top_ids=top[:8], top_logprobs=top[:8])
    first = Output("r", 3, ints(6), logprobs=b"1234", top_ids=top[:8], top_logprobs=top[:8])
    second = Output("r", 3, ints(7), logprobs=b"5678", top_ids=top[8:], top_logprobs=top[8:])
    end = Output("r", 3, finish_reason="length")
    assert list(of_outputs([(3, first), (1, one), (3, second), (3, end)]).entries()) == [
        (1, (ints(5), b"abcd", top[:8], top[:8], None)),
        (3, (ints(6, 7), b"12345678", top, top, "length")),
    ]


def test_samples_are_stopped_by_request_and_what_still_runs_is_aborted() -> None:
    heard: list[ToEngine] = []
    params = SamplingParams(n=3)
    requests = [Request(name, b"", params, emit="columns") for name in "ab"]
    stream = Streams(heard.append).open(requests)
    heard.clear()
    stream.stop(np.array([1, 2, 3]))
    assert stream.unfinished == 3
    stream.stop(np.array([0]))
    stream.close()
    stops = [("a", ints(1, 2)), ("b", ints(0)), ("a", ints(0))]
    assert heard == [*(StopSamples(name, indices) for name, indices in stops), Abort("b")]
