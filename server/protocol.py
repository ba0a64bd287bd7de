"""The body of POST /v1/completions, checked field by field. Knows no tokenizer and no engine."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engine.errors import InvalidRequest
from server.fields import (
    MAX_CHOICES,
    Alternatives,
    Flag,
    SamplingRequest,
    TokenId,
    checked,
    convert,
    given_fields,
    refused,
    show,
)

TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
PROMPT_FORMS = (
    Annotated[str, Meta(description="a string, token ids, or a list of either; no list empty")],
    Annotated[list[str], Meta(min_length=1)],
    TokenIds,
    Annotated[list[TokenIds], Meta(min_length=1)],
)
"""What `prompt` may be on the wire."""


class CompletionRequest(SamplingRequest, frozen=True, kw_only=True):
    """Body of POST /v1/completions, checked. The description of a field is what it allows."""

    prompt: list[str] | list[list[int]]
    """One entry per prompt, texts or token ids."""
    max_tokens: Annotated[
        int, Meta(ge=0, description="an integer of at least 1; 0 with echo or prompt_logprobs")
    ] = 16
    echo: Flag = False
    logprobs: Alternatives | None = None
    prompt_logprobs: Alternatives | None = None

    def check(self) -> None:
        super().check()
        if not (self.max_tokens or self.echo or self.prompt_logprobs is not None):
            raise refused(CompletionRequest, "max_tokens", 0)
        if len(self.prompt) * self.n > MAX_CHOICES:
            raise InvalidRequest(
                f"n = {self.n} of {len(self.prompt)} prompts: at most {MAX_CHOICES} completions "
                "may be asked for at once",
                "n",
            )


def parse_completion(body: bytes) -> CompletionRequest:
    """Check the body of POST /v1/completions. Raises InvalidRequest naming field and value."""
    given = given_fields(body)
    if "prompt" not in given:
        raise InvalidRequest("prompt is required: text, token ids, or a list of either", "prompt")
    return checked(CompletionRequest, given, {"prompt": _prompts(given["prompt"])})


def _prompts(value: Any) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    first = value[0] if isinstance(value, list) and value else None
    prompts: list[str] | list[list[int]]
    try:
        if isinstance(first, str):
            prompts = convert(value, list[str])
        elif isinstance(first, list):
            prompts = convert(value, list[TokenIds])
        else:
            prompts = [convert(value, TokenIds)]
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of such "
            f"lists, none of them empty; got {show(value)} ({error})",
            "prompt",
        ) from None
    return prompts
