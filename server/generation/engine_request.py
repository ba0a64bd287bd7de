"""Builds the engine's requests for a request: seeds, priority and how outputs are emitted.

Randomness: sample k of a prompt draws from the stream (seed, k). A given seed is every prompt's, so
a completion does not depend on which other prompts are in the list; without one, each prompt gets a
seed of its own, so equal prompts give different completions.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from engine.messages import Request, SamplingParams
from server.generation.prompts import Prompt
from server.generation.request_owner import RequestOwner
from server.schema.completion_request import CompletionRequest


def wants_whole(request: CompletionRequest) -> bool:
    """Whether a sample's tokens are wanted when it has ended, and not before."""
    return request.stream_whole or not request.stream


def engine_requests(
    id: str,
    request: CompletionRequest,
    params: SamplingParams,
    owner: RequestOwner,
    prompts: Sequence[Prompt],
    asked: Iterable[int],
) -> list[Request]:
    """Return the engine's requests for the prompts at the indices `asked`, in this order.

    `id` is unique; `params` lacks the seed.
    """
    return [
        Request(
            id=f"{id}-{prompt}",
            prompt_token_ids=prompts[prompt].token_ids,
            params=msgspec.structs.replace(params, seed=_seed(id, request, owner, prompt)),
            priority=owner.priority - request.priority,  # the client's is reversed
            emit=_emit(request, params, owner),
            share=owner.share,
            weight=owner.weight,
            durable=owner.durable,
        )
        for prompt in asked
    ]


def _emit(
    request: CompletionRequest, params: SamplingParams, owner: RequestOwner
) -> Literal["final", "delta", "columns"]:
    """Emit each step if it is read, or to count discarded tokens; else only the end."""
    # Columns have neither durable requests nor alternatives.
    if params.logprobs:
        return "delta"
    if request.stops or not wants_whole(request):
        return "delta" if owner.durable else "columns"
    return "columns" if request.ends_early and not owner.durable else "final"


def _seed(id: str, request: CompletionRequest, owner: RequestOwner, prompt: int) -> int:
    if request.seed is not None:
        return request.seed % 2**64
    drawn = owner.seed(id, prompt)
    return secrets.randbits(64) if drawn is None else drawn
