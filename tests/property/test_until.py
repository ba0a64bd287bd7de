"""`until`, `return` and `stream_whole`: whatever order samples finish in, the reply is the same."""

from __future__ import annotations

import asyncio
import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from srm.engine import early_stop
from srm.engine.client.client import EngineClient
from srm.engine.client.streams import Streams
from srm.engine.messages import (
    REASONS,
    Abort,
    Output,
    Outputs,
    Request,
    StartSamples,
    StopSamples,
    ToEngine,
)
from srm.engine.steps.tokens import step_tokens
from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.engine_request import RequestOwner
from srm.server.generation.generation import Generation
from srm.server.routes.services import services
from srm.server.schema.completion_request import parse_completion
from srm.server.schema.completion_response import Samples
from srm.server.text.text import Text
from tests.kit.engines.making import IDLE

LENGTH = REASONS.index("length")
MANY = 1_000
"""Turns of others in which nothing comes any more."""
WAVE, AHEAD = 2, 3
"""So few that some wait."""


@dataclass(frozen=True)
class Script:
    """What the engine samples, and when it says so."""

    samples: list[list[str]]
    """The texts of each prompt's samples, a token a character."""
    order: list[tuple[int, int]]
    """(prompt, sample) of each token, as they are sampled once they may be."""
    chunk: int
    """Tokens of each message."""
    pauses: int
    """How often others get their turn between two messages."""
    stops_late: bool
    """What is to be stopped goes on to the end all the same."""


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    n = draw(st.integers(1, 9))
    texts = st.lists(st.text("abc", min_size=1, max_size=4), min_size=n, max_size=n)
    samples = draw(st.lists(texts, min_size=1, max_size=3))
    tokens = [
        (prompt, index)
        for prompt, sample in enumerate(samples)
        for index, text in enumerate(sample)
        for _ in text
    ]
    return Script(
        samples,
        draw(st.permutations(tokens)),
        draw(st.integers(1, 5)),
        draw(st.integers(0, 3)),
        draw(st.booleans()),
    )


class ScriptedEngine(EngineClient):
    """Says what the script does, in the form that each request asks for."""

    def __init__(self, script: Script, text: Text) -> None:
        super().__init__("tcp://127.0.0.1:1")
        self.status = IDLE
        self.streams = Streams(self._read_message)
        self._script = script
        ids = text.encode(list("abc"), False)
        self._ids = {
            item: int.from_bytes(id, "little") for item, id in zip("abc", ids, strict=True)
        }
        self._requests: list[Request] = []
        self._stopped: set[tuple[int, int]] = set()
        self._below: dict[str, int] = {}  # samples before these may start
        self.begun: set[tuple[int, int]] = set()
        self.heard: list[ToEngine] = []
        self._task: asyncio.Task[None] | None = None

    def _read_message(self, message: ToEngine) -> None:
        self.heard.append(message)
        if isinstance(message, Request):
            self._requests.append(message)
            n = len(self._script.samples[0])
            self._below[message.id] = n if message.first_wave is None else message.first_wave
            if len(self._requests) == len(self._script.samples):
                self._task = asyncio.create_task(self._run())
        elif isinstance(message, StartSamples):
            assert message.below > self._below[message.id]
            self._below[message.id] = message.below
        elif isinstance(message, StopSamples) and not self._script.stops_late:
            prompt = [request.id for request in self._requests].index(message.id)
            n = len(self._script.samples[0])
            cut = range(n if message.cut is None else message.cut, n)
            named = np.frombuffer(message.indices, "<i4").tolist()
            self._stopped |= {(prompt, index) for index in (*named, *cut)}

    async def _run(self) -> None:
        counts: Counter[tuple[int, int]] = Counter()
        left, size, idle = list(self._script.order), self._script.chunk, 0
        while left := [token for token in left if token not in self._stopped]:
            for _ in range(self._script.pauses):
                await asyncio.sleep(0)
            below = [self._below[request.id] for request in self._requests]
            ready = [(prompt, index) for prompt, index in left if index < below[prompt]]
            if not ready:
                idle += 1
                for stream in self.streams.by_number.values() if idle > MANY else ():
                    stream.fail(AssertionError("samples are held back for ever"))
                if idle > MANY or not self.streams.by_number:
                    return
                await asyncio.sleep(0)
                continue
            outputs: list[Output] = []
            for token in ready[:size]:
                left.remove(token)
                if token not in self._stopped:
                    self.begun.add(token)
                    counts[token] += 1
                    self._say(*token, counts[token], outputs)
            self.streams.receive(Outputs(outputs))

    def _say(self, prompt: int, index: int, count: int, outputs: list[Output]) -> None:
        request, text = self._requests[prompt], self._script.samples[prompt][index]
        ids = array("i", [self._ids[sample] for sample in text])
        is_last = count == len(text)
        if request.emit == "tokens":
            tokens = step_tokens(
                np.array([request.stream + index]),
                np.array(ids[count - 1 : count]),
                np.array([LENGTH if is_last else 0], np.uint8),
            )
            self.streams.receive(Outputs([], tokens.to_wire()))
        elif request.emit == "delta" or is_last:
            shown = ids[count - 1 : count] if request.emit == "delta" else ids
            reason = REASONS[LENGTH] if is_last else None
            outputs.append(Output(request.id, index, shown.tobytes(), finish_reason=reason))


async def reply_to(
    script: Script, text: Text, fields: dict[str, Any], owner: RequestOwner
) -> tuple[ScriptedEngine, Generation, list[ChoicePart]]:
    """All that the reply has, in the order in which it comes."""
    client = ScriptedEngine(script, text)
    prompts, n = [[5 + i] for i in range(len(script.samples))], len(script.samples[0])
    body = {"prompt": prompts, "n": n, "max_tokens": 4, **fields}
    request = parse_completion(json.dumps(body).encode())
    ids = [array("i", prompt).tobytes() for prompt in prompts]
    generation = Generation("made", request, ids, text, owner)
    choices = []
    async for tokens in generation.run(client):
        choices += await generation.certain(tokens)
    choices += await generation.rest()
    await asyncio.sleep(0)
    if client._task is not None:
        await client._task  # which may still say what nobody asked for
    return client, generation, choices


@pytest.fixture(scope="module", autouse=True)
def few_start_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(early_stop, "FIRST_WAVE", WAVE)
        patch.setattr(early_stop, "AHEAD", AHEAD)
        yield


@pytest.fixture(scope="module")
def text(text_model: Path) -> Text:
    return Text(text_model)


def prefix(texts: list[str], pattern: str, enough: int) -> list[str]:
    """Those that a reply with `until` is of, by its definition."""
    matched = 0
    for end, item in enumerate(texts, 1):
        matched += re.search(pattern, item) is not None
        if matched == enough:
            return texts[:end]
    return texts


senders = st.sampled_from([RequestOwner(), RequestOwner(durable=True)])
patterns = st.sampled_from(["a", "b$", "^c", "ab|ca", "aaaa", "[abc]"])


@given(script=scripts(), pattern=patterns, enough=st.integers(1, 4), owner=senders, data=st.data())
def test_until_is_of_the_first_samples_up_to_the_one_that_is_enough(
    text: Text, script: Script, pattern: str, enough: int, owner: RequestOwner, data: st.DataObject
) -> None:
    n, prompts = len(script.samples[0]), range(len(script.samples))
    stop = data.draw(st.sampled_from([[], ["bc"], ["c"]]))
    streamed = {"stream": True, "stream_whole": True} if data.draw(st.booleans()) else {}
    enough = min(enough, n)
    fields = {"until": {"match": pattern, "count": enough}, "stop": stop, **streamed}
    client, generation, choices = asyncio.run(reply_to(script, text, fields, owner))

    texts = [
        [solution.split(stop[0])[0] if stop else solution for solution in own]
        for own in script.samples
    ]
    expected = [prefix(own, pattern, enough) for own in texts]
    event(f"cut: {any(len(own) < n for own in expected)}")
    for prompt in prompts:
        own = [choice for choice in choices if choice.index // n == prompt]
        assert [choice.text for choice in own] == expected[prompt]
        assert [choice.index % n for choice in own] == list(range(len(expected[prompt])))
        matches = [re.search(pattern, choice.text) is not None for choice in own]
        assert [choice.matched for choice in own] == matches
        assert isinstance(generation.samples, list)
        samples = generation.samples[prompt]
        assert (samples.requested, samples.drawn, samples.matched) == (n, len(own), sum(matches))
        assert samples.reached == (sum(matches) == enough)
        assert sum(samples.finished_by.values()) == len(own)
    usage = generation.usage_of(generation.completion_tokens)
    assert usage.completion_tokens == sum(choice.num_tokens for choice in choices)
    assert (usage.discarded_tokens is msgspec.UNSET) == owner.durable
    total = sum(len(solution) for own in script.samples for solution in own)
    assert 0 <= generation.discarded_tokens <= total - usage.completion_tokens
    assert not any(isinstance(message, Abort) for message in client.heard)  # all has ended
    stops = [message for message in client.heard if isinstance(message, StopSamples)]
    for prompt in prompts:
        cuts = [stop.cut for stop in stops if stop.id == f"made-{prompt}" and stop.cut is not None]
        assert cuts == sorted(set(cuts), reverse=True)
        assert all(cut >= len(expected[prompt]) for cut in cuts)


def spend(samples: list[list[str]], pattern: str, enough: int, budget: int) -> list[int]:
    """How many samples of each prompt a reply with a budget is of, by its definition."""
    drawn = [0] * len(samples)

    def had(prompt: int) -> tuple[bool, float, int]:
        own = samples[prompt][: drawn[prompt]]
        matches = sum(re.search(pattern, item) is not None for item in own)
        return bool(own), sum(map(len, own)) / (matches + 1), matches

    while sum(
        len("".join(own[:end])) for own, end in zip(samples, drawn, strict=True)
    ) < budget or (not all(drawn)):
        left = [
            prompt
            for prompt, own in enumerate(samples)
            if drawn[prompt] < len(own) and had(prompt)[-1] < enough
        ]
        if not left:
            break
        drawn[min(left, key=lambda prompt: had(prompt)[:2])] += 1
    return drawn


@given(script=scripts(), pattern=patterns, enough=st.integers(1, 3), owner=senders, data=st.data())
def test_a_budget_is_spent_in_turns_whatever_ends_first(
    text: Text, script: Script, pattern: str, enough: int, owner: RequestOwner, data: st.DataObject
) -> None:
    n, enough = len(script.samples[0]), min(enough, len(script.samples[0]))
    budget = data.draw(st.integers(1, 60))
    fields = {"until": {"match": pattern, "count": enough, "budget": budget}}
    client, generation, choices = asyncio.run(reply_to(script, text, fields, owner))
    expected = spend(script.samples, pattern, enough, budget)
    event(f"spent: {sum(expected) < n * len(expected)}")
    for prompt, (own, end) in enumerate(zip(script.samples, expected, strict=True)):
        mine = [choice for choice in choices if choice.index // n == prompt]
        assert [choice.text for choice in mine] == own[:end]
        assert isinstance(generation.samples, list)
        assert generation.samples[prompt].drawn == end > 0
    assert not any(isinstance(message, Abort) for message in client.heard)
    assert len(client.begun) <= 2 * sum(expected) + AHEAD, "more is made than is paid"


@given(script=scripts(), by_group=st.booleans(), owner=senders, is_counts=st.booleans())
def test_counts_and_unique_are_those_of_all_samples(
    text: Text, script: Script, by_group: bool, owner: RequestOwner, is_counts: bool
) -> None:
    pattern = "([ab])c" if by_group else "[ab]c"
    fields = {
        "return": "counts" if is_counts else "unique",
        "until": {"match": pattern},
        "count_by": "group" if by_group else "text",
    }
    _, generation, choices = asyncio.run(reply_to(script, text, fields, owner))
    n, samples = len(script.samples[0]), generation.samples
    assert isinstance(samples, list)
    left = list(choices)
    for own, sample in zip(script.samples, samples, strict=True):
        keys = [key_of(solution, pattern, by_group) for solution in own]
        counts = Counter(keys)
        assert (sample.drawn, sample.distinct) == (n, len(counts))
        assert sample.matched == sum(re.search(pattern, solution) is not None for solution in own)
        if is_counts:
            check_counts(sample, own, keys, pattern)
            continue
        firsts = sorted(keys.index(key) for key in counts)
        mine, left = left[: len(firsts)], left[len(firsts) :]
        assert [(choice.index % n, choice.text, choice.count) for choice in mine] == [
            (first, own[first], counts[keys[first]]) for first in firsts
        ]
    assert not left


@given(script=scripts(), owner=senders, enough=st.integers(1, 4), data=st.data())
def test_scores_are_those_of_the_texts_in_whatever_order_samples_end(
    text: Text, script: Script, owner: RequestOwner, enough: int, data: st.DataObject
) -> None:
    weights = {"a": 0.1, "b": 0.2, "c": 0.7}
    rule = {"sum": [{"match": letter, "weight": own} for letter, own in weights.items()]}
    rules = data.draw(st.sampled_from([rule, [rule, {"not": rule}, rule][: len(script.samples)]]))
    count_by = data.draw(st.sampled_from(["text", "score"]))
    n = len(script.samples[0])
    until = data.draw(st.sampled_from([{}, {"until": {"score": 0.8, "count": min(enough, n)}}]))
    packed: dict[str, Any] = {"return_packed": data.draw(st.booleans())}
    counts: dict[str, Any] = {"return": "counts", "count_by": count_by}
    shown = data.draw(st.sampled_from([packed, counts]))
    fields: dict[str, Any] = {"verify": rules, **until, **shown}
    _, generation, choices = asyncio.run(reply_to(script, text, fields, owner))

    assert isinstance(generation.samples, list)
    for prompt, samples in enumerate(generation.samples):
        is_negated = rules is not rule and prompt == 1
        sums = [
            math.fsum(own for letter, own in weights.items() if letter in solution)
            for solution in script.samples[prompt]
        ]
        scores = [1 - total if is_negated else total for total in sums]
        if until:
            right = [place for place, score in enumerate(scores, 1) if score >= 0.8]
            scores = scores[: right[enough - 1] if len(right) >= enough else n]
        assert samples.drawn == len(scores)
        total = math.fsum(score * count for score, count in Counter(scores).items())
        assert samples.mean_score == total / len(scores)  # the same bytes in any order
        if "return" in fields:
            assert isinstance(samples.counts, list)
            by_score: Counter[float] = Counter()
            for entry in samples.counts:
                assert isinstance(entry.score, float)
                by_score[entry.score] += entry.count
            assert by_score == Counter(scores)
        else:
            own = [choice for choice in choices if choice.index // n == prompt]
            own.sort(key=lambda choice: choice.index)
            assert [choice.score for choice in own] == scores


def key_of(text: str, pattern: str, by_group: bool) -> str | None:
    match = re.search(pattern, text)
    return (match and match[1]) if by_group else text


def check_counts(samples: Samples, own: list[str], keys: list[str | None], pattern: str) -> None:
    assert isinstance(samples.counts, list)
    assert {count.text: count.count for count in samples.counts} == Counter(keys)
    assert samples.counts == sorted(samples.counts, key=lambda one: -one.count)
    matched = Counter(key for text, key in zip(own, keys, strict=True) if re.search(pattern, text))
    assert all(count.matched == matched[count.text] for count in samples.counts)


@given(script=scripts(), owner=senders)
def test_a_stream_of_whole_choices_has_each_once_and_whole(
    text: Text, script: Script, owner: RequestOwner
) -> None:
    fields = {"stream": True, "stream_whole": True}
    _, generation, choices = asyncio.run(reply_to(script, text, fields, owner))
    expected = [solution for own in script.samples for solution in own]
    assert {choice.index: choice.text for choice in choices} == dict(enumerate(expected))
    assert len(choices) == len(expected)
    assert all(choice.is_first and choice.finish_reason for choice in choices)
    assert generation.completion_tokens == sum(map(len, expected))
    assert generation.samples is msgspec.UNSET


async def test_a_line_of_a_batch_says_the_same(text: Text) -> None:
    own = ["abc", "b", "cc", "a", "ba", "cab"]
    tokens = [(0, index) for index, solution in enumerate(own) for _ in solution]
    replies = []
    for order in (tokens, tokens[::-1]):
        client = ScriptedEngine(Script([own], order, 1, 1, stops_late=False), text)
        completions = services(client, text, "tiny", None).completions
        until = {"match": "(a)", "count": 2}
        body = {"prompt": [5], "n": 6, "max_tokens": 4, "until": until, "return": "unique"}
        owner = RequestOwner(durable=True, created_unix=1)
        whole = await completions.answer_whole(json.dumps(body).encode(), "made", owner)
        replies.append(whole)
    assert replies[0] == replies[1]
    reply = json.loads(replies[0])
    assert [choice["text"] for choice in reply["choices"]] == own[:4]
    assert reply["samples"][0]["drawn"] == 4
    assert "discarded_tokens" not in reply["usage"]
