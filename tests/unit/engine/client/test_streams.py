"""Streams as their callers count them: completions cut off, closed, refused."""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest

from srm.engine.client.streams import Finder, Stream, Streams
from srm.engine.messages import (
    PROMPT,
    REASONS,
    Abort,
    Done,
    Output,
    Outputs,
    Refusal,
    Request,
    SamplingParams,
    StartSamples,
    StopSamples,
    ToEngine,
)
from srm.engine.steps.batch import I32, I64
from srm.engine.steps.tokens import U8, step_tokens
from srm.errors import EngineUnavailable, InvalidRequest, Overloaded, SRMError, StepFailed
from tests.kit.engines.making import IDLE

LENGTH = REASONS.index("length")
N = 4


def request(name: str, n: int = N, **settings: Any) -> Request:
    return Request(name, b"\5\0\0\0", SamplingParams(n=n), **settings)


def receive(streams: Streams, numbers: list[int], reason: int = 0) -> None:
    """A token of each of these completions."""
    size = len(numbers)
    ids, reasons = np.full(size, 7, np.int32), np.full(size, reason, np.uint8)
    streams.receive(Outputs([], step_tokens(np.array(numbers), ids, reasons).to_wire()))


class Engine:
    """Hears what two requests of N completions send, and answers what a test wants."""

    def __init__(self, emit: str, finder: Finder | None = None) -> None:
        self.heard: list[ToEngine] = []
        self.streams = Streams(self.heard.append)
        requests = [request(name, emit=emit) for name in "ab"]
        self.stream: Stream = self.streams.open(requests, finder=finder)
        self.requests = [value for value in self.heard if isinstance(value, Request)]
        self.heard.clear()

    def say(self, place: int, index: int, num_tokens: int, is_end: bool) -> None:
        request, reason = self.requests[place], LENGTH if is_end else 0
        if request.emit != "tokens":
            ids = array("i", [7] * num_tokens).tobytes()
            output = Output(request.id, index, ids, finish_reason=REASONS[reason])
            self.streams.receive(Outputs([output]))
            return
        for count in range(1, num_tokens + 1):
            receive(self.streams, [request.stream + index], reason * (count == num_tokens))


@pytest.mark.parametrize("emit", ["final", "delta", "tokens"])
def test_what_is_left_is_all_that_is_waited_for(emit: str) -> None:
    engine = Engine(emit)
    stream = engine.stream
    engine.say(1, 0, 2, is_end=True)
    engine.say(1, 3, 2, is_end=True)
    stream.read_new()  # two of eight have ended
    engine.say(1, 2, 3, is_end=True)  # and one more, which nobody takes
    assert stream.unfinished == 2 * N - 2
    assert (stream.cut(1, 2), stream.unfinished) == (3, N + 1)
    assert not engine.heard  # there is nothing to stop: both have ended
    assert (stream.cut(1, 1), stream.unfinished) == (0, N)
    assert engine.heard == [StopSamples("b", b"", cut=1)]
    engine.say(1, 1, 1, is_end=True)  # was on its way
    assert (stream.take_outputs(), stream.unfinished) == ([], N)
    assert [stream.cut(0, end) for end in (4, 3, 3, 1)] == [0] * 4  # nothing is counted twice
    assert stream.unfinished == 1
    assert [value.cut for value in engine.heard if isinstance(value, StopSamples)] == [1, 3, 1]
    assert (stream.cut(0, 0), stream.unfinished) == (0, 0)
    with stream:
        pass
    assert not any(isinstance(message, Abort) for message in engine.heard)


def test_samples_are_stopped_by_request_and_what_still_runs_is_aborted() -> None:
    heard: list[ToEngine] = []
    stream = Streams(heard.append).open([request(name, 3, emit="tokens") for name in "ab"])
    heard.clear()
    stream.stop(np.array([1, 2, 3]))
    assert stream.unfinished == 3
    stream.stop(np.array([0]))
    with stream:
        pass
    stops = [("a", [1, 2]), ("b", [0]), ("a", [0])]
    samples = [StopSamples(name, np.array(indices, "<i4").tobytes()) for name, indices in stops]
    assert heard == [*samples, Abort("b")]


def test_what_was_let_start_stays_so_in_another_engine() -> None:
    heard: tuple[list[Any], list[Any]] = ([], [])
    streams = Streams(heard[0].append, heard[1].append)
    for engine in (0, 1):
        streams.spread.note_status(engine, IDLE)
    requests = [request("a", 20, emit="tokens", first_wave=1), request("b", 20, emit="tokens")]
    with streams.open(requests) as stream:
        sent = {message.id: message for message in (*heard[0], *heard[1])}
        assert [sent[name].first_wave for name in ("a", "a#1", "b", "b#1")] == [1, 0, None, None]
        for own in heard:
            own.clear()
        for place, index in ((0, 1), (0, 2), (0, 6), (0, 5), (1, 6)):
            stream.start_below(place, index)
        first, second = (part.engine for part in stream.parts[0])
        assert heard[first] == [StartSamples("a", 3)]
        assert heard[second] == [StartSamples("a#1", 1), StartSamples("a#1", 3)]
        streams.lose(second, lambda: EngineUnavailable("gone"))
        again = {message.id: message.first_wave for message in heard[first][1:]}
        assert again in ({"a#1~2": 3, "b#1~2": None}, {"a#1~2": 3, "b~2": None})
        stream.start_below(0, 8)
        assert heard[first][-2:] == [StartSamples("a", 4), StartSamples("a#1~2", 4)]


class ThirdToken:
    """Ends completions at their third token."""

    def __init__(self) -> None:
        self.counts = Counter[int]()

    def find(self, indices: I64, token_ids: I32, reasons: U8) -> list[int]:
        rows = zip(indices.tolist(), token_ids.tolist(), reasons.tolist(), strict=True)
        return [place for place, row in enumerate(rows) if self.add(*row)]

    def add(self, index: int, token: int, reason: int) -> bool:
        assert token == 7
        self.counts[index] += 1
        return self.counts[index] == 3


@pytest.mark.parametrize("emit", ["delta", "tokens"])
def test_a_completion_ends_where_the_finder_says(emit: str) -> None:
    engine = Engine(emit, ThirdToken())
    engine.say(0, 1, 2, is_end=False)
    engine.say(1, 2, 5, is_end=True)
    engine.say(0, 3, 3, is_end=True)
    stopped = [StopSamples("b", b"\2\0\0\0")] if emit == "tokens" else []
    assert engine.heard == stopped  # else the engine has ended it already
    for expected in ({3: 3, N + 2: 3}, {1: 1}):
        tokens = engine.stream.read_new().tokens
        ends = {owner: end - begin for owner, begin, end, reason in tokens.rows() if reason}
        assert ends == expected
        assert {REASONS[reason] for reason in tokens.reasons if reason} == {"stop"}
        engine.say(0, 1, 2, is_end=False)
    assert engine.heard == [*stopped, StopSamples("a", b"\1\0\0\0")]
    assert engine.stream.unfinished == 2 * N - 3


class InOrder:
    """Hears tokens, and ends nothing."""

    def __init__(self) -> None:
        self.heard: list[int] = []

    def find(self, indices: I64, token_ids: I32, reasons: U8) -> list[int]:
        self.heard += token_ids[token_ids >= 0].tolist()
        return []

    def add(self, index: int, token: int, reason: int) -> bool:
        self.heard.append(token)
        return False


@pytest.mark.parametrize("between", ["an end without a token", "other weights"])
def test_a_finder_hears_tokens_in_their_order(between: str) -> None:
    """Those that were to be written come before those that are kept from then on."""
    finder = InOrder()
    engine = Engine("tokens", finder)
    streams, first = engine.streams, engine.requests[0].stream
    streams.set_writer(lambda steps: finder.heard.extend(int(step.token_ids[0]) for step in steps))
    streams.open([request("other", emit="tokens")])
    other = engine.heard[-1]
    assert isinstance(other, Request)

    def say(token: int, number: int, version: int) -> None:
        rows = np.array([number]), np.array([token], np.int32), np.zeros(1, np.uint8)
        streams.receive(Outputs([], step_tokens(*rows).to_wire(), weights_version=version))

    say(0, first, 1)
    engine.stream.read_new()
    assert engine.stream.hand_out()
    say(1, first, 1)
    if between == "other weights":
        say(9, other.stream, 2)
        say(2, first, 2)
    else:
        streams.receive(Outputs([Output("b", 0, b"", finish_reason="error")]))
        say(2, first, 1)
    streams.settle()
    assert finder.heard == [0, 1, 2]


def test_the_engine_counts_tokens_of_what_is_aborted() -> None:
    """What has come and was not read counts too, and a lost engine says nothing more."""
    heard: list[ToEngine] = []
    streams = Streams(heard.append)
    stream = streams.open([request(name, 2, emit="final") for name in "ab"])
    streams.receive(
        Outputs([Output("a", 1, np.arange(5, dtype="<i4").tobytes(), finish_reason="stop")])
    )
    heard.clear()
    with stream:
        pass
    assert heard == [Abort("a", is_counted=True), Abort("b", is_counted=True)]
    counted: list[int] = []
    streams.receive(Done("a", {"tokens": 7}))
    stream.when_counted(counted.append)
    streams.receive(Done("somebody else's", {}))
    assert not counted
    streams.lose(0, lambda: EngineUnavailable("gone"))
    streams.receive(Done("b", {"tokens": 9}))
    assert counted == [12] and not streams.uncounted


@pytest.mark.parametrize("emit", ["final", "tokens"])
def test_a_refusal_counts_what_was_sampled(emit: Any) -> None:
    """Before the block is left and behind that; what is emitted as it comes has come."""
    streams = Streams(list[ToEngine]().append)
    stream = streams.open([request(name, 2, emit=emit) for name in "ab"])
    counted: list[int] = []
    with stream:
        streams.receive(Refusal("a", "request_timeout", "late", tokens=5))
    streams.receive(Refusal("b", "request_timeout", "late", tokens=3))
    stream.when_counted(counted.append)
    for name in "ab":
        streams.receive(Done(name, {"tokens": 0}))
    assert counted == [8 if emit == "final" else 0] and not streams.uncounted


def test_samples_that_were_stopped_by_name_are_not_counted_again() -> None:
    engine = Engine("tokens")
    engine.say(0, 3, 1, is_end=False)
    engine.stream.read_new()
    engine.stream.stop(np.array([3]))
    assert engine.stream.unfinished == 2 * N - 1
    engine.stream.cut(0, 2)
    assert engine.stream.unfinished == 2 * N - 2


def test_only_those_that_have_ended_are_taken_where_no_others_are_wanted() -> None:
    engine = Engine("tokens")
    engine.say(0, 1, 2, is_end=False)
    engine.say(1, 1, 3, is_end=True)
    for expected in ([N + 1], [], [1]):
        tokens = engine.stream.read_new(only_ended=True).tokens
        assert (tokens.owners.tolist(), len(tokens.token_ids)) == (expected, 3 * len(expected))
        if not expected:
            engine.say(0, 1, 1, is_end=True)
    engine.say(0, 2, 2, is_end=False)
    assert engine.stream.cut(0, 2) == 2  # that have come in vain


@pytest.mark.parametrize("only_ended", [False, True])
def test_what_is_ended_without_a_row_comes_with_its_tokens_so_far(only_ended: bool) -> None:
    engine = Engine("tokens")
    engine.say(0, 1, 2, is_end=False)
    engine.say(1, 2, 3, is_end=True)
    ends = [Output(name, index, finish_reason="abort") for name in "ab" for index in range(N)]
    engine.streams.receive(Outputs(ends))
    assert engine.stream.cut(0, 3) == 0
    assert engine.stream.unfinished == 2 * N - 1
    tokens = engine.stream.read_new(only_ended).tokens
    counts = {owner: end - begin for owner, begin, end, _ in tokens.rows()}
    assert counts == {0: 0, 1: 2, 2: 0, 4: 0, 5: 0, 6: 3, 7: 0}
    reasons = [REASONS[reason] for reason in tokens.reasons]
    assert reasons == ["length" if owner == N + 2 else "abort" for owner in counts]
    assert engine.stream.unfinished == 0


async def test_who_waits_for_what_is_cut_is_woken() -> None:
    engine = Engine("final")
    waiting = asyncio.create_task(engine.stream.wait())
    await asyncio.sleep(0)
    engine.stream.cut(0, 0)
    engine.stream.cut(1, 0)
    await asyncio.wait_for(waiting, 120)
    assert engine.stream.unfinished == 0


@pytest.mark.parametrize(
    ("error", "durable", "aborts"),
    [
        (InvalidRequest("too long"), True, True),
        (Overloaded("full"), True, True),
        (InvalidRequest("too long"), False, True),
        (EngineUnavailable("drains"), True, False),
        (StepFailed("broke"), True, False),
        (EngineUnavailable("drains"), False, True),
    ],
)
def test_one_of_several_prompts_that_is_refused_has_the_others_aborted(
    error: SRMError, durable: bool, aborts: bool
) -> None:
    heard: list[ToEngine] = []
    streams = Streams(heard.append)
    with streams.open([request(name, durable=durable) for name in "abc"]):
        streams.refuse("b", error)
    aborted = {message.id for message in heard if isinstance(message, Abort)}
    assert aborted - {"b"} == ({"a", "c"} if aborts else set())


def test_more_completions_than_there_are_numbers_for_are_refused() -> None:
    heard: list[ToEngine] = []
    streams = Streams(heard.append)
    with pytest.raises(InvalidRequest, match=r"prompts x n .* 1048576 .* 33554432"):
        streams.open([request("a", 1 << 25)])
    assert not heard
    first, second = (streams.open([request(name)]) for name in "ab")
    streams.receive(Outputs([Output("b", 1, finish_reason="stop")]))
    assert (len(first.take_outputs()), len(second.take_outputs())) == (0, 1)


class TwoEngines:
    """Two engines of weights 1, one of which has a request of one completion."""

    def __init__(self, emit: str) -> None:
        self.heard: tuple[list[Any], list[Any]] = ([], [])
        self.streams = Streams(self.heard[0].append, self.heard[1].append)
        for engine in (0, 1):
            self.streams.spread.note_status(engine, IDLE)
        self.stream = self.streams.open([request("a", 1, emit=emit)])
        self.has_it = 0 if self.heard[0] else 1

    def die(self) -> None:
        self.streams.lose(self.has_it, lambda: EngineUnavailable("it died"))
        self.has_it = 1 - self.has_it

    def say(self, ids: list[int], version: int) -> None:
        """The engine that has it has made these tokens."""
        asked = self.heard[self.has_it][0]
        outputs, rows = [Output(asked.id, 0, array("i", ids).tobytes())], None
        if asked.emit == "tokens":
            numbers, reasons = np.full(len(ids), asked.stream), np.zeros(len(ids), np.uint8)
            outputs, rows = [], step_tokens(numbers, np.array(ids, np.int32), reasons).to_wire()
        self.streams.receive(Outputs(outputs, rows, weights_version=version))


@pytest.mark.parametrize("emit", ["delta", "tokens"])
@pytest.mark.parametrize("caught_up", [0, 2])
async def test_no_sample_is_joined_of_two_weights(emit: str, caught_up: int) -> None:
    """The second engine changes weights before it has repeated the tokens that were delivered."""
    engines = TwoEngines(emit)
    engines.say([10, 11, 12, 13], version=1)
    engines.die()
    if caught_up:
        engines.say([10, 11], version=1)
    engines.say([90, 91, 92], version=2)
    engines.say([93, 94], version=2)
    await engines.stream.wait()
    assert engines.stream.read_new().tokens.token_ids.tolist() == [10, 11, 12, 13]
    with pytest.raises(EngineUnavailable, match="weights changed while"):
        await engines.stream.wait()
    with engines.stream:
        pass
    asked, *others = engines.heard[engines.has_it]
    assert others == [Abort(asked.id)]


@pytest.mark.parametrize("emit", ["delta", "tokens"])
async def test_weights_may_change_once_what_was_lost_has_been_made_again(emit: str) -> None:
    engines = TwoEngines(emit)
    engines.say([10, 11], version=1)
    engines.die()
    for token, version in ((10, 1), (11, 1), (12, 2)):
        engines.say([token], version)
    assert engines.stream.read_new().tokens.token_ids.tolist() == [10, 11, 12]


async def test_an_engine_that_is_late_with_new_weights_ends_nothing() -> None:
    engines = TwoEngines("tokens")
    engines.say([10, 11], version=2)
    for engine in (0, 1):
        engines.streams.spread.note_status(engine, msgspec.structs.replace(IDLE, weights_version=2))
    engines.die()
    engines.streams.receive(Outputs([], weights_version=1))
    for token in (10, 11, 12):
        engines.say([token], version=2)
    assert engines.stream.read_new().tokens.token_ids.tolist() == [10, 11, 12]


async def test_scores_of_a_prompt_that_nobody_waits_for_hold_up_no_change() -> None:
    engines = TwoEngines("delta")
    asked = engines.heard[engines.has_it][0]
    scores = Output(asked.id, PROMPT, array("i", [5]).tobytes())
    engines.streams.receive(Outputs([scores]))
    engines.say([10], version=1)
    engines.die()
    engines.stream.stop(np.array([0]))
    engines.streams.receive(Outputs([], weights_version=2))
    await asyncio.wait_for(engines.stream.wait(), 60)
