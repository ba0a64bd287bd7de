"""Renderer: the reply to one request as bytes, whole or as events of a stream.

Most tokens of a stream cost no encoding: their text, and what is around it, was encoded once
(`format.py`), and `stream_writer.py` joins these bytes. Choices share an event, except in
requests of at most MOST_ALONE choices, since many clients read only the first choice of an event.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, Raw, UnsetType

from srm.engine.client.client import EngineClient
from srm.engine.steps.tokens import Tokens
from srm.server.generation.detokenize import ChoicePart, join
from srm.server.generation.generation import AT_ONCE
from srm.server.reply.format import (
    CHOICES,
    COMPLETION_TOKENS,
    NO_TEMPLATE,
    ChoiceTemplate,
    EventTemplate,
    Format,
    Template,
    UsageField,
    encode_json,
    escape,
)
from srm.server.schema.completion_response import Samples, Usage
from srm.server.text.text import Text

MOST_ALONE = 16
"""Most choices of a request for which each has events of its own."""


class Renderer:
    """Renders what comes of a generation, each part once and in order."""

    def __init__(self, form: Format, client: EngineClient, pieces: Pieces) -> None:
        request, generation = form.request, form.generation
        self.form = form
        self.generation = generation
        options = request.stream_options
        interval = request.stream_interval or 1
        self.is_continuous = bool(
            options and options.include_usage and options.continuous_usage_stats
        )
        """Whether each event says the usage so far."""
        self.numbers = form.numbers if form.has_numbers else self._counts
        """Makes the numbers in the holes of an event that is sent with this text and scores."""
        self._client = client
        self._pieces = pieces
        self._usage: UsageField = None if options and options.include_usage else UNSET
        self._is_first = True  # no event was made
        self._num_shown = 0  # tokens, where usage says them
        self._frames: dict[UsageField, Template | None] = {}
        self._version: int | None = None  # of the weights in the frames
        self._is_few = generation.num_choices <= MOST_ALONE or not form.may_share_events
        self._pacing = Pacing(interval) if interval > 1 else None
        is_text = request.skip_special_tokens and not form.wants_tokens
        # All between a choice's first tokens and its last is text, sent as it comes, and scores.
        self._is_text = is_text and not request.return_packed and interval == 1

    @cached_property
    def _choice_template(self) -> ChoiceTemplate | None:
        """The bytes around a choice's text; None if each choice is encoded."""
        try:
            return ChoiceTemplate(self.form)
        except NO_TEMPLATE:
            return None

    @cached_property
    def _joined(self) -> ChoiceTemplate | None:
        """The same where events of many choices are joined of tokens."""
        request = self.form.request
        asks_for_scores = request.logprobs is not None or request.prompt_logprobs is not None
        is_plain = not (asks_for_scores or request.echo or request.stops)
        may_join = self._is_text and is_plain and self.form.is_one_event and not self._is_few
        return self._choice_template if may_join else None

    @property
    def at_once(self) -> int:
        """Most choices that are rendered before other tasks get their turn."""
        is_joined = not self.form.request.stream_whole and self._joined is not None
        return self.generation.num_choices if is_joined else AT_ONCE

    @property
    def may_be_written(self) -> bool:
        """Whether its events may be written as their tokens come, by `StreamWriter`."""
        request = self.form.request
        is_stream = request.stream and not request.stream_whole
        is_stream = is_stream and not request.return_weight_versions  # read from the table alone
        return is_stream and self._is_few and self.generation.asks_for_all

    def choice(self, part: ChoicePart, is_event: bool = False) -> Raw:
        """Return a finished choice."""
        return Raw(encode_json(self.form.make_choice(part, is_event)))

    def reply(self, choices: list[Raw]) -> bytes:
        """Return the whole reply."""
        fields = self._fields(choices, self._usage_now(), self.generation.samples)
        first = self.generation.first_version
        if first and first != fields["weights_version"]:
            fields["first_weights_version"] = first
        return encode_json(self.form.envelope(fields | self.form.first_fields(), is_event=False))

    def events(self, tokens: Tokens) -> bytes:
        """Return the events for new tokens, as they are sent; maybe none."""
        if self._joined is not None:
            return self._join_events(tokens, self._joined)
        parts = self.generation.detokenizer.decode(tokens)
        if self._pacing is not None:
            parts = self._pacing.release(parts)
        if not parts:
            return b""
        events = []
        if opening := self.form.opening(parts):
            events += self._encode([*map(encode_json, opening)])
        if self.is_continuous:
            self.update_counts()
        for choices in self.form.events(parts):
            events += self._encode([*map(encode_json, choices)])
        return self.form.frame(events)

    def whole_events(self, parts: list[ChoicePart]) -> bytes:
        """Return the events for whole choices; maybe none."""
        if not parts:
            return b""
        if self.is_continuous:
            self.update_counts()
        return self.form.frame(self._encode([self.choice(part, is_event=True) for part in parts]))

    def last_events(self) -> bytes:
        """Return the events behind those of all choices; maybe none."""
        events, samples = [], self.generation.samples
        if samples is not UNSET:
            events += self._encode([], UNSET, samples)
        if self._usage is None:
            events += self._encode([], self._usage_now())
        return self.form.frame(events)

    def template(self, index: int) -> EventTemplate | None:
        """Return what an event of a choice has around a token's text and scores; None if it may
        have to say more now, or if the format has these in another order."""
        if not self._is_text or index not in self.generation.detokenizer.streams:
            return None
        if self.is_continuous and len(self.generation.prompts) > 1:
            return None  # how much of a prompt was cached is not known before it begins
        if self.is_continuous:
            usage = self.generation.usage_of(COMPLETION_TOKENS)
            around = self._frame(usage, COMPLETION_TOKENS, usage.total_tokens)
        else:
            around = self._frame(self._usage)
        choice = self._choice_template
        return None if choice is None or around is None else choice.in_event(index, around)

    def update_counts(self) -> tuple[int, int]:
        """Note the tokens so far, for usage that each event says; return those of completions and
        all."""
        self._num_shown = self.generation.completion_tokens
        return self._num_shown, self._num_shown + self.generation.num_prompt_tokens

    def _counts(self, _text: bytes, _scores: bytes) -> tuple[int, ...]:
        return self.update_counts()

    def _join_events(self, tokens: Tokens, template: ChoiceTemplate) -> bytes:
        """Return the event for new tokens of many choices."""
        # Part by part: what is made on the way takes many times the memory of the bytes.
        joined = (self._join_choices(some, template) for some in tokens.slices(AT_ONCE))
        choices = b",".join(filter(None, joined))
        if self.is_continuous:
            self.update_counts()
        return self.form.frame(self._encode([choices])) if choices else b""

    def _join_choices(self, tokens: Tokens, template: ChoiceTemplate) -> bytes:
        """Return the choices with new tokens, with commas. In one pass those that have only whole
        characters and go on; one by one the others."""
        detokenizer = self.generation.detokenizer
        is_odd = (tokens.reasons != 0) | detokenizer.is_pending[tokens.owners]
        is_whole = self._pieces.is_whole[tokens.token_ids]
        if not is_whole.all():
            num_parts = np.zeros(len(is_whole) + 1, np.int64)
            np.cumsum(~is_whole, out=num_parts[1:])
            is_odd |= num_parts[tokens.offsets[1:]] > num_parts[tokens.offsets[:-1]]
        heads, pieces = template.heads(self.generation.num_choices), self._pieces.json
        if not is_odd.any():
            detokenizer.num_tokens += len(tokens.token_ids)
            return template.join(heads, tokens, pieces)
        plain = tokens.select(~is_odd)
        detokenizer.num_tokens += len(plain.token_ids)
        joined = [template.join(heads, plain, pieces)]
        for part in detokenizer.decode(tokens.select(is_odd)):
            if part.text or part.finish_reason:
                end = template.end(part.finish_reason, part.stop_reason)
                if end is None:
                    for choices in self.form.events([part]):
                        joined += map(encode_json, choices)
                else:
                    joined.append(b"%b%b%b" % (heads[part.index][1:], escape(part.text), end))
        return b",".join(filter(None, joined))

    def _encode(
        self,
        choices: Sequence[bytes],
        usage: UsageField | EllipsisType = ...,
        samples: list[Samples] | UnsetType = UNSET,
    ) -> list[bytes]:
        """Return the events of these choices, one each or one for all; or one without any. Each
        says the usage that all do, unless another one is given."""
        if usage is ...:
            usage = self.generation.usage_of(self._num_shown) if self.is_continuous else self._usage
        events = []
        for own in zip(choices) if self._is_few and choices else (choices,):
            first, self._is_first = self.form.first_fields() if self._is_first else {}, False
            is_alike = not (first or isinstance(usage, Usage)) and samples is UNSET
            if not is_alike or (around := self._frame(usage)) is None:
                fields = self._fields([*map(Raw, own)], usage, samples)
                events.append(encode_json(self.form.envelope(fields | first, is_event=True)))
            else:
                begin, end = around.pieces
                events.append(b"%b%b%b" % (begin, b",".join(own), end))
        return events

    def _frame(self, usage: UsageField, *counts: int) -> Template | None:
        """Return the template of an event around its choices, with holes for these counts of its
        usage; None if it has them in another form."""
        if self.generation.weights_version != self._version:  # else frames stay the same
            self._frames.clear()
            self._version = self.generation.weights_version
        if not counts and usage in self._frames:
            return self._frames[usage]
        fields = self._fields([CHOICES], usage, UNSET)
        frame = None
        with suppress(*NO_TEMPLATE):
            example = encode_json(self.form.envelope(fields, is_event=True))
            frame = Template(example, CHOICES, *counts)
        if not counts:
            self._frames[usage] = frame
        return frame

    def _usage_now(self) -> Usage:
        return self.generation.usage_of(self.generation.completion_tokens)

    def _fields(
        self, choices: list[Raw], usage: UsageField, samples: list[Samples] | UnsetType
    ) -> dict[str, Any]:
        """Return the fields around the choices of a reply or event."""
        version = self.generation.weights_version
        if version is None and self._client.status is not None:  # nothing was made
            version = self._client.status.weights_version
        fingerprint = None if version is None else self._client.fingerprints.get(version)
        return {
            "id": self.generation.id,
            "created": self.generation.created_unix,
            "model": self.generation.model_name,
            "choices": choices,
            "usage": usage,
            "system_fingerprint": fingerprint,
            "weights_version": version,
            "samples": samples,
        }


class Pieces:
    """The text of every token as JSON."""

    def __init__(self, text: Text) -> None:
        size = text.model.vocab_size
        self.json: npt.NDArray[np.object_] = np.empty(size, np.object_)
        """bytes[vocab_size]; empty where a token is not whole characters."""
        entries = text.table().entries
        self.num_characters = text.table().num_characters
        for token, entry in enumerate(entries):
            try:
                self.json[token] = escape(entry.decode())
            except UnicodeDecodeError:
                self.json[token] = b""
        self.is_whole = self.json != b""
        """bool[vocab_size]: whether each token is whole characters, and at least one."""


class Pacing:
    """`stream_interval`: holds back the parts of a choice until they have enough tokens.

    A choice's first tokens are passed on at once, so that the time to the first token does not
    grow; so are its last, since nothing comes after them.
    """

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._held: dict[int, list[ChoicePart]] = {}
        self._num_held: dict[int, int] = {}  # tokens

    def release(self, parts: list[ChoicePart]) -> list[ChoicePart]:
        """Return what may be sent now, joined with what was held back before it."""
        ready = []
        for part in parts:
            held = self._held.setdefault(part.index, [])
            held.append(part)
            count = self._num_held.get(part.index, 0) + part.num_tokens
            if part.is_first or part.finish_reason or count >= self._min_tokens:
                ready.append(join(self._held.pop(part.index)))
                count = 0
            self._num_held[part.index] = count
        return ready
