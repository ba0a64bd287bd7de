"""SlotTable: what the host keeps per slot, as arrays; StopSets: which tokens end a sequence.

A slot is one row of the device's state pool. Here is who owns it and what its next decode row will
say: between take and free only its position changes, and decides that row. The pool's rows behind
these belong to `engine.state.prefixes`. Keeps: a slot is free or owned by exactly one sequence.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from srm.engine.constraints.automaton import UNREACHABLE
from srm.engine.constraints.byte_table import START
from srm.engine.constraints.grammars import Grammar, Matchers
from srm.engine.messages import GREEDY_BELOW, LEAST_TOP_P
from srm.engine.random_streams import sample_seeds
from srm.engine.state.parked import Parked
from srm.engine.state.sequence import SequenceGroup
from srm.engine.state.switches import Switches
from srm.engine.state.tables import Tables, walk_each
from srm.engine.steps.batch import F32, FROM_DEVICE, I32, I64, SAMPLING, Bool
from srm.engine.steps.token_edits import EditPlan

BLOCK = 16  # positions in a block: a cache line of 4-byte values


class History:
    """4-byte values by (slot, position), of which only what is written takes memory.

    A step writes one value for each of its rows, at whatever position each is. So the values of a
    slot do not lie in one row, which would be a cache line and a page of its own for every write;
    they lie in blocks of one cache line, `[block of positions][slot][position in the block]`.
    Neighbouring slots share pages, and short sequences leave the blocks of long ones untouched.
    """

    def __init__(self, num_slots: int, n_ctx: int, dtype: type[np.int32 | np.float32]) -> None:
        self._num_slots = num_slots
        num_blocks = -(-n_ctx // BLOCK)
        # The operating system maps what was never written to nothing.
        self._blocks: npt.NDArray[np.int32 | np.float32] = np.empty(
            (num_blocks, num_slots, BLOCK), dtype
        )

    @property
    def nbytes(self) -> int:
        """Bytes taken once everything was written."""
        return self._blocks.nbytes

    def read_each(self, slots: I64, positions: I32 | I64) -> npt.NDArray[np.int32 | np.float32]:
        """Return one value of each slot."""
        return self._blocks.reshape(-1)[self._places(slots, positions)]

    def put(self, slots: I64, positions: I32 | I64, values: I32 | F32) -> None:
        """Store one value for each slot."""
        self._blocks.reshape(-1)[self._places(slots, positions)] = values

    def _places(self, slots: I64, positions: I32 | I64) -> I64:
        blocks, places = positions.astype(np.int64) // BLOCK, positions % BLOCK
        return (blocks * self._num_slots + slots) * BLOCK + places

    def read(self, slot: int, start: int, stop: int) -> bytes:
        """A slot's values at positions start … stop - 1."""
        first = start // BLOCK
        history = self._blocks[first : -(-stop // BLOCK), slot].tobytes()
        return history[4 * (start - first * BLOCK) : 4 * (stop - first * BLOCK)]


FREE = -1
"""Sequence id of a free slot. An id is never used again, so it tells a slot's owners apart."""
NO_LOGPROBS = -1
"""Number of alternatives where not even the sampled token's log-probability is wanted."""
FINAL, DELTA, TOKENS = range(3)
EMITS = {"final": FINAL, "delta": DELTA, "tokens": TOKENS}
"""Codes of `Request.emit`, which says when and how a sequence reports its tokens."""


class SlotTable:
    """Arrays of length num_slots, indexed by slot.

    `position` and `is_running` are the scheduler's truth, ahead of the device by at most one step;
    `output_tokens` are what has come back.
    """

    def __init__(self, num_slots: int, n_ctx: int) -> None:
        self.num_slots = num_slots
        self.n_ctx = n_ctx
        self.num_free = num_slots
        self.num_streaming = 0  # owned slots that speak after each step
        self.num_asking = 0  # owned slots whose tokens want alternatives
        self.free_slots = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        """i32[num_slots], a stack of which the first `num_free` count."""
        # Who owns the slot.
        self.sequence_id = np.full(num_slots, FREE, np.int64)  # i64, or FREE
        self.first_id = np.full(num_slots, FREE, np.int64)  # i64 of the owner's group, or FREE
        self.share = np.zeros(num_slots, np.int32)  # i32 the place of its share in Shares
        self._has_shares = False  # `share` is not all zeros, as it is where nobody divides anything
        self.precedence = np.zeros(num_slots, np.int16)  # i16 of its request
        self._has_precedences = False  # `precedence` is not all zeros
        # The next decode row.
        self.is_running = np.zeros(num_slots, np.bool_)  # bool: has a next decode row
        self.position = np.zeros(num_slots, np.int32)  # i32
        # The first one in this slot, and the last one.
        self.is_new = np.zeros(num_slots, np.bool_)  # bool: the device knows nothing of it yet
        self.first_read = np.zeros(num_slots, np.int32)  # i32 the prefix to fork from, or its own
        self.first_token = np.zeros(num_slots, np.int32)  # i32 last prompt token, or FROM_DEVICE
        self.first_position = np.zeros(num_slots, np.int32)  # i32 of the last prompt token
        self.last_position = np.zeros(num_slots, np.int32)  # i32 where it samples its last token
        # How it samples and ends.
        self.sampling = np.zeros(num_slots, SAMPLING)
        self.stop_row = np.zeros(num_slots, np.int32)  # i32 row of StopSets.table
        self.emit = np.zeros(num_slots, np.uint8)  # u8 FINAL, DELTA or TOKENS
        self.stream = np.zeros(num_slots, np.int64)  # i64 its number in Tokens
        self.num_logprobs = np.full(num_slots, NO_LOGPROBS, np.int32)  # i32 alternatives wanted
        self.named: dict[int, tuple[int, ...]] = {}
        """Tokens wanted as alternatives, by the owner's group where it names them."""
        self.is_edited = np.zeros(num_slots, np.bool_)  # bool: its logits are edited
        self.is_masked = np.zeros(num_slots, np.bool_)  # bool: a grammar says what it may sample
        self.edits: dict[int, EditPlan] = {}  # by slot, where edited or masked
        self.num_masked = 0  # owned slots of which one does
        self.keeps_end = np.zeros(num_slots, np.bool_)  # bool: its last state is kept
        self.num_keeping = 0  # owned slots of which it is
        self.waits = np.zeros(num_slots, np.bool_)  # bool: has no next row until its last is known
        self.num_in_wait = 0  # owned slots of which that is so
        self.matchers = Matchers()
        self.tables = Tables()
        # What it has sampled, by the position of the row that sampled it.
        self.output_tokens = History(num_slots, n_ctx, np.int32)
        self.output_logprobs: History | None = None  # from the first asker on
        self.switches = Switches()
        """Which weights made what, of sequences in slots and parked ones."""

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, untouched memory included, which takes nothing yet."""
        arrays = [array for array in vars(self).values() if isinstance(array, np.ndarray | History)]
        return sum(array.nbytes for array in arrays)

    @property
    def num_owned(self) -> int:
        return self.num_slots - self.num_free

    def grammar(self, slot: int) -> Grammar:
        """Return the grammar of a masked slot."""
        grammar = self.edits[slot].grammar
        assert grammar is not None
        return grammar

    def assign_slots(self, group: SequenceGroup, count: int) -> I32:
        """Take slots for a group's next `count` sequences, with all that a first row needs."""
        return self._assign(group, group.next_fresh(count))

    def take_back(self, group: SequenceGroup, parked: Parked) -> I32:
        """Take slots for sequences that were parked, with everything that they had in others."""
        slots = self._assign(group, parked.indices)
        self.position[slots] = parked.positions
        self.first_read[slots], self.first_token[slots] = slots, FROM_DEVICE
        if group.automaton is not None:
            self.sampling["state"][slots] = ~walk_each(group.automaton, parked.tokens)
        first = len(group.prompt) - 1
        counts = (parked.positions - first).astype(np.int64)
        # For each token: its sequence's slot, and its place in the sequence.
        whose = np.repeat(slots.astype(np.int64), counts)
        places = np.arange(len(whose)) - np.repeat(np.cumsum(counts) - counts, counts)
        tokens = np.frombuffer(b"".join(parked.tokens), "<i4")
        self.output_tokens.put(whose, first + places, tokens)
        if group.request.params.logprobs is not None:
            assert self.output_logprobs is not None
            logprobs = np.frombuffer(b"".join(parked.logprobs), "<f4")
            self.output_logprobs.put(whose, first + places, logprobs)
        return slots

    def _assign(self, group: SequenceGroup, indices: I64) -> I32:
        """Take slots for these samples of a group, each at its beginning."""
        count = len(indices)
        assert count <= self.num_free, "more slots were taken than are free"
        self.num_free -= count
        slots = self.free_slots[self.num_free : self.num_free + count].copy()
        # A slice of one is many times faster than an array of one.
        at = slots if count > 1 else slice(slots[0], slots[0] + 1)
        params, samples = group.request.params, group.samples_at(indices)
        self.sequence_id[at] = group.first_id + indices
        self.first_id[at] = group.first_id
        if self._has_shares or group.share.place:
            self._has_shares = True
            self.share[at] = group.share.place
        if self._has_precedences or group.request.precedence:
            self._has_precedences = True
            self.precedence[at] = group.request.precedence
        first = len(group.prompt) - 1
        self.position[at] = self.first_position[at] = first
        self.first_read[at] = slots if group.prefix is None else group.prefix.slot
        self.first_token[at] = group.prompt[-1]
        self.last_position[at] = first + group.max_outputs - 1
        own = np.empty(count, SAMPLING)
        is_greedy = params.temperature < GREEDY_BELOW
        own["temperature"] = 0.0 if is_greedy else params.temperature
        own["top_k"], own["min_p"] = params.top_k, params.min_p
        own["top_p"] = max(params.top_p, LEAST_TOP_P)
        own["seed"] = sample_seeds(params.seed, samples)
        own["table"], own["state"] = group.table, ~START
        own["last_position"] = first + min(_count_room(group), UNREACHABLE) - 1
        self.sampling[at] = own
        self.is_new[at] = True
        self.stop_row[at] = group.stop_row
        emit = EMITS[group.request.emit]
        self.emit[at] = emit
        self.num_streaming += count if emit != FINAL else 0
        self.stream[at] = group.request.stream + samples
        self.num_logprobs[at] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.num_asking += count if params.logprobs else 0
        if params.logprob_token_ids:
            self.named[group.first_id] = params.logprob_token_ids
        if group.edits is not None:
            self.is_edited[at] = group.edits.has_own
            self.edits.update(dict.fromkeys(slots.tolist(), group.edits))
            if group.edits.grammar is not None:
                self.is_masked[at] = True
                self.num_masked += count
        if group.request.keeps_ends:
            self.keeps_end[at] = True
            self.num_keeping += count
        # A state that is kept may not have been fed the token that ends its sequence.
        if self.is_masked[slots[0]] or (group.request.keeps_ends and params.stop_token_ids):
            self.waits[at] = True
            self.num_in_wait += count
        if params.logprobs is not None and self.output_logprobs is None:
            self.output_logprobs = History(self.num_slots, self.n_ctx, np.float32)
        return slots

    def num_tokens(self) -> tuple[I64, I64]:
        """Return the sequences that own slots, and how many tokens each has sampled, between two
        steps with none under way."""
        slots = np.flatnonzero(self.sequence_id != FREE)
        counts = self.position[slots] - self.first_position[slots]
        return self.sequence_id[slots], counts.astype(np.int64)

    def unforked(self, slots: I64) -> I64:
        """Select the slots whose sequences are still to read a prefix, for their first row."""
        is_first: Bool = self.position[slots] == self.first_position[slots]
        reads_other: Bool = self.first_read[slots] != slots
        return slots[is_first & reads_other]

    def free(self, slots: I32 | I64) -> None:
        """Give slots back. What the device holds there needs no cleaning: position 0 ignores it."""
        assert (self.sequence_id[slots] != FREE).all(), "a slot was freed twice"
        if self.num_streaming:
            self.num_streaming -= int(np.count_nonzero(self.emit[slots]))
            self.emit[slots] = FINAL
        if self.num_asking:
            self.num_asking -= int(np.count_nonzero(self.num_logprobs[slots] > 0))
        if self.edits:
            for slot in slots[self.is_edited[slots] | self.is_masked[slots]].tolist():
                del self.edits[slot]
            self.is_edited[slots] = False
        if self.num_masked:
            masked = slots[self.is_masked[slots]]
            self.num_masked -= len(masked)
            self.matchers.forget(masked.tolist())
            self.is_masked[masked] = False
        if self.num_keeping:
            self.num_keeping -= int(np.count_nonzero(self.keeps_end[slots]))
            self.keeps_end[slots] = False
        if self.num_in_wait:
            self.num_in_wait -= int(np.count_nonzero(self.waits[slots]))
            self.waits[slots] = False
        self.num_logprobs[slots] = NO_LOGPROBS
        self.sequence_id[slots] = self.first_id[slots] = FREE
        self.is_running[slots] = False
        self.free_slots[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)

    def advance(self, slots: I64, positions: I32, ends: Bool) -> None:
        """Advance slots, whose decode rows at these positions are in a batch. One that a grammar
        masks, say, has no next row until it is known what this one samples."""
        self.position[slots] = positions + 1
        self.is_running[slots[ends]] = False
        if self.num_in_wait:
            self.is_running[slots[self.waits[slots]]] = False

    def record(self, slots: I64, positions: I32, tokens: I32, logprobs: F32) -> None:
        """Store what the slots' rows at these positions sampled."""
        if self.num_in_wait:
            goes_on = self.waits[slots] & (positions < self.last_position[slots])
            self.is_running[slots[goes_on]] = True
        self.output_tokens.put(slots, positions, tokens)
        if self.output_logprobs is not None:
            self.output_logprobs.put(slots, positions, logprobs)


def _count_room(group: SequenceGroup) -> int:
    """Return how many tokens a table may plan for: one more than may be sampled where the shortest
    text leaves none for the token that ends it, which is left out then."""
    least = 0 if group.automaton is None else int(group.automaton.distance[START])
    return group.max_outputs + (group.max_outputs < least)


class StopSets:
    """Distinct sets of ending tokens as rows of one table; equal sets share a row.

    `table[row, token]` answers "does this token end it" in one look-up, however many tokens a set
    has; `may_end[token]` whether it ends anything, or is -1 for a failure: usually, it does not.
    """

    def __init__(self, vocab_size: int) -> None:
        self.table = np.zeros((1, vocab_size), np.bool_)  # bool[rows, vocab_size]
        self.may_end = np.zeros(vocab_size + 1, np.bool_)  # bool[vocab_size + 1], the last for -1
        self.may_end[-1] = True
        self._rows: dict[frozenset[int], int] = {}
        self.users: dict[frozenset[int], int] = {}
        """How many use each set."""
        self._unused = [0]

    def acquire(self, token_ids: frozenset[int]) -> int:
        """The set's row, kept until as many `release` as `acquire` were called."""
        self.users[token_ids] = self.users.get(token_ids, 0) + 1
        if token_ids not in self._rows:
            row = self._rows[token_ids] = self._unused.pop() if self._unused else self._grow()
            self.table[row, list(token_ids)] = True
            self.may_end[list(token_ids)] = True
        return self._rows[token_ids]

    def release(self, token_ids: frozenset[int]) -> None:
        self.users[token_ids] -= 1
        if not self.users[token_ids]:
            del self.users[token_ids]
            row = self._rows.pop(token_ids)
            self._unused.append(row)
            self.table[row] = False
            self.may_end[list(token_ids)] = self.table[:, list(token_ids)].any(axis=0)

    def _grow(self) -> int:
        rows = len(self.table)
        self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        self._unused = list(range(2 * rows - 1, rows, -1))
        return rows
