"""Requests as parsed, and what is said of those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from srm.errors import InvalidRequest
from srm.server.dialects.chat.request import ChatRequest, parse_chat
from srm.server.dialects.responses import request
from srm.server.dialects.responses.request import ResponseRequest, chat_of_response
from srm.server.schema.completion_request import CompletionRequest, parse_completion

USER = {"role": "user", "content": "hi"}


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(json.dumps({"prompt": "x", **fields}).encode())


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(json.dumps({"messages": [USER], **fields}).encode())


def response(**fields: Any) -> ResponseRequest:
    return parse_response(json.dumps({"input": "x", **fields}).encode())[0]


def parse_response(body: bytes) -> tuple[ResponseRequest, ChatRequest]:
    """The body of a response, and the chat that it stands for."""
    asked, given = request.parse_response(body)
    return asked, chat_of_response(asked, given)


def refusal(parse: Callable[..., Any], *args: Any, **fields: Any) -> InvalidRequest:
    """The error that these meet; fails if they are taken."""
    try:
        taken = parse(*args, **fields)
    except InvalidRequest as error:
        return error
    raise AssertionError(f"{args or ''}{fields or ''} was taken: {taken!r}"[:1_000])
