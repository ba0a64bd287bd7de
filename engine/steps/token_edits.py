"""Token edits that callers ask for: penalties, biases and bans, of a request and of a step.

An EditPlan is what one request asks for, checked and as bytes that a batch can take; an EditList
puts the rows of a step together. A row needs no Python object per token: its history is copied. The
device does the arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from srm.engine.config import ModelConfig
from srm.engine.constraints.grammars import Grammar
from srm.engine.messages import MAX_BIAS, MAX_PENALTY, REPETITION_PENALTIES, SamplingParams
from srm.engine.steps.batch import I32, I64, NO_EDITS, Edits, Span
from srm.errors import InvalidRequest

NO_PENALTIES = (1.0, 0.0, 0.0)  # repetition, frequency, presence


@dataclass(frozen=True, slots=True, eq=False)
class EditPlan:
    """The edits of a request's rows. Lists of tokens are int32 in bytes."""

    penalties: tuple[float, float, float]
    min_tokens: int  # rows that have sampled fewer may not end
    biases: bytes  # float32, of the BIASED tokens
    lists: dict[Span, bytes]
    """Lists that are the same for all rows: all but SAMPLED, where not empty."""
    ends: bytes  # tokens that are also banned before min_tokens
    longer: dict[bytes, bytes]
    """Bad words of three tokens and more: all but the last two, and PAIRS of these."""
    openings: tuple[bytes, ...]  # the keys of `longer`, as `bytes.endswith` takes them
    grammar: Grammar | None = None
    """What its rows may sample, where that is constrained. `min_tokens` is for its masks then."""

    @property
    def is_penal(self) -> bool:
        return self.penalties != NO_PENALTIES

    @property
    def reads_history(self) -> bool:
        """Whether it depends on what was sampled before the last token."""
        return self.is_penal or bool(self.longer)

    @property
    def has_own(self) -> bool:
        """Whether there is more to it than a grammar."""
        return self.min_tokens > 0 or self.reads_history or bool(self.lists)

    def has_edits(self, num_sampled: int) -> bool:
        """Whether a row that has sampled so many tokens is to be edited; masks are not counted."""
        is_early = num_sampled < self.min_tokens and self.grammar is None
        return is_early or self.reads_history or bool(self.lists)


def plan_edits(
    params: SamplingParams,
    prompt: I32,
    end_ids: frozenset[int],
    model: ModelConfig,
    grammar: Grammar | None = None,
) -> EditPlan | None:
    """Plan the edits of a request's rows; None if there are none. `end_ids` are banned until
    `min_tokens`, but where a `grammar` allows nothing else. Raises InvalidRequest for what is not
    allowed, or could leave a row no token."""
    words = params.bad_words
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    lists_tokens = params.logit_bias or params.allowed_token_ids or words
    has_more = lists_tokens or params.min_tokens or params.constraint
    if penalties == NO_PENALTIES and not has_more:
        return None
    _check_ranges(params)
    check_ids("logit_bias", params.logit_bias, model.vocab_size)
    check_ids("allowed_token_ids", params.allowed_token_ids, model.vocab_size)
    check_ids("bad_words", chain(*words), model.vocab_size)
    if not all(words):
        raise InvalidRequest("bad_words must be sequences of at least one token each", "bad_words")
    _check_choice(params, end_ids, model.vocab_size)
    repeats = np.unique(prompt) if params.repetition_penalty != 1 else ()
    lists = {
        Span.BIASED: _ids(params.logit_bias),
        Span.ALLOWED: _ids(params.allowed_token_ids),
        Span.BANNED: _ids(word[0] for word in words if len(word) == 1),
        Span.PAIRS: b"".join(_ids(word) for word in words if len(word) == 2),
        Span.PROMPT: _ids(repeats),
    }
    longer: dict[bytes, bytes] = {}
    for word in words:
        if len(word) > 2:
            longer[_ids(word[:-2])] = longer.get(_ids(word[:-2]), b"") + _ids(word[-2:])
    plan = EditPlan(
        penalties=penalties,
        min_tokens=params.min_tokens,
        biases=np.fromiter(params.logit_bias.values(), "<f4").tobytes(),
        lists={span: ids for span, ids in lists.items() if ids},
        ends=_ids(end_ids) if params.min_tokens else b"",
        longer=longer,
        openings=tuple(longer),
        grammar=grammar,
    )
    return plan if plan.has_own or grammar else None


class EditList:
    """The edits of a step, row by row."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._spans: list[list[int]] = []
        self._penalties: list[tuple[float, float, float]] = []
        self._biased: list[bytes] = []
        self._biases: list[bytes] = []
        self._num_biased = 0
        self._tokens: list[bytes] = []  # of all other lists
        self._num_tokens = 0
        self._shared: dict[tuple[int, bool], list[int]] = {}  # by plan and whether it is early

    def add(self, row: int, plan: EditPlan, num_sampled: int, known: bytes) -> None:
        """Edit a decode row; rows ascend. `known` are the tokens it has sampled but for the last
        one."""
        key = (id(plan), plan.grammar is None and num_sampled < plan.min_tokens)
        spans = self._shared.get(key)
        if spans is None:
            spans = self._shared[key] = self._share(plan, key[1])
        spans = spans.copy()
        if plan.openings and known.endswith(plan.openings):
            openings = [
                plan.longer[opening] for opening in plan.openings if known.endswith(opening)
            ]
            self._put(spans, Span.PAIRS, b"".join([plan.lists.get(Span.PAIRS, b""), *openings]))
        if plan.is_penal:
            self._put(spans, Span.SAMPLED, known)
        self._rows.append(row)
        self._spans.append(spans)
        self._penalties.append(plan.penalties)

    def build(self) -> Edits:
        """Return the edits of all rows that were added."""
        if not self._rows:
            return NO_EDITS
        spans = np.array(self._spans, np.int32)
        spans[:, 2 * Span.BIASED + 2 : 2 * Span.MASK] += self._num_biased
        return Edits(
            rows=np.array(self._rows, np.int32),
            spans=spans,
            penalties=np.array(self._penalties, np.float32),
            tokens=np.frombuffer(b"".join([*self._biased, *self._tokens]), np.int32),
            biases=np.frombuffer(b"".join(self._biases), np.float32),
            masks=NO_EDITS.masks,
        )

    def _share(self, plan: EditPlan, is_early: bool) -> list[int]:
        """Return the spans of the lists that a plan's rows share: its early rows, or the others."""
        spans = [0] * (2 * len(Span))
        biased = plan.lists.get(Span.BIASED, b"")
        spans[:2] = self._num_biased, self._num_biased + len(biased) // 4
        self._num_biased = spans[1]
        self._biased.append(biased)
        self._biases.append(plan.biases)
        lists = plan.lists
        if is_early:
            lists = lists | {Span.BANNED: lists.get(Span.BANNED, b"") + plan.ends}
        for span, ids in lists.items():
            if span != Span.BIASED:
                self._put(spans, span, ids)
        return spans

    def _put(self, spans: list[int], span: Span, ids: bytes) -> None:
        start = self._num_tokens
        self._num_tokens += len(ids) // 4
        self._tokens.append(ids)
        spans[2 * span : 2 * span + 2] = start, self._num_tokens


def add_masks(edits: Edits, rows: I64, masks: I32) -> Edits:
    """Return the edits with masks, i32[k, words], of k decode rows, which ascend."""
    both = np.union1d(edits.rows, rows)
    edited, masked = np.searchsorted(both, edits.rows), np.searchsorted(both, rows)
    spans = np.zeros((len(both), 2 * len(Span)), np.int32)
    penalties = np.tile(np.array(NO_PENALTIES, np.float32), (len(both), 1))
    spans[edited], penalties[edited] = edits.spans, edits.penalties
    begins = np.arange(len(rows)) * masks.shape[1]
    spans[masked, 2 * Span.MASK], spans[masked, 2 * Span.MASK + 1] = begins, begins + masks.shape[1]
    return replace(
        edits,
        rows=both.astype(np.int32),
        spans=spans,
        penalties=penalties,
        masks=masks.reshape(-1),
    )


def without_ends(mask: I32, ends: bytes) -> I32:
    """Return the mask without these tokens, or as it is if it allows no other."""
    ids = np.frombuffer(ends, "<i4")
    without = mask.copy()
    np.bitwise_and.at(without, ids // 32, ~(np.int32(1) << ids % 32))
    return without if without.any() else mask


def _ids(token_ids: Iterable[int]) -> bytes:
    return np.fromiter(token_ids, "<i4").tobytes()


def check_ranges(params: SamplingParams, *checks: tuple[str, bool, str]) -> None:
    """Raise InvalidRequest for the first of the (field, is valid, allowed) that is not valid."""
    for name, is_valid, allowed in checks:
        if not is_valid:
            raise InvalidRequest(f"{name} must be {allowed}, got {getattr(params, name)}", name)


def check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise InvalidRequest, of the field `name`, for the first id beyond the vocabulary."""
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(f"{name} holds {token}; ids are 0 … {vocab_size - 1}", name)


def _check_ranges(params: SamplingParams) -> None:
    low, high = REPETITION_PENALTIES
    check_ranges(
        params,
        ("presence_penalty", abs(params.presence_penalty) <= MAX_PENALTY, f"±{MAX_PENALTY:g}"),
        ("frequency_penalty", abs(params.frequency_penalty) <= MAX_PENALTY, f"±{MAX_PENALTY:g}"),
        ("repetition_penalty", low <= params.repetition_penalty <= high, f"{low:g} … {high:g}"),
        ("min_tokens", 0 <= params.min_tokens <= params.max_tokens, f"0 … {params.max_tokens}"),
    )
    for token, bias in params.logit_bias.items():
        if not abs(bias) <= MAX_BIAS:
            raise InvalidRequest(
                f"logit_bias must be ±{MAX_BIAS:g}, got {bias} for {token}", "logit_bias"
            )


def _check_choice(params: SamplingParams, end_ids: frozenset[int], vocab_size: int) -> None:
    """Check that some token is never banned, so that every row has one to sample."""
    if params.constraint:
        for name in ("allowed_token_ids", "bad_words", "ignore_eos"):
            if getattr(params, name):
                raise InvalidRequest(
                    f"{name} does not go with a constraint, which says what may be sampled", name
                )
        return
    bannable = {word[-1] for word in params.bad_words}
    if params.min_tokens:
        bannable |= end_ids
    choice = set(params.allowed_token_ids) or range(vocab_size)
    if len(bannable) < len(choice) or not bannable.issuperset(choice):
        return
    names = [name for name in ("allowed_token_ids", "bad_words") if getattr(params, name)]
    names += ["min_tokens"] if params.min_tokens else []
    raise InvalidRequest(
        f"{' and '.join(names)} must leave a token that may always be sampled; all of the "
        f"{len(choice)} that are allowed could be banned",
        names[0],
    )
