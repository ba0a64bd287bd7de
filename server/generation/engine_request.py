"""Builds the engine's requests for a request: sampling parameters, seeds, priority and how outputs
are emitted.

Randomness: sample k of a prompt draws from the stream (seed, k). A given seed is every prompt's, so
a completion does not depend on which other prompts are in the list; without one, each prompt gets a
seed of its own, so equal prompts give different completions.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from srm.engine.messages import Request, SamplingParams, begin_from
from srm.errors import InvalidRequest
from srm.server.generation.prompts import GivenState, Prompt
from srm.server.http.request_log import CURRENT
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.sampling_fields import SamplingRequest
from srm.server.schema.validation import refused
from srm.server.text.text import Text

BATCH_PRIORITY = -1
"""Priority of batches: people, of whom the lowest have 0, come before them whosever they are."""


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """Who sent a request and how it is scheduled, which its body does not say."""

    share: str = ""
    """Name of the party that gets slots in turn: see `engine.messages.Request.share`."""
    weight: float = 1.0
    """Relative size of its part of the slots."""
    priority: int = 0
    """Its rank among owners, higher is first; the request's own orders one owner's requests."""
    durable: bool = False
    """Whether it is sent again until it is answered; its seeds are then made from its id."""
    created_unix: int | None = None
    """Creation time in the reply, in Unix seconds; None: now."""
    prompts_of: str = ""
    """Whose kept prompts it may begin from: a key's name; empty: everybody's."""
    key: str = ""
    """Name of its API key, whose states it may use; empty without keys."""
    charge: Callable[[int], None] = lambda _: None
    """Takes tokens that it has used from its key's."""

    def salt(self, own: str = "") -> str:
        """Return what its key's prompts and a request's `own` salt have for themselves; no key's
        name has a line's end."""
        return f"{self.prompts_of}\n{own}" if self.prompts_of else own

    def seed(self, id: str, prompt: int) -> int | None:
        """Return a prompt's seed, 0 … 2**64 - 1, where the request has none; None: any will do."""
        if not self.durable:
            return None
        return int.from_bytes(blake2b(f"{id}-{prompt}".encode(), digest_size=8).digest(), "little")


def of_current_request() -> RequestOwner:
    """The sender of the HTTP request being answered: its API key, if keys are asked for."""
    entry = CURRENT.get(None)
    account = entry and entry.account
    if not account:
        return RequestOwner()
    name, rank, prompts_of = account.name, account.priority, account.prompts_of
    return RequestOwner(name, priority=rank, prompts_of=prompts_of, key=name, charge=account.charge)


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
    first_waves: Sequence[int | None],
    begun: GivenState | None = None,
) -> list[Request]:
    """Return the engine's requests for the prompts at the indices `asked`, in this order.

    `id` is unique; `params` lacks the seed. `first_waves` has `Request.first_wave` of each prompt.
    All prompts go on from the tokens of `begun`.
    """
    return [
        Request(
            id=f"{id}-{prompt}",
            prompt_token_ids=prompts[prompt].token_ids,
            params=msgspec.structs.replace(params, seed=_seed(id, request, owner, prompt)),
            priority=owner.priority,
            precedence=-request.priority,  # the client's is reversed
            emit=_emit(request, params, owner),
            share=owner.share,
            weight=owner.weight,
            durable=owner.durable,
            name=request.request_id or "",
            keeps_ends=request.keep_states,
            first_wave=first_waves[prompt],
            **state_fields(begun, owner.salt(request.cache_salt or "")),
        )
        for prompt in asked
    ]


def state_fields(given: GivenState | None, salt: str) -> dict[str, Any]:
    """Return the fields of an engine's Request that say from which state it begins, and who else
    may begin from what it leaves behind."""
    if given is None or not given.state:
        return {"salt": salt if given is None or given.salt is None else given.salt}
    return begin_from(given.state, given.length, given.fingerprint, salt)


def _emit(
    request: CompletionRequest, params: SamplingParams, owner: RequestOwner
) -> Literal["final", "delta", "tokens"]:
    """Emit each step if it is read, or to count discarded tokens; else only the end."""
    if request.stops or params.logprobs or not wants_whole(request):
        return "delta" if owner.durable else "tokens"  # which durable requests may not have
    return "tokens" if request.ends_early and not owner.durable else "final"


def _seed(id: str, request: CompletionRequest, owner: RequestOwner, prompt: int) -> int:
    if request.seed is not None:
        return request.seed % 2**64
    drawn = owner.seed(id, prompt)
    return secrets.randbits(64) if drawn is None else drawn


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


def sampling_params(request: CompletionRequest, text: Text, constraint: str = "") -> SamplingParams:
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
        prompt_logprobs_start=request.prompt_logprobs_start,
        logprob_token_ids=tuple(request.logprob_token_ids),
        prompt_logprob_token_ids=tuple(request.prompt_logprob_token_ids),
        constraint=constraint,
        **edit_params(request, text, request.max_tokens),
    )


def _alternatives(request: CompletionRequest) -> int | None:
    """Return how many are asked for; never None with `best_of`, which ranks by logprobs, nor with
    a receipt, which has them."""
    is_used = request.num_samples > request.n or request.receipt
    return 0 if request.logprobs is None and is_used else request.logprobs


def _prompt_alternatives(request: CompletionRequest) -> int | None:
    """Return the most that `prompt_logprobs` and `echo` ask for, or None."""
    echoed = request.logprobs if request.echo else None
    return max((k for k in (request.prompt_logprobs, echoed) if k is not None), default=None)
