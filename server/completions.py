"""POST /v1/completions and GET /v1/models: from a body to choices, whole or as a stream.

A parameter that is not honoured is refused in `protocol`; what is left of a request here is true.
Knows HTTP only as far as a route does, and the engine only as a client.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request
from msgspec import UNSET, Raw, UnsetType
from starlette.responses import Response

from engine.client import EngineClient
from engine.errors import BodyTooLarge, InvalidRequest, ModelNotFound
from server import metrics
from server.fields import NEUTRAL
from server.generation import Generation
from server.logprobs import naming, of_delta
from server.openapi import Body, Operation
from server.prompts import encode_prompts
from server.protocol import PROMPT_FORMS, CompletionRequest, parse_completion
from server.replies import Choice, Completion, ModelCard, ModelList, PromptLogprob, Usage
from server.responses import EventStream, WhileConnected
from server.sample import Delta, join
from server.text import Text

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/completions",
        summary="Completions of one or many prompts, whole or as a stream.",
        body=Body(
            kind=CompletionRequest,
            forms={"prompt": PROMPT_FORMS},
            neutral={**NEUTRAL, "best_of": (1,)},
        ),
        reply=Completion,
        events=Completion,
        parts=(Choice, PromptLogprob),
        errors=(404,),
    ),
    Operation(
        method="GET",
        path="/v1/models",
        summary="The model that is served, as a list.",
        reply=ModelList,
    ),
    Operation(
        method="GET",
        path="/v1/models/{name}",
        summary="The model that is served.",
        reply=ModelCard,
        parameters={"name": "The name of the model; it may have slashes."},
        errors=(404,),
    ),
)

_encode = msgspec.json.Encoder().encode
_NOTHING = Raw(b"null")


class Completions:
    """Answers completion requests for one model."""

    def __init__(self, client: EngineClient, text: Text, model_name: str) -> None:
        self._client = client
        self._text = text
        self._model_name = model_name
        self._card = ModelCard(
            id=model_name, created=int(time.time()), max_model_len=text.model.n_ctx
        )

    def model(self, name: str) -> ModelCard:
        """The card of the model. Raises ModelNotFound for any other name."""
        if name != self._model_name:
            raise ModelNotFound(
                f"model {name!r} is not here; this server has {self._model_name!r}", "model"
            )
        return self._card

    def models(self) -> ModelList:
        return ModelList(data=[self._card])

    async def start(self, id: str, body: bytes) -> Generation:
        """Check a request and make it ready to run. Raises the RequestError to answer with."""
        request = parse_completion(body)
        if request.model is not None:
            self.model(request.model)
        self._check_fits(request)
        prompts = await encode_prompts(request, self._text)
        return Generation(id, request, prompts, self._text)

    def _check_fits(self, request: CompletionRequest) -> None:
        """Refuse what the engine could not take even when idle: a retry would not help."""
        status = self._client.status
        choices = len(request.prompt) * request.n
        if status is not None and choices > status.max_waiting:
            raise InvalidRequest(
                f"n = {request.n} of {len(request.prompt)} prompts: this server takes at most "
                f"max_waiting = {status.max_waiting} completions at once",
                "n",
            )

    async def whole(self, generation: Generation) -> bytes:
        """The reply in one piece."""
        parts: dict[int, list[Delta]] = {}
        choices = [_NOTHING] * generation.num_choices
        try:
            async with aclosing(generation.deltas(self._client)) as batches:
                async for deltas in batches:
                    for delta in deltas:
                        parts.setdefault(delta.index, []).append(delta)
                        if delta.finish_reason is not None:
                            whole = join(parts.pop(delta.index))
                            choices[whole.index] = Raw(_encode(self._choice(generation, whole)))
        finally:
            _record(generation)
        return self._encode(generation, choices, generation.usage)

    async def events(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """The reply as a stream of JSON documents; the choices with news share an event."""
        request = generation.request
        options = request.stream_options
        wants_tokens = request.return_token_ids or not (
            request.logprobs is None and request.prompt_logprobs is None
        )
        usage: Usage | UnsetType | None = UNSET
        last = generation.started
        try:
            async with aclosing(generation.deltas(self._client)) as batches:
                async for deltas in batches:
                    choices = [
                        Raw(_encode(self._choice(generation, delta)))
                        for delta in deltas
                        if delta.text or delta.finish_reason or wants_tokens
                    ]
                    if not choices:
                        continue
                    if options and options.continuous_usage_stats:
                        usage = generation.usage
                    elif options and options.include_usage:
                        usage = None
                    now = time.monotonic()
                    if last != generation.started:
                        metrics.INTER_TOKEN_LATENCY.observe(now - last)
                    last = now
                    yield self._encode(generation, choices, usage)
            if options and options.include_usage:
                yield self._encode(generation, [], generation.usage)
        finally:
            _record(generation)

    def _encode(
        self, generation: Generation, choices: list[Raw], usage: Usage | UnsetType | None
    ) -> bytes:
        status = self._client.status
        return _encode(
            Completion(
                id=generation.id,
                created=generation.created_unix,
                model=self._model_name,
                choices=choices,
                usage=usage,
                system_fingerprint=status.fingerprint if status else None,
            )
        )

    def _choice(self, generation: Generation, delta: Delta) -> Choice:
        request = generation.request
        choice = Choice(
            index=delta.index,
            text=delta.text,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        prompt = generation.prompt_of(delta.index)
        if request.logprobs is not None:
            echoed = prompt.echoed_logprobs if request.echo and delta.is_first else None
            name = naming(self._text, request.return_tokens_as_token_ids)
            choice.logprobs = of_delta(delta, request.logprobs, name, echoed)
        if request.prompt_logprobs is not None and delta.is_first:
            choice.prompt_logprobs = prompt.logprobs_json
        if request.return_token_ids:
            choice.token_ids = memoryview(delta.token_ids).cast("i").tolist()
            if delta.is_first:
                choice.prompt_token_ids = prompt.token_ids_json
        return choice


def _record(generation: Generation) -> None:
    """Count a request that has ended, in whatever way."""
    usage = generation.usage
    metrics.PROMPT_TOKENS.inc(usage.prompt_tokens)
    metrics.COMPLETION_TOKENS.inc(usage.completion_tokens)
    metrics.REQUEST_PROMPT_TOKENS.observe(usage.prompt_tokens)
    metrics.REQUEST_COMPLETION_TOKENS.observe(usage.completion_tokens)
    metrics.REQUEST_CHOICES.observe(generation.num_choices)
    metrics.E2E_REQUEST_LATENCY.observe(time.monotonic() - generation.started)
    if generation.first_output is not None:
        metrics.TIME_TO_FIRST_TOKEN.observe(generation.first_output - generation.started)


def routes(completions: Completions, max_body_bytes: int) -> APIRouter:
    """The routes of this module."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def create_completion(request: Request) -> Response:
        body = await _read_body(request, max_body_bytes)

        async def answer() -> Response:
            generation = await completions.start(f"cmpl-{uuid.uuid4().hex}", body)
            if generation.request.stream:
                events = completions.events(generation)
                return EventStream(await anext(events), events)
            return _json(await completions.whole(generation))

        return WhileConnected(answer)

    @router.get("/v1/models")
    async def list_models() -> Response:
        return _json(_encode(completions.models()))

    @router.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        return _json(_encode(completions.model(name)))

    return router


async def _read_body(request: Request, limit: int) -> bytes:
    """The request's body. Raises BodyTooLarge as soon as it is."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(f"the body is larger than {limit} bytes")
    return bytes(body)


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")
