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


class EngineRequests:
    """The engine's side of one request."""

    def __init__(
        self, id: str, request: CompletionRequest, params: SamplingParams, sender: RequestOwner
    ) -> None:
        """`id` is unique."""
        self._id = id
        self._request = request
        self._params = params
        self._sender = sender

    def requests(self, prompts: Sequence[Prompt], asked: Iterable[int]) -> list[Request]:
        """Return the engine's requests for the prompts at the indices `asked`, in this order."""
        sender = self._sender
        return [
            Request(
                id=f"{self._id}-{prompt}",
                prompt_token_ids=prompts[prompt].token_ids,
                params=msgspec.structs.replace(self._params, seed=self._seed(prompt)),
                priority=self._priority,
                emit=self._emit,
                share=sender.share,
                weight=sender.weight,
                durable=sender.durable,
            )
            for prompt in asked
        ]

    @property
    def _priority(self) -> int:
        return self._sender.priority - self._request.priority  # the client's is reversed

    @property
    def _emit(self) -> Literal["final", "delta", "columns"]:
        """Emit each step if it is read, or to count discarded tokens; else only the end."""
        request = self._request
        lasts = self._sender.durable  # columns have neither durable requests nor alternatives
        if self._params.logprobs:
            return "delta"
        if request.stops or not wants_whole(request):
            return "delta" if lasts else "columns"
        return "columns" if request.ends_early and not lasts else "final"

    def _seed(self, prompt: int) -> int:
        given = self._request.seed
        if given is None:
            drawn = self._sender.seed(self._id, prompt)
            return secrets.randbits(64) if drawn is None else drawn
        return given % 2**64
