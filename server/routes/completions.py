"""POST /v1/completions: from a body to choices.

Parameters that are not honoured are refused in `server.schema`; all that reach this are honoured.
Knows HTTP only as far as a route does, and the engine only as a client.
"""

from __future__ import annotations

import uuid

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Raw
from starlette.responses import Response

from engine.client.client import EngineClient
from engine.errors import InvalidRequest
from server.generation.generation import Generation
from server.generation.prompts import encode_prompts
from server.generation.rendering import Choices, Pieces, Template
from server.generation.request_owner import RequestOwner, of_current_request
from server.generation.responder import Responder, SamplesField, UsageField
from server.generation.weights_version import WeightsVersion, origin
from server.http.bodies import read_body
from server.http.responses import WhileConnected
from server.routes.models import Models
from server.schema.completion_request import PROMPT_FORMS, CompletionRequest, parse_completion
from server.schema.completion_response import (
    Choice,
    Completion,
    Counted,
    Packed,
    PromptLogprob,
    Samples,
    Usage,
)
from server.schema.openapi import Body, Operation
from server.schema.sampling_fields import NEUTRAL
from server.text import packed
from server.text.logprobs import naming, of_delta
from server.text.sample import Delta
from server.text.text import Text

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Completions of one or many prompts, whole or as a stream.",
        body=Body(
            kind=CompletionRequest,
            forms={"prompt": PROMPT_FORMS},
            neutral=NEUTRAL,
        ),
        reply=Completion,
        events=Completion,
        parts=(Choice, PromptLogprob, Packed, Samples, Counted),
        errors=(404, 409, 504),
    ),
)

_encode = msgspec.json.Encoder().encode
_CHOICES = Raw(b'"here go the choices"')


class Completions:
    """Answers completion requests for one model."""

    def __init__(
        self, client: EngineClient, text: Text, models: Models, answers: Responder
    ) -> None:
        self._client = client
        self._answers = answers
        self._text = text
        self._models = models
        self._pieces = Pieces(text)
        self._template = Template(
            lambda index, text, finish_reason, stop_reason: _encode(
                Choice(index=index, text=text, finish_reason=finish_reason, stop_reason=stop_reason)
            )
        )

    async def answer(self, body: bytes) -> Response:
        """The reply to a body. Raises the RequestError to answer with."""
        request, id = parse_completion(body), f"cmpl-{uuid.uuid4().hex}"
        generation = await self.start(id, request, of_current_request())
        return await self._answers.respond(generation, self._shape(generation))

    async def whole(self, body: bytes, id: str, sender: RequestOwner) -> bytes:
        """Return the JSON of the reply to a body without `stream`, for callers without a
        connection. Raises the SRMError to answer with."""
        generation = await self.start(id, parse_completion(body), sender)
        return await self._answers.whole(generation, self._shape(generation))

    async def start(self, id: str, request: CompletionRequest, sender: RequestOwner) -> Generation:
        """Make a request ready to run. Raises the RequestError to answer with."""
        self._models.check(request.model)
        if sender.durable and request.priority:  # it would go ahead of other batches, or of people
            raise InvalidRequest(
                f"priority = {request.priority}: lines have the priority of their batch, "
                "so it must be left out of them, or 0",
                "priority",
            )
        self._check_fits(request)
        prompts = await encode_prompts(request, self._text)
        return Generation(id, request, prompts, self._text, sender)

    def _shape(self, generation: Generation) -> CompletionShape:
        return CompletionShape(
            generation, self._text, self._models.name, self._client, self._pieces, self._template
        )

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


class CompletionShape:
    """A reply as a Completion with its Choices."""

    def __init__(
        self,
        generation: Generation,
        text: Text,
        model_name: str,
        client: EngineClient,
        pieces: Pieces,
        template: Template,
    ) -> None:
        self._pieces = pieces
        self._template = template
        self._frames: dict[UsageField, tuple[bytes, bytes]] = {}
        self._version: int | None = None  # of the weights in the frames
        self._generation = generation
        self._model_name = model_name
        self._client = client
        request = generation.request
        self._name = naming(text, request.return_tokens_as_token_ids)
        self._wants_tokens = (
            request.return_token_ids
            or request.return_packed
            or not (request.logprobs is None and request.prompt_logprobs is None)
        )

    def choice(self, whole: Delta) -> Raw:
        return Raw(_encode(self._choice(whole)))

    def whole_news(self, whole: Delta) -> Raw:
        return self.choice(whole)

    def reply(self, choices: list[Raw], usage: Usage, samples: SamplesField) -> bytes:
        return self._encode(choices, usage, samples, origin(self._client, self._generation))

    def begun(self, _deltas: list[Delta]) -> list[Raw]:
        return []

    def news(self, deltas: list[Delta]) -> list[list[Raw]]:
        choices = [
            self.choice(delta)
            for delta in deltas
            if delta.text or delta.finish_reason or self._wants_tokens
        ]
        return [choices] if choices else []

    def rendering(self) -> Choices:
        generation = self._generation
        stops = generation.request.stop_token_ids
        return Choices(self._pieces, self._template, generation.num_choices, stops)

    def event(self, choices: list[Raw], usage: UsageField, samples: SamplesField = UNSET) -> bytes:
        version = self._generation.weights_version
        if isinstance(usage, Usage) or samples is not UNSET:
            return self._encode_event(choices, usage, samples)
        if version != self._version:
            self._frames.clear()
            self._version = version
        if usage not in self._frames:  # what is around the choices is always the same
            begin, end = self._encode_event([_CHOICES], usage).split(_CHOICES)
            self._frames[usage] = (begin, end)
        begin, end = self._frames[usage]
        return b"%b%b%b" % (begin, b",".join(map(bytes, choices)), end)

    def _encode_event(
        self, choices: list[Raw], usage: UsageField, samples: SamplesField = UNSET
    ) -> bytes:
        made = origin(self._client, self._generation)._replace(first_version=UNSET)
        return self._encode(choices, usage, samples, made)

    def _encode(
        self, choices: list[Raw], usage: UsageField, samples: SamplesField, made: WeightsVersion
    ) -> bytes:
        return _encode(
            Completion(
                id=self._generation.id,
                created=self._generation.created_unix,
                model=self._model_name,
                choices=choices,
                usage=usage,
                system_fingerprint=made.fingerprint,
                weights_version=made.version,
                first_weights_version=made.first_version,
                samples=samples,
            )
        )

    def _choice(self, delta: Delta) -> Choice:
        request = self._generation.request
        choice = Choice(
            index=delta.index,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            matched=UNSET if delta.matched is None else delta.matched,
            count=UNSET if delta.count is None else delta.count,
        )
        prompt = self._generation.prompt_of(delta.index)
        if request.return_packed:
            choice.packed = packed.of_delta(delta, request.logprobs)
            is_wanted = request.return_token_ids or request.prompt_logprobs is not None
            if delta.is_first and is_wanted:
                choice.packed_prompt = prompt.packed_json
            return choice
        if request.logprobs is not None:
            echoed = prompt.echoed_logprobs if request.echo and delta.is_first else None
            choice.logprobs = of_delta(delta, request.logprobs, self._name, echoed)
        if request.prompt_logprobs is not None and delta.is_first:
            choice.prompt_logprobs = prompt.logprobs_json
        if request.return_token_ids:
            choice.token_ids = memoryview(delta.token_ids).cast("i").tolist()
            if delta.is_first:
                choice.prompt_token_ids = prompt.token_ids_json
        return choice


def routes(completions: Completions, max_body_bytes: int) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, max_body_bytes)
        return WhileConnected(lambda: completions.answer(body))

    return router
