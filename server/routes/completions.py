"""POST /v1/completions: from a body to choices.

Parameters that are not honoured are refused in `server.schema`; all that reach this are honoured.
Knows HTTP only as far as a route does, and the engine only as a client.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Raw

from engine.client.client import EngineClient
from engine.errors import InvalidRequest
from server.generation.encoding import Encoder, encode_json
from server.generation.engine_request import RequestOwner
from server.generation.generation import Generation
from server.generation.prompts import encode_prompts
from server.generation.rendering import Choices, Pieces, Template
from server.generation.responder import Responder
from server.http.bodies import parsed
from server.routes.endpoint import Endpoint
from server.routes.models import Models
from server.schema.completion_request import PROMPT_FORMS, CompletionRequest, parse_completion
from server.schema.completion_response import (
    Choice,
    Completion,
    Counted,
    Packed,
    PromptLogprob,
    Samples,
)
from server.schema.openapi import BodySchema, Operation
from server.schema.sampling_fields import NEUTRAL
from server.text import packed
from server.text.logprobs import of_delta
from server.text.sample import Delta
from server.text.score_columns import CompletionScores
from server.text.text import Text

OPERATIONS = (
    Operation("POST", "/v1/completions",
              "Completions of one or many prompts, whole or as a stream.", Completion,
              body=BodySchema(CompletionRequest, {"prompt": PROMPT_FORMS}, NEUTRAL),
              events=Completion, parts=(Choice, PromptLogprob, Packed, Samples, Counted),
              errors=(404, 409, 504)),
)  # fmt: skip


class Completions(Endpoint):
    """Answers completion requests for one model."""

    path = "/v1/completions"
    id_prefix = "cmpl"

    def __init__(
        self,
        client: EngineClient,
        text: Text,
        models: Models,
        responder: Responder,
        pieces: Pieces,
    ) -> None:
        super().__init__(responder)
        self._client = client
        self._text = text
        self._models = models
        self._pieces = pieces
        self._template = Template(_text_choice)

    async def begin(self, body: bytes, id: str, owner: RequestOwner) -> CompletionEncoder:
        generation = await self.start(id, await parsed(parse_completion, body), owner)
        encoder = CompletionEncoder(generation, self._text, self._models.name, self._client)
        encoder.pieces, encoder.template = self._pieces, self._template
        return encoder

    async def start(self, id: str, request: CompletionRequest, owner: RequestOwner) -> Generation:
        """Make a request ready to run. Raises the RequestError to answer with."""
        self._models.check(request.model)
        if owner.durable and request.priority:  # it would go ahead of other batches, or of people
            raise InvalidRequest(
                f"priority = {request.priority}: lines have the priority of their batch, "
                "so it must be left out of them, or 0",
                "priority",
            )
        self._check_fits(request)
        prompts = await encode_prompts(request, self._text)
        return Generation(id, request, prompts, self._text, owner)

    def _check_fits(self, request: CompletionRequest) -> None:
        """Refuse what the engine could not take even when idle: a retry would not help."""
        status = self._client.status
        samples = request.num_samples
        if status is not None and len(request.prompt) * samples > status.max_waiting:
            name = "n" if samples == request.n else "best_of"
            raise InvalidRequest(
                f"{name} = {samples} of {len(request.prompt)} prompts: this server takes at most "
                f"max_waiting = {status.max_waiting} completions at once",
                name,
            )


def _text_choice(
    index: int, text: str, finish_reason: str | None, stop_reason: str | int | None
) -> bytes:
    return encode_json(
        Choice(index=index, text=text, finish_reason=finish_reason, stop_reason=stop_reason)
    )


class CompletionEncoder(Encoder):
    """Encodes a reply as a Completion with its Choices."""

    scores = CompletionScores
    pieces: Pieces
    template: Template

    def whole(self, choice: Delta, is_event: bool = False) -> Raw:  # noqa: ARG002 - are the same
        return Raw(encode_json(self._choice(choice)))

    def news(self, deltas: list[Delta]) -> list[list[Raw]]:
        request = self.request
        wants_tokens = request.return_token_ids or request.return_packed
        wants_scores = not (request.logprobs is None and request.prompt_logprobs is None)
        choices = [
            self.whole(delta)
            for delta in deltas
            if delta.text or delta.finish_reason or wants_tokens or wants_scores
        ]
        return [choices] if choices else []

    def rendering(self) -> Choices:
        stops = self.request.stop_token_ids
        return Choices(self.pieces, self.template, self.generation.num_choices, stops)

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        return self.template.head(index), self.template.end

    def envelope(self, fields: dict[str, Any], is_event: bool) -> bytes:  # noqa: ARG002
        return encode_json(Completion(**fields))

    def _choice(self, delta: Delta) -> Choice:
        request = self.request
        choice = Choice(
            index=delta.index,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            matched=UNSET if delta.matched is None else delta.matched,
            count=UNSET if delta.count is None else delta.count,
        )
        prompt = self.generation.prompt_of(delta.index)
        if request.return_packed:
            choice.packed = packed.of_delta(delta, request.logprobs)
            is_wanted = request.return_token_ids or request.prompt_logprobs is not None
            if delta.is_first and is_wanted:
                choice.packed_prompt = prompt.packed_json
            return choice
        if request.logprobs is not None:
            echoed = prompt.echoed_logprobs if request.echo and delta.is_first else None
            choice.logprobs = of_delta(delta, request.logprobs, self.name, echoed)
        if request.prompt_logprobs is not None and delta.is_first:
            choice.prompt_logprobs = prompt.logprobs_json
        choice.token_ids = self.token_ids(delta)
        if request.return_token_ids and delta.is_first:
            choice.prompt_token_ids = prompt.token_ids_json
        return choice
