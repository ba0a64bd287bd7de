"""POST /v1/chat/completions/render and /v1/completions/render, as vLLM has them: the token ids that
a request stands for, as bodies of POST /inference/v1/generate that sample the same; but that route
does not hold samples to the form of calls, as a chat with tools does."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Raw
from starlette.responses import Response

from srm.errors import InvalidRequest
from srm.server.dialects.chat.request import CHAT_FORMS, ChatRequest, parse_chat
from srm.server.dialects.rollouts.requests import VLLM_PARAMS
from srm.server.dialects.rollouts.vllm import StartGeneration
from srm.server.generation.engine_request import RequestOwner, of_current_request
from srm.server.generation.generation import Generation
from srm.server.http.bodies import json_reply, parsed
from srm.server.http.responses import add_operations
from srm.server.schema.completion_request import PROMPT_FORMS, CompletionRequest, parse_completion
from srm.server.schema.openapi import BodySchema, Operation, Router
from srm.server.schema.sampling_fields import NEUTRAL
from srm.server.schema.verify import VERIFY_FORMS

StartChat = Callable[[str, ChatRequest, RequestOwner], Awaitable[Generation]]
"""Makes a checked chat ready to run."""


class RenderedRequest(msgspec.Struct, kw_only=True):
    """One prompt as a body of POST /inference/v1/generate."""

    request_id: str
    model: str | None
    token_ids: list[int]
    sampling_params: dict[str, Any]
    """`max_tokens`, and what else the request says of sampling."""
    stream: bool
    cache_salt: str | None
    priority: int


OPERATIONS = (
    Operation("POST", "/v1/chat/completions/render", "The token ids of a chat; nothing is sampled.",
              RenderedRequest,
              body=BodySchema(ChatRequest, {**CHAT_FORMS, "verify": VERIFY_FORMS}, NEUTRAL),
              errors=(404, 409)),
    Operation("POST", "/v1/completions/render", "The token ids of each prompt, in a list.",
              RenderedRequest, may_be_list=True,
              body=BodySchema(CompletionRequest,
                              {"prompt": PROMPT_FORMS, "verify": VERIFY_FORMS}, NEUTRAL),
              errors=(404, 409)),
)  # fmt: skip
_APART = {"prompt", "model", "stream", "request_id", "cache_salt", "priority"}
"""Fields that are no sampling parameters."""
_RENDERED = {
    *("truncate_prompt_tokens", "truncation_side", "add_special_tokens", "state", "refeed"),
}
"""Fields that have had their effect on the token ids."""
_SHOWING = {
    *("return_token_ids", "return_tokens_as_token_ids", "return_weight_versions"),
    *("stream_options", "max_completion_tokens", "user", "metadata", "response_format"),
    *("json_schema", "regex", "ebnf"),
}
"""Fields that change no token, or are said by another one."""

MAX_ID = 128
"""Most characters of a `request_id`."""
_MOST_BYTES = 32 * 1024 * 1024
"""Most bytes of a reply, estimated. The body of each prompt repeats the parameters."""
_BYTES_OF_ID = 11
"""Most bytes of a token id and its comma."""
_EMPTY: tuple[Any, ...] = (None, [], {}, "")
"""Values that ask for nothing, whatever the field."""


def render_requests(generation: Generation) -> list[RenderedRequest]:
    """Return the body of each prompt. Raises InvalidRequest for a field that none of them has."""
    request, id, prompts = generation.request, generation.id, generation.prompts
    params = _sampling(request)
    of_ids = sum(len(prompt.token_ids) for prompt in prompts) // 4 * _BYTES_OF_ID
    size = of_ids + len(msgspec.json.encode(params)) * len(prompts)
    if size > _MOST_BYTES:
        raise InvalidRequest(
            f"prompt: the bodies of {len(prompts)} prompts would have about {size} bytes, at most "
            f"{_MOST_BYTES}: send fewer of them at once",
            "prompt",
        )
    return [
        RenderedRequest(
            request_id=_numbered(id, i) if len(prompts) > 1 else id,
            model=request.model,
            token_ids=memoryview(prompt.token_ids).cast("i").tolist(),
            sampling_params=params,
            stream=request.stream,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
        for i, prompt in enumerate(prompts)
    ]


def _numbered(id: str, number: int) -> str:
    """Return an id of each prompt's own, no longer than those that are taken."""
    end = f"-{number}"
    return id[: MAX_ID - len(end)] + end


def _new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def _sampling(request: CompletionRequest) -> dict[str, Any]:
    params: dict[str, Any] = {"max_tokens": request.max_tokens}
    for field in msgspec.structs.fields(request):
        value = getattr(request, field.name)
        if field.name in {*_APART, *_RENDERED, *_SHOWING} or value in (field.default, *_EMPTY):
            continue
        if field.name not in VLLM_PARAMS:
            raise InvalidRequest(
                f"{field.encode_name} is not a parameter of POST /inference/v1/generate, which "
                "samples what is rendered: leave it out",
                field.encode_name,
            )
        params[field.name] = value
    given, source = request.structured_outputs, request.constraint_source()
    if given is None and source is not None:
        outputs: dict[str, Any] = {source.kind: source.value}
        if source.strict:
            outputs["disable_additional_properties"] = True
        params["structured_outputs"] = outputs
    elif given is not None:
        parts = msgspec.structs.asdict(given).items()
        params["structured_outputs"] = {
            name: value for name, value in parts if value not in (None, Raw(b"null"))
        }
    return params


def add_routes(
    router: Router, chat: StartChat, start: StartGeneration, max_body_bytes: int
) -> None:
    """Add the routes of this module."""

    async def render_chat(body: bytes) -> RenderedRequest:
        asked = await parsed(parse_chat, body)
        if asked.calls is not None and not asked.calls.may_be_text:
            raise InvalidRequest(
                "tool_choice makes calls of what is sampled, which POST /inference/v1/generate "
                'does not: send "auto", and structured_outputs with what is rendered',
                "tool_choice",
            )
        if asked.echoed:
            raise InvalidRequest("echo begins an answer, and here is none", "echo")
        return render_requests(await chat(_new_id("chatcmpl-"), asked, of_current_request()))[0]

    async def render_completion(body: bytes) -> Response:
        asked = await parsed(parse_completion, body)
        made = render_requests(await start(_new_id("cmpl-"), asked, of_current_request()))
        return json_reply(msgspec.json.encode(made))

    add_operations(router, OPERATIONS, (render_chat, render_completion), max_body_bytes)
