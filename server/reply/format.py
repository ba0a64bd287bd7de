"""Format: the shape of one kind of reply. A dialect is a subclass.

It says which choices an event has and what is in them. When an event is made, and what of it is
looked up instead of encoded, is for `renderer.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from srm.server.generation.detokenize import ChoicePart
from srm.server.generation.generation import Generation
from srm.server.http.responses import DONE, frame, frame_error
from srm.server.reply.prompt import ShownPrompt
from srm.server.reply.scores import ScoreWriter, scores_of
from srm.server.reply.template import SCORES, TEXT
from srm.server.schema.completion_response import Samples, Usage, VersionSpan
from srm.server.text.text import Text

_Unasked = TypeVar("_Unasked")
UsageField = Usage | UnsetType | None
"""UNSET (absent), null, or the usage."""


class Format(ABC):
    """Writes the replies to one request as structs."""

    scores_kind: ClassVar[type[ScoreWriter]]
    """How its choices say scores."""
    may_share_events: ClassVar[bool] = False
    """Whether an event can have several choices."""
    is_one_event: ClassVar[bool] = False
    """Whether a choice's first text, all the others and its end are events of the same shape."""
    begin: bytes = b"data: "
    """What stands before the JSON of an event that only adds text to a choice."""
    has_numbers: ClassVar[bool] = False
    """Whether NUMBER is in its events."""
    last_event: ClassVar[bytes] = DONE
    """What a stream ends with."""
    frame = staticmethod(frame)
    frame_error = staticmethod(frame_error)
    """Make events of JSON documents, and one of an error that ends a stream."""

    def __init__(self, generation: Generation, text: Text, model_name: str) -> None:
        self.generation = generation
        self.request = generation.request
        self.text = text
        self.model_name = model_name
        as_ids = self.request.return_tokens_as_token_ids
        self.scores = scores_of(self.scores_kind, text, as_ids)

    @abstractmethod
    def make_choice(self, part: ChoicePart, is_event: bool) -> msgspec.Struct:
        """Return a finished choice, of a whole reply or in an event of a stream."""

    @abstractmethod
    def events(self, parts: list[ChoicePart]) -> list[list[msgspec.Struct]]:
        """Return the choices of each event for these parts; none if there is nothing to send."""

    def opening(self, _parts: list[ChoicePart]) -> list[msgspec.Struct]:
        """Return choices that announce a completion, before any of its text."""
        return []

    @abstractmethod
    def envelope(self, fields: dict[str, Any], is_event: bool) -> msgspec.Struct:
        """Return the reply or event with these fields."""

    def first_fields(self) -> dict[str, Any]:
        """Return fields of a whole reply, and of a stream's first event."""
        return {}

    def numbers(self, _text: bytes, _scores: bytes) -> tuple[int, ...]:
        """Return what goes into NUMBER of an event that is sent with this text and scores, as JSON,
        without a call of `events`."""
        return ()

    def fields(
        self,
        choices: list[Raw],
        usage: UsageField,
        samples: list[Samples] | UnsetType,
        version: int | None,
        fingerprint: str | None,
    ) -> dict[str, Any]:
        """Return the fields around the choices of a reply or event."""
        return {
            "id": self.generation.id,
            "created": self.generation.created_unix,
            "model": self.model_name,
            "choices": choices,
            "usage": usage,
            "system_fingerprint": fingerprint,
            "weights_version": version,
            "samples": samples,
        }

    @cached_property
    def prompts(self) -> list[ShownPrompt]:
        """Return each prompt as replies show it."""
        prompts = self.generation.prompts
        return [ShownPrompt(prompt, self.request, self.scores) for prompt in prompts]

    def logprobs(self, part: ChoicePart, before: list[Any] | None = None) -> Any:
        """Return the JSON of a choice's scores, after the entries `before` them, if they are asked
        for. It stands where the reply's struct, which tells who decodes it, has an object."""
        if self.request.logprobs is None:
            return None
        if part.text is TEXT:
            return SCORES
        return self.scores.render(part, self.request.logprobs, part.text_offset, before or ())

    def weight_versions(self, part: ChoicePart) -> list[VersionSpan] | UnsetType:
        """Return which weights made which of these tokens, if that is asked."""
        return part.versions if self.request.return_weight_versions else UNSET

    def token_ids(self, part: ChoicePart, unasked: _Unasked) -> list[int] | _Unasked:
        """Return the token ids of a choice, or `unasked` if they are not asked for."""
        if not self.request.return_token_ids:
            return unasked
        return memoryview(part.token_ids).cast("i").tolist()
