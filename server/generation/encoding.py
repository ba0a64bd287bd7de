"""Encodes the replies to one request as JSON, whole or as the events of a stream.

What completions and chats share: what is said around the choices. A route says what a choice is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from engine.client.client import EngineClient
from server.generation.generation import Generation
from server.generation.rendering import Choices
from server.schema.completion_response import Samples, Usage
from server.text.logprobs import naming
from server.text.sample import Delta
from server.text.score_columns import ScoreColumns, score_columns
from server.text.text import Text

UsageField = Usage | UnsetType | None
"""UNSET (absent), null, or the usage."""
SamplesField = list[Samples] | UnsetType
"""The counts of each prompt, or UNSET (absent)."""

encode_json = msgspec.json.Encoder().encode
_CHOICES = Raw(b'"here go the choices"')


class Encoder(ABC):
    """Encodes the replies to one request."""

    scores: type[ScoreColumns]
    """How its choices say scores."""

    def __init__(
        self, generation: Generation, text: Text, model_name: str, client: EngineClient
    ) -> None:
        self.generation = generation
        self.request = generation.request
        self.text = text
        self.name = naming(text, self.request.return_tokens_as_token_ids)
        self._model_name = model_name
        self._client = client
        self._frames: dict[UsageField, tuple[bytes, bytes]] = {}
        self._version: int | None = None  # of the weights in the frames

    @abstractmethod
    def whole(self, choice: Delta, is_event: bool) -> Raw:
        """A finished choice, of a whole reply or in an event of a stream."""

    @abstractmethod
    def news(self, deltas: list[Delta]) -> list[list[Raw]]:
        """The choices of each event for these deltas; none if there is nothing to send."""

    @abstractmethod
    def envelope(self, fields: dict[str, Any], is_event: bool) -> bytes:
        """The reply or event with these fields."""

    def begun(self, _deltas: list[Delta]) -> list[Raw]:
        """Choices that announce a completion, before any of its text."""
        return []

    def rendering(self) -> Choices | None:
        """The renderer of text-only choices straight from arrays, or None."""
        return None

    def score_columns(self) -> ScoreColumns | None:
        """Return the renderer of scores straight from arrays; None if scores are not asked for."""
        if self.request.logprobs is None:
            return None
        return score_columns(self.scores, self.text, self.request.return_tokens_as_token_ids)

    @abstractmethod
    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of a choice that has not ended."""

    def around(self, text: tuple[bytes, bytes], usage: UsageField) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text of an event's only choice."""
        begin, end = self._frame(usage)
        return b"data: " + begin + text[0], text[1] + end + b"\n\n"

    def first_fields(self) -> dict[str, Any]:
        """Fields of a stream's first event alone."""
        return {}

    def reply(self, choices: list[Raw]) -> bytes:
        """The whole reply."""
        fields = self._fields(choices, self.generation.usage, self.generation.samples)
        first = self.generation.first_version
        if first and first != fields["weights_version"]:
            fields["first_weights_version"] = first
        return self.envelope(fields | self.first_fields(), is_event=False)

    def event(
        self, choices: Sequence[Raw], usage: UsageField, samples: SamplesField = UNSET
    ) -> bytes:
        """An event of a stream."""
        first = self.first_fields()
        if first or isinstance(usage, Usage) or samples is not UNSET:
            return self.envelope(self._fields(choices, usage, samples) | first, is_event=True)
        begin, end = self._frame(usage, samples)
        return b"%b%b%b" % (begin, b",".join(map(bytes, choices)), end)

    def _frame(self, usage: UsageField, samples: SamplesField = UNSET) -> tuple[bytes, bytes]:
        """Return the bytes before and after an event's choices, which change only with the
        weights."""
        if self.generation.weights_version != self._version:
            self._frames.clear()
            self._version = self.generation.weights_version
        if isinstance(usage, Usage):
            return self._framed(usage, samples)
        if usage not in self._frames:
            self._frames[usage] = self._framed(usage, samples)
        return self._frames[usage]

    def _framed(self, usage: UsageField, samples: SamplesField) -> tuple[bytes, bytes]:
        example = self.envelope(self._fields([_CHOICES], usage, samples), is_event=True)
        begin, end = example.split(_CHOICES)
        return begin, end

    def token_ids(self, delta: Delta) -> list[int] | UnsetType:
        """The token ids of a choice, if they are asked for."""
        if not self.request.return_token_ids:
            return UNSET
        return memoryview(delta.token_ids).cast("i").tolist()

    def _fields(
        self, choices: Sequence[Raw], usage: UsageField, samples: SamplesField
    ) -> dict[str, Any]:
        version = self.generation.weights_version
        if version is None and self._client.status is not None:  # nothing was made
            version = self._client.status.weights_version
        return {
            "id": self.generation.id,
            "created": self.generation.created_unix,
            "model": self._model_name,
            "choices": choices,
            "usage": usage,
            "system_fingerprint": None if version is None else self._client.fingerprint(version),
            "weights_version": version,
            "samples": samples,
        }
