"""SequenceGroup: an accepted request and how far its n sequences are; Line: groups that wait.

A group is one object whatever n is: a prefill, a count and a cursor. What a single sequence needs
while it runs is a row of `engine.slots.SlotTable`. Knows no slots' contents and no device. Keeps:
a group exists only if everything its caller sent has been checked.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np

from engine.batch import I32, I64, U64
from engine.config import ModelConfig
from engine.edits import EditPlan, plan_edits
from engine.errors import ContextTooLong, InvalidRequest
from engine.messages import MAX_LOGPROBS, Request, SamplingParams
from engine.prefixes import NO_SLOT, Order, Prefix

GROUP_BYTES = 2_048
"""About what a group takes besides what its caller sent."""
_encode = msgspec.msgpack.Encoder().encode
NO_SLOTS: I32 = np.empty(0, np.int32)
STREAMS = 2**40
"""A request's stream numbers lie below; the bits above are for whoever owns the engine."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The n sequences sampled from one prompt. Sample i is the sequence `first_id + i`."""

    request: Request
    prompt: I32  # i32[prompt length]
    stop_ids: frozenset[int]
    first_id: int
    max_outputs: int
    """Tokens each sequence may sample: max_tokens, cut to what the context has left. 0: the prompt
    is scored, and no sequence ever starts."""
    edits: EditPlan | None
    """What is done to the logits of its sequences."""
    unfinished: int
    """Sequences without a terminal Output."""
    num_bytes: int = 0
    """What it takes to remember the request, about."""
    to_start: int = 0
    """Of its sequences, the first so many are to start at all: n, until a cut."""
    started: int = 0
    """Sequences that were given a slot: the cursor."""
    prefilled: int = 0
    """Prompt tokens that were cached or fed by prefill rows."""
    cached: int = 0
    """Prompt tokens whose state was there already."""
    scored: int = 0
    """Prompt tokens whose scores have been sent."""
    slot: int = NO_SLOT
    """Of the only sequence, while its prompt is prefilled."""
    state_slot: int = NO_SLOT
    """Where the state after the prefilled tokens is."""
    prefix: Prefix | None = None
    """What the sequences fork from: the prompt without its last token. None: the only sequence's
    prompt is prefilled in its own slot."""
    fills: list[Prefix] = field(default_factory=list)
    """Prefixes that its prefill is still to make, the shortest first."""
    pinned: list[Prefix] = field(default_factory=list)
    """Prefixes that it reads, writes, or is to read."""
    awaited: Prefix | None = None
    """What another request is to make before this one begins."""
    unforked: int = 0
    """Started sequences whose first step, which reads the prefix, is still to come."""
    arrived: float = 0.0
    """When it was accepted, in seconds, as are the next two."""
    taken_up: float | None = None
    """When its prompt's turn came."""
    finished: float = 0.0
    """When its last sequence ended."""
    sampled: int = 0
    """Tokens of its sequences that have ended, as far as they are counted."""
    longest: int = 0
    """Most tokens of one of these."""
    stop_row: int = -1
    """Row of the stop table, from the first slot on."""
    slots: I32 = field(default_factory=lambda: NO_SLOTS)
    """i32[n], from the first slot on: those that the `started` sequences were given, in order; some
    may have been given back, and be others' by now."""

    @property
    def order(self) -> Order:
        """Served first is largest: higher priority, then earlier arrival."""
        return (self.request.priority, -self.first_id)

    @property
    def unstarted(self) -> int:
        return self.to_start - self.started

    @property
    def num_unprefilled(self) -> int:
        """Prompt tokens still to prefill. The last one never is: it is the first decode row."""
        return len(self.prompt) - 1 - self.prefilled

    @property
    def needs_prefix(self) -> bool:
        """More than one sequence shares a prefill: it cannot be made in a sequence's slot."""
        return self.request.params.n > 1 and len(self.prompt) > 1

    @property
    def next_stop(self) -> int:
        """Where the row that goes on with the prefill ends at the latest."""
        return self.fills[0].length if self.fills else len(self.prompt) - 1

    @property
    def is_resumable(self) -> bool:
        """Its caller sends it again, and what its samples said can be told again: it is kept."""
        params = self.request.params
        return self.request.durable and params.prompt_logprobs is None and not params.logprobs

    @property
    def is_scored(self) -> bool:
        return self.request.params.prompt_logprobs is not None


class Line:
    """Groups that wait for the same thing, in serving order."""

    def __init__(self) -> None:
        self._groups: deque[SequenceGroup] = deque()  # the next one is last

    def __iter__(self) -> Iterator[SequenceGroup]:
        return reversed(self._groups)

    def push(self, group: SequenceGroup) -> None:
        if not self._groups or group.order < self._groups[0].order:  # as whoever comes last
            self._groups.appendleft(group)
        else:
            insort(self._groups, group, key=_order)

    def peek(self) -> SequenceGroup | None:
        return self._groups[-1] if self._groups else None

    def pop(self) -> SequenceGroup:
        return self._groups.pop()

    def discard(self, group: SequenceGroup) -> None:
        """Take the group out if it is here."""
        index = bisect_left(self._groups, group.order, key=_order)
        if index < len(self._groups) and self._groups[index] is group:
            del self._groups[index]


def _order(group: SequenceGroup) -> Order:
    return group.order


def accept(request: Request, model: ModelConfig, first_id: int) -> SequenceGroup:
    """Check everything a request says against the model; RequestError says what does not fit."""
    params = request.params
    _check_ranges(params)
    if request.stream < 0 or request.stream % STREAMS + params.n > STREAMS:
        raise InvalidRequest(f"stream must be 0 … 2**40 - n, got {request.stream}", "stream")
    prompt = _prompt(request.prompt_token_ids, model)
    _check_scoring(request, len(prompt))
    for token in params.stop_token_ids:
        if not 0 <= token < model.vocab_size:
            raise InvalidRequest(
                f"stop_token_ids holds {token}; ids are 0 … {model.vocab_size - 1}",
                "stop_token_ids",
            )
    stop_ids = frozenset(params.stop_token_ids)
    return SequenceGroup(
        request=request,
        prompt=prompt,
        stop_ids=stop_ids if params.ignore_eos else stop_ids | {model.eos_token_id},
        first_id=first_id,
        # The last sampled token is not fed, so a full context may still sample one.
        max_outputs=min(params.max_tokens, model.n_ctx - len(prompt) + 1),
        edits=plan_edits(params, prompt, stop_ids | {model.eos_token_id}, model),
        unfinished=params.n,
        to_start=params.n,
        num_bytes=GROUP_BYTES + 2 * len(_encode(request)),  # as it came, and as arrays
    )


def _prompt(data: bytes, model: ModelConfig) -> I32:
    if not data or len(data) % 4:
        raise InvalidRequest(
            f"prompt_token_ids must be one or more int32, got {len(data)} bytes", "prompt_token_ids"
        )
    prompt = np.frombuffer(data, "<i4").astype(np.int32)
    if len(prompt) > model.n_ctx:
        raise ContextTooLong(
            f"the prompt has {len(prompt)} tokens; this model's context holds {model.n_ctx}",
            "prompt_token_ids",
        )
    outside = prompt[(prompt < 0) | (prompt >= model.vocab_size)]
    if len(outside):
        raise InvalidRequest(
            f"prompt_token_ids holds {outside[0]}; ids are 0 … {model.vocab_size - 1}",
            "prompt_token_ids",
        )
    return prompt


MIN_TEMPERATURE = 1e-4
MAX_TEMPERATURE = 1e4
"""Within these, logits divided by the temperature stay finite in float32."""


def _check_ranges(params: SamplingParams) -> None:
    temperature = params.temperature
    checks = (
        ("max_tokens", params.max_tokens >= 0, "at least 0"),
        ("n", params.n >= 1, "at least 1"),
        (
            "temperature",
            temperature == 0 or MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE,
            f"0, or {MIN_TEMPERATURE:g} … {MAX_TEMPERATURE:g}",
        ),
        ("top_k", 0 <= params.top_k < 2**31, "0 (off) … 2**31 - 1"),
        ("top_p", 0 < params.top_p <= 1, "above 0 and at most 1"),
        ("min_p", 0 <= params.min_p <= 1, "0 … 1"),
        ("seed", 0 <= params.seed < 2**64, "0 … 2**64 - 1"),
        *(
            (name, 0 <= (getattr(params, name) or 0) <= MAX_LOGPROBS, f"0 … {MAX_LOGPROBS}")
            for name in ("logprobs", "prompt_logprobs")
        ),
    )
    for name, is_valid, allowed in checks:
        if not is_valid:
            raise InvalidRequest(f"{name} must be {allowed}, got {getattr(params, name)}", name)


def _check_scoring(request: Request, prompt_length: int) -> None:
    params = request.params
    if params.max_tokens == 0 and (params.prompt_logprobs is None or prompt_length < 2):
        raise InvalidRequest(
            "max_tokens must be at least 1, or 0 with prompt_logprobs and a prompt of at least "
            f"2 tokens; got 0, prompt_logprobs = {params.prompt_logprobs}, {prompt_length} tokens",
            "max_tokens",
        )
    if params.logprobs and request.emit != "delta":
        raise InvalidRequest(
            f"logprobs must be 0 where emit is {request.emit}, since alternatives are not kept; "
            f"got {params.logprobs}",
            "logprobs",
        )


def sample_seeds(seed: int, indices: I64) -> U64:
    """Of the random streams (seed, index): u64[len(indices)], splitmix64's outputs after `seed`."""
    # Arrays overflow without a word: arithmetic modulo 2**64 is the point.
    mixed = (indices.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed += np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
