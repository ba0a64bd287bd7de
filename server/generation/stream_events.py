"""StreamEvents: the events of one request's stream, made of what arrives.

Choices with news share an event, except in requests of at most MOST_ALONE choices. Knows when an
event is made and what is in it; an Encoder encodes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, Raw

from engine.steps.token_deltas import CompletionTokens, TokenDeltas
from server.generation.encoding import Encoder, UsageField
from server.generation.event_writer import Around
from server.generation.generation import MOST_ALONE
from server.http.responses import together
from server.schema.completion_response import Usage
from server.text.sample import Delta, join

_COUNT = 7_777_777_777_777_777
"""Stands for a count of tokens where it is to be formatted."""


class StreamEvents:
    """Makes events of tokens, each delivered once and in order."""

    def __init__(self, encoder: Encoder) -> None:
        generation, request = encoder.generation, encoder.request
        options = request.stream_options
        self._encoder = encoder
        self._generation = generation
        self._is_few = generation.num_choices <= MOST_ALONE
        self._choices = encoder.rendering() if generation.is_plain and not self._is_few else None
        self._pacing = Pacing(request.stream_interval or 1)
        self._is_continuous = bool(options and options.continuous_usage_stats)
        self._usage: UsageField = None if options and options.include_usage else UNSET
        self._told = 0  # tokens, where usage says them
        self._prompt_tokens = generation.usage.prompt_tokens

    def events(self, news: TokenDeltas | list[Delta]) -> list[bytes]:
        """Return the events for new tokens, or for whole choices."""
        if isinstance(news, list):
            return self._of([], [[self._encoder.whole(one, is_event=True) for one in news]])
        if self._choices is not None:
            choices = [*map(Raw, self._choices.render(self._generation.pass_on(news)))]
            return self._of([], [choices] if choices else [])
        return self._of_deltas(self._generation.texts(news))

    def render(self, index: int, new: CompletionTokens) -> bytes:
        """Return the events for what is new of a choice, as they are sent; maybe none."""
        events = self._of_deltas(self._generation.text(index, new))
        return b"data: %b\n\n" % together(events) if events else b""

    def around(self, index: int) -> Around | None:
        """Return what an event has around a token's text and scores, if it says no more now."""
        encoder, sample = self._encoder, self._generation.free_sample(index)
        if sample is None or (self._is_continuous and len(self._generation.prompts) > 1):
            return None  # how much of a prompt was cached is not known before it begins
        usage, counts, before = self._usage, None, b""
        if self._is_continuous:
            usage, counts = self._generation.usage_of(_COUNT), self._counts
        begin, end = encoder.around(encoder.around_text(index), usage)
        if isinstance(usage, Usage):
            end = end.replace(b"%", b"%%")
            for count in (usage.completion_tokens, usage.total_tokens):
                end = end.replace(b"%d" % count, b"%d")
        if (scores := encoder.score_columns()) is not None:
            before, _, end = end.partition(b"null")  # the first one is in the place of scores
        return Around(begin, end, sample, scores, before, counts)

    def _counts(self) -> tuple[int, int]:
        """Return how many tokens there are so far: completion tokens, and all."""
        self._told = self._generation.completion_tokens
        return self._told, self._told + self._prompt_tokens

    def _of_deltas(self, deltas: list[Delta]) -> list[bytes]:
        deltas = self._pacing.take(deltas)
        return self._of(self._encoder.begun(deltas), self._encoder.news(deltas))

    def _of(self, begun: list[Raw], news: list[list[Raw]]) -> list[bytes]:
        """Return the events for choices that begin, then those for the choices of each event."""
        events = self._encoded(begun) if begun else []
        if self._is_continuous:
            self._told = self._generation.completion_tokens
        for choices in news:
            events += self._encoded(choices)
        return events

    def _encoded(self, choices: list[Raw]) -> list[bytes]:
        usage = self._generation.usage_of(self._told) if self._is_continuous else self._usage
        parts: Sequence[Sequence[Raw]] = [*zip(choices)] if self._is_few else [choices]
        return [self._encoder.event(part, usage) for part in parts]


class Pacing:
    """`stream_interval`: holds back the deltas of a choice until they have enough tokens.

    A choice's first tokens are passed on at once, so that the time to the first token does not
    grow; so are its last, since nothing comes after them.
    """

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._held: dict[int, list[Delta]] = {}
        self._num_held: dict[int, int] = {}  # tokens

    def take(self, deltas: list[Delta]) -> list[Delta]:
        """Return what may be sent now, joined with what was held back before it."""
        ready = []
        for delta in deltas:
            held = self._held.setdefault(delta.index, [])
            held.append(delta)
            count = self._num_held.get(delta.index, 0) + delta.num_tokens
            if delta.is_first or delta.finish_reason or count >= self._min_tokens:
                ready.append(join(self._held.pop(delta.index)))
                count = 0
            self._num_held[delta.index] = count
        return ready
