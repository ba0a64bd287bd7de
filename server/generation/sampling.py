"""Sampling parameters of a completion request, as the engine takes them: penalties and bans too."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

from engine.errors import InvalidRequest
from engine.messages import SamplingParams
from server.schema.completion_request import CompletionRequest
from server.schema.sampling_fields import SamplingRequest
from server.schema.validation import refused
from server.text.text import Text


def edit_params(request: SamplingRequest, text: Text, max_tokens: int) -> dict[str, Any]:
    """Return fields of SamplingParams. Raises InvalidRequest naming the field.

    The engine checks that bans leave a token: it knows what ends a completion.
    """
    allowed = request.allowed_token_ids or []
    _check_ids("logit_bias", request.logit_bias, text.model.vocab_size)
    _check_ids("allowed_token_ids", allowed, text.model.vocab_size)
    if request.min_tokens > max_tokens:
        raise refused(type(request), "min_tokens", request.min_tokens)
    return {
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": request.logit_bias,
        "allowed_token_ids": tuple(dict.fromkeys(allowed)),
        "bad_words": _token_sequences(request.bad_words, text),
        "min_tokens": min(request.min_tokens, text.model.n_ctx),
    }


def _check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if token >= vocab_size:
            raise InvalidRequest(f"{name} has {token}; ids go from 0 to {vocab_size - 1}", name)


def _token_sequences(words: list[str], text: Text) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, at the beginning of a text and after a space."""
    bare = [word.lstrip(" ") for word in words]
    spellings = [spelling for word in bare for spelling in (word, f" {word}")]
    encoded = text.encode(spellings, adds_special=False) if spellings else []
    return tuple(dict.fromkeys(tuple(array("i", token_ids)) for token_ids in encoded))


def sampling_params(request: CompletionRequest, text: Text) -> SamplingParams:
    """Return the engine's parameters, all but the seed. Raises InvalidRequest."""
    limits = text.model
    for token in request.stop_token_ids:
        if token >= limits.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids has {token}; ids go from 0 to {limits.vocab_size - 1}",
                "stop_token_ids",
            )
    return SamplingParams(
        max_tokens=min(request.max_tokens, limits.n_ctx),
        n=request.num_samples,
        temperature=request.temperature,
        top_k=min(max(request.top_k, 0), limits.vocab_size),
        top_p=request.top_p,
        min_p=request.min_p,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        logprobs=_alternatives(request),
        prompt_logprobs=_prompt_alternatives(request),
        **edit_params(request, text, request.max_tokens),
    )


def _alternatives(request: CompletionRequest) -> int | None:
    """Return how many are asked for; never None with `best_of`, which ranks by logprobs."""
    is_ranked = request.num_samples > request.n
    return 0 if request.logprobs is None and is_ranked else request.logprobs


def _prompt_alternatives(request: CompletionRequest) -> int | None:
    """Return the most that `prompt_logprobs` and `echo` ask for, or None."""
    echoed = request.logprobs if request.echo else None
    return max((k for k in (request.prompt_logprobs, echoed) if k is not None), default=None)
