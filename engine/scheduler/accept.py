"""Accept: checks everything a request says against the model, once. Whether there is room is for
the scheduler to say. Then the registry has it until all its samples have ended or are to be
forgotten, and nothing of it is left anywhere."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np

from srm.engine.config import ModelConfig
from srm.engine.constraints.automaton import TokenAutomaton
from srm.engine.constraints.byte_table import START
from srm.engine.constraints.grammars import Grammar
from srm.engine.messages import (
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_TEMPERATURE,
    MAX_WEIGHT,
    MIN_WEIGHT,
    NAMED,
    Request,
    SamplingParams,
)
from srm.engine.scheduler.admission import Admission
from srm.engine.state.sequence import STREAMS, SequenceGroup
from srm.engine.steps.batch import I32, I64
from srm.engine.steps.token_edits import check_ids, check_ranges, plan_edits
from srm.errors import ContextTooLong, InvalidRequest

GROUP_BYTES = 2_048  # about how many bytes a group takes besides what its caller sent
_encode = msgspec.msgpack.Encoder().encode


def accept(
    request: Request,
    model: ModelConfig,
    first_id: int,
    grammar: Grammar | None = None,
    max_logprobs: int = MAX_LOGPROBS,
) -> SequenceGroup:
    """Check all that a request says; `grammar` is of its constraint. Raises RequestError for what
    does not fit the model."""
    params = request.params
    _check_named(params, max_logprobs, model.vocab_size)
    _check_ranges(params, max_logprobs, model.vocab_size)
    _check_turn(request)
    samples = _samples(request)
    last = params.n - 1 if samples is None else int(samples[-1])
    if request.stream < 0 or request.stream % STREAMS + last >= STREAMS:
        raise InvalidRequest(f"stream must be 0 … 2**40 - n, got {request.stream}", "stream")
    prompt = _prompt(request.prompt_token_ids, model)
    _check_state(request, len(prompt), model)
    first_scored = _first_scored(params, len(prompt))
    _check_scoring(request, first_scored, len(prompt))
    check_ids("stop_token_ids", params.stop_token_ids, model.vocab_size)
    stop_ids = frozenset(params.stop_token_ids)
    # The last sampled token is not fed, so a full context may still sample one.
    max_outputs = min(params.max_tokens, model.n_ctx - len(prompt) + 1)
    # Ends that are not allowed yet are masks' to leave out.
    automaton = grammar.automaton if grammar and not params.min_tokens else None
    if automaton is not None:
        _check_room(automaton, params.max_tokens, max_outputs)
        grammar = None
    return SequenceGroup(
        request=request,
        prompt=prompt,
        stop_ids=stop_ids if params.ignore_eos else stop_ids | {*model.end_ids},
        first_scored=first_scored,
        first_id=first_id,
        max_outputs=max_outputs,
        edits=plan_edits(params, prompt, stop_ids | {*model.end_ids}, model, grammar),
        automaton=automaton,
        unfinished=params.n,
        samples=samples,
        to_start=params.n,
        state_length=request.state_length,
        num_bytes=GROUP_BYTES + 2 * len(_encode(request)),  # as it came, and as arrays
    )


def _check_turn(request: Request) -> None:
    if not MIN_WEIGHT <= request.weight <= MAX_WEIGHT:
        raise InvalidRequest(
            f"weight must be {MIN_WEIGHT:g} … {MAX_WEIGHT:g}, got {request.weight}", "weight"
        )
    for name in ("priority", "precedence"):
        if abs(getattr(request, name)) > MAX_PRIORITY:
            raise InvalidRequest(
                f"{name} must be -{MAX_PRIORITY} … {MAX_PRIORITY}, got {getattr(request, name)}",
                name,
            )
    if request.first_wave is not None and request.first_wave < 0:
        raise InvalidRequest(
            f"first_wave must be at least 0, got {request.first_wave}", "first_wave"
        )
    if request.durable and request.emit == "tokens":
        raise InvalidRequest("durable must be false where emit is tokens, got true", "durable")


def _check_room(automaton: TokenAutomaton, max_tokens: int, max_outputs: int) -> None:
    least = int(automaton.distance[START]) - 1  # the token that ends it may be left out
    if 0 < max_outputs < least:
        name, limit = "max_tokens", "max_tokens"
        if max_outputs < max_tokens:
            name, limit = "prompt_token_ids", "the prompt leaves room in the context for"
        raise InvalidRequest(
            f"{limit} {'= ' if name == limit else ''}{max_outputs} tokens; the shortest completion "
            f"that the constraint allows takes {least}",
            name,
        )


def _samples(request: Request) -> I64 | None:
    if not request.samples:
        return None
    n, size = request.params.n, len(request.samples)
    if size != 4 * n:
        raise InvalidRequest(f"samples must be n = {n} int32, got {size} bytes", "samples")
    samples = np.frombuffer(request.samples, "<i4").astype(np.int64)
    if samples[0] < 0 or (np.diff(samples) <= 0).any():
        raise InvalidRequest("samples must ascend, and begin at 0 or above", "samples")
    return samples


def _prompt(data: bytes, model: ModelConfig) -> I32:
    if not data or len(data) % 4:
        raise InvalidRequest(
            f"prompt_token_ids must be one or more int32, got {len(data)} bytes", "prompt_token_ids"
        )
    prompt = np.frombuffer(data, "<i4").astype(np.int32)
    if len(prompt) > model.n_ctx:
        raise ContextTooLong.from_length(len(prompt), model.n_ctx, "prompt_token_ids")
    outside = prompt[(prompt < 0) | (prompt >= model.vocab_size)]
    check_ids("prompt_token_ids", outside.tolist(), model.vocab_size)
    return prompt


def _check_ranges(params: SamplingParams, max_logprobs: int, vocab_size: int) -> None:
    alternatives = (
        f"0 … {max_logprobs}, the setting max_logprobs (-1 is the vocabulary, {vocab_size} tokens)"
    )
    check_ranges(
        params,
        ("max_tokens", params.max_tokens >= 0, "at least 0"),
        ("n", params.n >= 1, "at least 1"),
        ("temperature", 0 <= params.temperature <= MAX_TEMPERATURE, f"0 … {MAX_TEMPERATURE:g}"),
        ("top_k", 0 <= params.top_k < 2**31, "0 (off) … 2**31 - 1"),
        ("top_p", 0 <= params.top_p <= 1, "0 … 1"),
        ("min_p", 0 <= params.min_p <= 1, "0 … 1"),
        ("seed", 0 <= params.seed < 2**64, "0 … 2**64 - 1"),
        *(
            (name, 0 <= (getattr(params, name) or 0) <= max_logprobs, alternatives)
            for name in NAMED
        ),
    )


def _check_named(params: SamplingParams, max_logprobs: int, vocab_size: int) -> None:
    """Check the tokens whose scores are wanted."""
    for count, name in NAMED.items():
        token_ids = getattr(params, name)
        if len(token_ids) > max_logprobs:
            raise InvalidRequest(
                f"{name} must be at most {max_logprobs} token ids, the setting max_logprobs, got "
                f"{len(token_ids)} ids",
                name,
            )
        check_ids(name, token_ids, vocab_size)
        if len(set(token_ids)) < len(token_ids):
            ((twice, _),) = Counter(token_ids).most_common(1)
            raise InvalidRequest(f"{name} holds {twice} more than once", name)
        if token_ids and getattr(params, count) != len(token_ids):
            raise InvalidRequest(
                f"{count} must be {len(token_ids)} beside as many {name}, got "
                f"{getattr(params, count)}",
                count,
            )


def _first_scored(params: SamplingParams, prompt_length: int) -> int:
    start = params.prompt_logprobs_start
    if params.prompt_logprobs is None:
        if start:
            raise InvalidRequest(
                f"prompt_logprobs_start = {start} is allowed only with prompt_logprobs",
                "prompt_logprobs_start",
            )
        return prompt_length
    if start > prompt_length:
        raise InvalidRequest(
            f"prompt_logprobs_start lies after the last of the prompt's {prompt_length} tokens",
            "prompt_logprobs_start",
        )
    return max(start if start >= 0 else prompt_length + start, 1)


def _check_state(request: Request, prompt_length: int, model: ModelConfig) -> None:
    """Check what a request gives of a state, or asks for one."""
    length, num_bytes = request.state_length, len(request.state)
    if not 0 <= length < prompt_length:
        raise InvalidRequest(
            f"state_length must be 0 … {prompt_length - 1}, since the prompt's last token is fed; "
            f"got {length}",
            "state_length",
        )
    expected = 4 * model.state_width if length else 0
    if num_bytes != expected:
        raise InvalidRequest(f"state must have {expected} bytes, got {num_bytes}", "state")
    params = request.params
    is_alone = params.n == 1 and params.max_tokens == 0 and params.prompt_logprobs is None
    if request.returns_state and not (is_alone and not request.durable):
        raise InvalidRequest(
            "returns_state must be alone: n = 1, max_tokens = 0, no prompt_logprobs, not durable; "
            f"got n = {params.n}, max_tokens = {params.max_tokens}",
            "returns_state",
        )


def _check_scoring(request: Request, first_scored: int, prompt_length: int) -> None:
    params = request.params
    if params.max_tokens == 0 and first_scored >= prompt_length and not request.returns_state:
        raise InvalidRequest(
            "max_tokens must be at least 1, or 0 with prompt_logprobs of a token that is not the "
            f"first; got 0, prompt_logprobs = {params.prompt_logprobs}, {prompt_length} tokens",
            "max_tokens",
        )
    if params.logprobs and request.emit == "final":
        raise InvalidRequest(
            "logprobs must be 0 where emit is final, since alternatives are not kept; "
            f"got {params.logprobs}",
            "logprobs",
        )


class RequestRegistry:
    """Groups by request id and by first sequence id."""

    def __init__(self, admission: Admission) -> None:
        self.by_id: dict[str, SequenceGroup] = {}
        self.by_first_id: dict[int, SequenceGroup] = {}
        self.unreported: set[int] = (
            set()
        )  # ids of sequences of which all so far is to be sent again
        self._admission = admission
        self._table, self._latencies = admission.table, admission.latencies

    def acquire_table(self, group: SequenceGroup) -> None:
        """Give a group's automaton room, until it is forgotten. Raises Overloaded if there is none.
        The group must be entered next."""
        if group.automaton is not None:
            constraint = group.request.params.constraint
            group.table = self._table.tables.acquire(constraint, group.automaton)

    def enter(self, group: SequenceGroup) -> None:
        """Add an accepted request."""
        self.by_id[group.request.id] = self.by_first_id[group.first_id] = group
        self._admission.enter(group)
        self._latencies.arrive(group)

    def report_again(self, group: SequenceGroup, indices: I64) -> None:
        """Have all tokens of these samples sent again, the earlier ones included."""
        if group.request.emit == "delta":
            self.unreported.update((group.first_id + indices).tolist())

    def drop(self, group: SequenceGroup) -> None:
        """Take the group out of everything and free its slots at once."""
        self._admission.leave(group)
        self._forget(group)

    def count_ends(self, slots: I64) -> list[str]:
        """Count sequences that ended in these slots; return the ids of requests that finishes."""
        finished = []
        first_ids, counts = np.unique(self._table.first_id[slots], return_counts=True)
        for first_id, count in zip(first_ids.tolist(), counts.tolist(), strict=True):
            group = self.by_first_id[first_id]
            group.unfinished -= count
            self._admission.shares.own(group.share, group.request.precedence, -count)
            if not group.unfinished:
                finished.append(group.request.id)
                self._latencies.finish(group)
                self._forget(group)
        return finished

    def _forget(self, group: SequenceGroup) -> None:
        del self.by_id[group.request.id], self.by_first_id[group.first_id]
        self._admission.shares.leave(group.share, group.request.precedence)
        if self.unreported:
            ids = range(group.first_id, group.first_id + group.request.params.n)
            self.unreported = {id for id in self.unreported if id not in ids}
        if group.stop_row >= 0:
            self._admission.stop_sets.release(group.stop_ids)
        self._table.named.pop(group.first_id, None)
        if group.table:
            self._table.tables.release(group.request.params.constraint)
