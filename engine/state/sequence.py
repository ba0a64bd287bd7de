"""SequenceGroup: an accepted request and how far its n sequences are.

A group is one object whatever n is: a prefill, a count and a cursor. What a single sequence needs
while it runs is a row of `engine.state.slots.SlotTable`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from srm.engine.constraints.automaton import TokenAutomaton
from srm.engine.messages import Request
from srm.engine.state.fair_share import FairShare
from srm.engine.state.prefixes import NO_SLOT, Order, Prefix
from srm.engine.steps.batch import I32, I64
from srm.engine.steps.token_edits import EditPlan

NO_SLOTS: I32 = np.empty(0, np.int32)
PATIENCE = 16
"""How many times its own length a prompt lets arrive later and be fed earlier, in tokens. So the
shorter ones come first, and none is passed for ever."""
STREAMS = 2**40
"""A request's stream numbers lie below; the bits above are for whoever owns the engine."""


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """The n sequences sampled from one prompt. Sample i is the sequence `first_id + i`."""

    request: Request
    prompt: I32  # i32[prompt length]
    stop_ids: frozenset[int]
    first_scored: int  # prompt token from which on scores are wanted; its length: of none
    first_id: int
    max_outputs: int
    """Tokens each sequence may sample: max_tokens, cut to what the context has left. 0: the prompt
    is scored, and no sequence ever starts."""
    edits: EditPlan | None  # edits of its sequences' logits, if any
    unfinished: int  # sequences without a terminal Output
    samples: I64 | None = None
    """i64[n] which samples of a request that engines share its sequences are; None: 0, 1, 2, …"""
    automaton: TokenAutomaton | None = None  # of its constraint, if that has a table
    table: int = 0  # where that begins, from when it is entered on
    state_length: int = 0
    """Prompt tokens after which the request gives the state; 0 once that is of other weights."""
    num_bytes: int = 0  # about how many bytes remembering the request takes
    to_start: int = 0
    """Sequences that start anew: all n, but for a cut and for those that were parked."""
    started: int = 0  # how many of these were given a slot
    start_below: int = field(init=False)
    """Samples before this one may start."""
    begun_at: int = 0  # how many were when its prompt was last begun
    waiting: int = 0  # how many are counted as waiting for slots
    fresh: I64 | None = None
    """i64[to_start or more] which samples start anew, ascending; None: 0, 1, 2, …"""
    share: FairShare = field(init=False)
    """Share that its slots count for, from when it is in line on."""
    prefilled: int = 0  # prompt tokens that were cached or fed by prefill rows
    cached: int = 0  # prompt tokens whose state was there when it was first begun
    scored: int = 0  # prompt tokens whose scores have been sent
    scored_before: int = 0  # the same when its prompt was last begun anew: they are not sent again
    first_version: int = 0
    """Version of the weights that its first sequence started with; 0: of those in use."""
    slot: int = NO_SLOT  # slot of the only sequence, while its prompt is prefilled
    state_slot: int = NO_SLOT  # slot of the state after the prefilled tokens
    prefix: Prefix | None = None
    """Prefix that the sequences fork from: the prompt without its last token. None: the only
    sequence's prompt is prefilled in its own slot."""
    fills: list[Prefix] = field(default_factory=list)
    """Prefixes that its prefill is still to make, the shortest first."""
    pinned: list[Prefix] = field(default_factory=list)
    """Prefixes that it reads, writes, or is to read."""
    awaited: Prefix | None = None  # prefix that another request is to make before this one begins
    unforked: int = 0
    """Started sequences whose first step, which reads the prefix, is still to come."""
    rank: int = 0
    """Prompt tokens that had arrived before it, and `PATIENCE` times its own."""
    arrived: float = 0.0  # when it was accepted, in seconds, as are the next two
    taken_up: float | None = None  # when its prompt's turn came
    finished: float = 0.0  # when its last sequence ended
    sampled: int = 0  # tokens of its sequences that have ended, as far as they are counted
    longest: int = 0  # most tokens of any of these sequences
    stop_row: int = -1  # row of the stop table, from the first slot on
    slots: I32 = field(default_factory=lambda: NO_SLOTS)
    """i32[n], from the first slot on: the last one that each sample was given, if any; some may
    have been given back, and be others' by now."""

    def __post_init__(self) -> None:
        wave = self.request.first_wave
        self.start_below = self.request.params.n if wave is None else wave

    @property
    def order(self) -> Order:
        """Served first is largest: higher priority, then a short prompt, then earlier arrival."""
        return (self.request.priority, -self.rank, -self.first_id)

    @property
    def turn(self) -> tuple[int, Order]:
        """The same within its share: the highest precedence comes first there."""
        return (self.request.precedence, self.order)

    @property
    def unstarted(self) -> int:
        return self.to_start - self.started

    @property
    def startable(self) -> int:
        """Unstarted sequences that may start now."""
        return self.unstarted - self.unstarted_from(self.start_below)

    @property
    def reach(self) -> int:
        """Index from which on no sample has ever been given a slot."""
        return len(self.slots) if self.fresh is not None else self.started

    def samples_at(self, indices: I64) -> I64:
        """Numbers, i64, that these of its sequences have among the samples of the whole request."""
        return indices if self.samples is None else self.samples[indices]

    def unstarted_from(self, index: int) -> int:
        """Samples from this one on that are still to start."""
        first = index if self.fresh is None else int(np.searchsorted(self.fresh, index))
        return max(0, self.to_start - max(self.started, first))

    def next_fresh(self, count: int) -> I64:
        """The next samples to start: i64[count]."""
        if self.fresh is None:
            return np.arange(self.started, self.started + count, dtype=np.int64)
        return self.fresh[self.started : self.started + count]

    def start_anew(self, indices: I64) -> None:
        """Make these samples, ascending, the only ones to start."""
        self.fresh = indices
        self.started, self.to_start = 0, len(indices)

    def remember(self, indices: I64 | slice, slots: I32) -> None:
        """Note that these samples were given these slots."""
        if not len(self.slots):
            self.slots = np.zeros(self.request.params.n, np.int32)
        self.slots[indices] = slots

    def start(self, slots: I32) -> None:
        """Note that the next samples were given these slots."""
        is_all = self.fresh is None
        next_ones = slice(self.started, self.started + len(slots))
        self.remember(next_ones if is_all else self.next_fresh(len(slots)), slots)
        self.started += len(slots)

    @property
    def num_unprefilled(self) -> int:
        """Prompt tokens still to prefill. The last one never is: it is the first decode row."""
        return len(self.prompt) - 1 - self.prefilled

    @property
    def needs_prefix(self) -> bool:
        """Whether a prefill is not made in a sequence's slot, since several share it, or none."""
        is_shared = self.request.params.n > 1 or self.request.returns_state
        return is_shared and len(self.prompt) > 1

    @property
    def next_stop(self) -> int:
        """Position at which the next prefill row ends at the latest. One that scores nothing ends
        before the token whose next one is scored first."""
        stop = self.fills[0].length if self.fills else len(self.prompt) - 1
        return min(stop, self.num_quiet) if self.prefilled < self.num_quiet else stop

    @property
    def num_quiet(self) -> int:
        """Prompt tokens, the first ones, that are fed without a score of the next one: it is not
        wanted, or was sent before the prompt was begun anew."""
        return self.first_scored - 1 + self.scored_before

    @property
    def is_resumable(self) -> bool:
        """Whether its progress is kept: its caller sends it again, and gets all again."""
        params = self.request.params
        return self.request.durable and params.prompt_logprobs is None and not params.logprobs

    @property
    def is_scored(self) -> bool:
        """Whether its prompt's scores are wanted and have not all been sent."""
        return self.scored < len(self.prompt) - self.first_scored
