"""The prompts of a request: from text to token ids.

A prompt is accepted whole or refused with the field at fault.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from msgspec import UNSET, Raw, UnsetType

from srm.engine.messages import NAMED, PROMPT, Output, join
from srm.errors import ContextTooLong, InvalidRequest
from srm.server import metrics
from srm.server.schema.completion_request import CompletionRequest
from srm.server.schema.conversation import ExactPrompt
from srm.server.schema.sampling_fields import MAX_CUT_LENGTH, MAX_SCORES
from srm.server.text.text import Text
from srm.tokenizer_file import LITERAL

_AT_ONCE = 512
"""Most characters tokenized on the event loop: a thread would take longer to start on them."""


@dataclass(frozen=True, slots=True)
class GivenState:
    """The state of the first tokens of a request's prompt."""

    token_ids: bytes
    state: bytes = b""
    """Empty where the tokens are to be fed."""
    fingerprint: str = ""
    turn: Raw | UnsetType = UNSET
    """A stored response's messages and reply, as JSON; UNSET of a state."""
    salt: str | None = None
    """Salt of the request that a fork was made of; None if this is no fork."""

    @property
    def length(self) -> int:
        """Tokens that the state stands after; 0 without one."""
        return len(self.token_ids) // 4 - 1 if self.state else 0


class Prompt:
    """One prompt, and its scores as they come."""

    def __init__(self, token_ids: bytes, scored_from: int = 0) -> None:
        """`scored_from`: place of the first token that is scored, from the end if negative."""
        self.token_ids = token_ids  # int32 little-endian
        self._scored_from = scored_from
        self.scores: list[Output] = []
        """Outputs with its scores; complete before the first of its samples."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @cached_property
    def rest(self) -> Output:
        """Its tokens that were scored, those after the unscored ones, with their scores; not all of
        them if it was aborted."""
        return join(self.scores or [Output("", PROMPT)])

    @property
    def num_unscored(self) -> int:
        """Tokens before those."""
        start = self._scored_from
        return min(max(start if start >= 0 else self.num_tokens + start, 1), self.num_tokens)


async def encode_prompts(
    request: CompletionRequest,
    text: Text,
    begun: GivenState | None = None,
    are_chats: bool = False,
) -> list[bytes]:
    """Token ids of each prompt, behind those of a state that it goes on from; `are_chats` begin
    with these themselves. Raises ContextTooLong or InvalidRequest naming the numbers."""
    limit = text.model.n_ctx
    adds_special = request.add_special_tokens and (begun is None or are_chats)
    prompts: list[bytes] = []
    if not text.has_tokenizer:
        _refuse_text(request)
    length = request.truncate_prompt_tokens
    strings = [prompt for prompt in request.prompt if not isinstance(prompt, bytes)]
    texts = [prompt if isinstance(prompt, str) else rest_of(prompt, text) for prompt in strings]
    for prompt in texts:
        _check_length(prompt, text, is_cut=length is not None)
    if sum(map(len, texts)) > _AT_ONCE:
        encoded = await asyncio.to_thread(text.encode, texts, adds_special)
    elif texts:
        encoded = text.encode(texts, adds_special)
    if texts:
        prompts = [
            behind if isinstance(prompt, str) else join_ids(prompt, behind, text)
            for prompt, behind in zip(strings, encoded, strict=True)
        ]
        metrics.TOKENIZED_TOKENS.inc(sum(map(len, encoded)) // 4)
    else:
        prompts = [prompt for prompt in request.prompt if isinstance(prompt, bytes)]
        largest = int(np.frombuffer(b"".join(prompts), "<i4").max(initial=0))
        if largest >= text.model.vocab_size:
            raise InvalidRequest(
                f"prompt has token id {largest}; ids go from 0 to {text.model.vocab_size - 1}",
                "prompt",
            )
    if length is not None:
        size = 4 * (limit if length < 0 else length)
        part = slice(size) if request.truncation_side == "right" else slice(-size, None)
        prompts = [prompt[part] for prompt in prompts]
    if begun is not None and are_chats:
        _check_begin(prompts, begun)
    elif begun is not None:
        prompts = [begun.token_ids + prompt for prompt in prompts]
    for i, ids in enumerate(prompts):
        if not ids:
            raise InvalidRequest("prompt must have at least one token; got none", "prompt")
        if len(ids) // 4 > limit:
            raise ContextTooLong.from_length(len(ids) // 4, limit, "prompt")
        if request.prompt_logprobs_start > len(ids) // 4:
            which = f"prompt {i}'s" if len(prompts) > 1 else "the prompt's"
            raise InvalidRequest(
                f"prompt_logprobs_start lies after the last of {which} {len(ids) // 4} tokens",
                "prompt_logprobs_start",
            )
    _check_scores(request, prompts, limit)
    return prompts


def _check_begin(chats: list[bytes], begun: GivenState) -> None:
    """Refuse chats that do not begin with the tokens of the state that they go on from."""
    state = np.frombuffer(begun.token_ids, "<i4")
    for i, chat in enumerate(chats):
        own = np.frombuffer(chat, "<i4")[: len(state)]
        if len(differing := np.flatnonzero(own != state[: len(own)])) or len(own) < len(state):
            at = int(differing[0]) if len(differing) else len(own)
            which = f"messages[{i}]" if len(chats) > 1 else "messages"
            raise InvalidRequest(
                f"state has {len(state)} tokens, with which {which} must begin, and from the one "
                f"at position {at} on, counted from 0, they differ: send the messages that made "
                "it, what was sampled with its token ids",
                "state",
            )


def rest_of(prompt: ExactPrompt, text: Text) -> str:
    """Return the text behind the ids of a prompt. Raises InvalidRequest for ids that the model
    does not have, and where the text goes on from no place that is known."""
    ids = np.frombuffer(prompt.token_ids, "<i4")
    if (largest := int(ids.max())) >= text.model.vocab_size:
        raise InvalidRequest(
            f"{prompt.source} has token id {largest}; ids go from 0 to {text.model.vocab_size - 1}",
            prompt.field,
        )
    name = _special_name(prompt, text)
    if not prompt.has_calls:
        if name and not prompt.rest.strip():
            raise InvalidRequest(
                f"the token ids of {prompt.source} end with {name!r}, and nothing follows them: "
                "there is nothing to continue",
                prompt.field,
            )
        before, mark, behind = prompt.rest.partition(name or "\0")
        # A template may write spaces before the end of a turn, which the ids have.
        return mark + behind if mark and not before.strip() else prompt.rest
    # Between the mark and the end of its turn are the calls, which the ids have.
    end = name or text.special_tokens.get("eos_token", "")
    _, mark, behind = prompt.rest.partition(end) if end else ("", "", "")
    if not mark:
        raise InvalidRequest(
            f"the token ids of {prompt.source} are of tool calls, and the chat template does not "
            f"end these with {end or 'an end-of-text token'}: send the messages without ids",
            prompt.field,
        )
    return mark + behind


def join_ids(prompt: ExactPrompt, rest: bytes, text: Text) -> bytes:
    """Return the ids of a prompt and those of its rest. What ends the turn is in both of them if
    the model sampled it."""
    is_twice = _special_name(prompt, text) and rest[:4] == prompt.token_ids[-4:]
    return prompt.token_ids + (rest[4:] if is_twice else rest)


def _special_name(prompt: ExactPrompt, text: Text) -> str:
    """Return how the last of the ids is written if it is a special token, else nothing."""
    last = prompt.token_ids[-4:]
    return "" if text.decode(last) else text.spell(last).decode()


def _check_length(prompt: str, text: Text, is_cut: bool) -> None:
    """Refuse a text that no tokenization makes fit, or, if it is cut, that takes too much memory
    to tokenize."""
    limit = text.model.n_ctx
    length = len(prompt) - len(LITERAL) * prompt.count(LITERAL)
    at_least = length // text.longest_token
    if at_least <= limit:
        return
    if not is_cut:
        raise ContextTooLong.from_length(f"at least {at_least}", limit, "prompt")
    if length > MAX_CUT_LENGTH:
        raise InvalidRequest(
            f"prompt has {length} characters; with truncate_prompt_tokens it may have "
            f"{max(MAX_CUT_LENGTH, (limit + 1) * text.longest_token - 1)}",
            "prompt",
        )


def _refuse_text(request: CompletionRequest) -> None:
    has_text = any(not isinstance(prompt, bytes) for prompt in request.prompt)
    texts = {"prompt": has_text, "stop": bool(request.stops), "bad_words": bool(request.bad_words)}
    for name, is_text in texts.items():
        if is_text:
            raise InvalidRequest(
                f"{name} may not be text: this model has no tokenizer; token ids are taken, "
                "in prompt and stop_token_ids",
                name,
            )


def _check_scores(request: CompletionRequest, prompts: list[bytes], n_ctx: int) -> None:
    """Refuse a reply with more scores than MAX_SCORES: it would not fit into memory."""
    alternatives = request.logprobs or 0
    total = 0
    for prompt in prompts:
        length = len(prompt) // 4
        total += alternatives * min(request.max_tokens, n_ctx - length + 1)
        if request.echo and request.logprobs is not None:
            total += (alternatives + 1) * length
        if request.prompt_logprobs is not None:
            start = request.prompt_logprobs_start
            scored = min(length, -start) if start < 0 else max(length - start, 0)
            total += (request.prompt_logprobs + 1) * scored
    total *= request.num_samples
    if total > MAX_SCORES:
        name = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        sizes = {"prompts": len(prompts), "n": request.num_samples, "logprobs": request.logprobs,
                 "prompt_logprobs": request.prompt_logprobs}  # fmt: skip
        given = ", ".join(f"{name} = {size}" for name, size in sizes.items() if size is not None)
        raise InvalidRequest(
            f"the reply could have {total} log-probabilities, and may have {MAX_SCORES}: "
            f"ask for fewer prompts, completions, tokens or alternatives; got {given}",
            NAMED[name] if getattr(request, NAMED[name]) else name,
        )
