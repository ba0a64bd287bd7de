"""SlotTable: what the host keeps per slot, as arrays; StopSets: which tokens end a sequence.

A slot is one row of the device's state pool. Here is who owns it and what its next decode row will
say; the rows behind these are those of `engine.prefixes`. Knows no order of service and no device.
Keeps: a slot is free or owned by exactly one sequence.
"""

from __future__ import annotations

import numpy as np

from engine.batch import F32, FROM_DEVICE, I32, I64, Bool
from engine.sequence import SequenceGroup, sample_seeds

FREE = -1
"""In place of a sequence id. An id is never used again, so it tells a slot's owners apart."""
NO_LOGPROBS = -1
"""In place of a number of alternatives: not even the chosen token's is wanted."""


class SlotTable:
    """Arrays of length num_slots, indexed by slot.

    `position`, `remaining`, `read_slot` and `next_token` are the scheduler's truth, ahead of the
    device by at most one step; `num_outputs` and `output_tokens` are what has come back.
    """

    def __init__(self, num_slots: int, n_ctx: int) -> None:
        self.num_slots = num_slots
        self.n_ctx = n_ctx
        self.num_free = num_slots
        self.num_asking = 0  # owned slots whose tokens want alternatives
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)  # i32, a stack
        # Who owns the slot.
        self.sequence_id = np.full(num_slots, FREE, np.int64)  # i64, or FREE
        self.first_id = np.full(num_slots, FREE, np.int64)  # i64 of the owner's group, or FREE
        # The next decode row.
        self.is_running = np.zeros(num_slots, np.bool_)  # bool: has a next decode row
        self.position = np.zeros(num_slots, np.int32)  # i32
        self.remaining = np.zeros(num_slots, np.int32)  # i32 tokens it may still sample
        self.read_slot = np.zeros(num_slots, np.int32)  # i32 the prefix once, then its own
        self.next_token = np.zeros(num_slots, np.int32)  # i32 last of the prompt, then FROM_DEVICE
        # How it samples and ends.
        self.temperature = np.zeros(num_slots, np.float32)  # f32
        self.top_k = np.zeros(num_slots, np.int32)  # i32
        self.top_p = np.zeros(num_slots, np.float32)  # f32
        self.min_p = np.zeros(num_slots, np.float32)  # f32
        self.seed = np.zeros(num_slots, np.uint64)  # u64
        self.stop_row = np.zeros(num_slots, np.int32)  # i32 row of StopSets.table
        self.is_streaming = np.zeros(num_slots, np.bool_)  # bool: Outputs after each step
        self.num_logprobs = np.full(num_slots, NO_LOGPROBS, np.int32)  # i32 alternatives wanted
        # What it has sampled. Large (2 GB at 1 M slots of 512), but memory is only taken by rows
        # once written: the operating system maps untouched pages to nothing.
        self.num_outputs = np.zeros(num_slots, np.int32)  # i32
        self.output_tokens = np.empty((num_slots, n_ctx), np.int32)  # i32[num_slots, n_ctx]
        self.output_logprobs: F32 | None = None  # f32[num_slots, n_ctx] from the first asker on

    @property
    def num_owned(self) -> int:
        return self.num_slots - self.num_free

    def take(self, group: SequenceGroup, count: int) -> I32:
        """Slots for the group's next `count` sequences, with everything their first row needs."""
        slots = self._take(count)
        params = group.request.params
        indices = np.arange(group.started, group.started + count, dtype=np.int64)
        self.sequence_id[slots] = group.first_id + indices
        self.first_id[slots] = group.first_id
        self.position[slots] = len(group.prompt) - 1
        self.remaining[slots] = group.max_outputs
        self.read_slot[slots] = slots if group.prefix is None else group.prefix.slot
        self.next_token[slots] = group.prompt[-1]
        self.temperature[slots] = params.temperature
        self.top_k[slots] = params.top_k
        self.top_p[slots] = params.top_p
        self.min_p[slots] = params.min_p
        self.seed[slots] = sample_seeds(params.seed, indices)
        self.stop_row[slots] = group.stop_row
        self.is_streaming[slots] = group.request.emit == "delta"
        self.num_logprobs[slots] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.num_asking += count if params.logprobs else 0
        self.num_outputs[slots] = 0
        if params.logprobs is not None and self.output_logprobs is None:
            self.output_logprobs = np.empty((self.num_slots, self.n_ctx), np.float32)
        return slots

    def free(self, slots: I32 | I64) -> None:
        """Give slots back. What the device holds there needs no cleaning: position 0 ignores it."""
        assert (self.sequence_id[slots] != FREE).all(), "a slot was freed twice"
        if self.num_asking:
            self.num_asking -= int(np.count_nonzero(self.num_logprobs[slots] > 0))
        self.num_logprobs[slots] = NO_LOGPROBS
        self.sequence_id[slots] = FREE
        self.first_id[slots] = FREE
        self.is_running[slots] = False
        self._free[self.num_free : self.num_free + len(slots)] = slots
        self.num_free += len(slots)

    def advance(self, slots: I64, ends: Bool) -> None:
        """The slots' next decode rows are in a batch: make up the ones after."""
        self.position[slots] += 1
        self.remaining[slots] -= 1
        self.read_slot[slots] = slots
        self.next_token[slots] = FROM_DEVICE
        self.is_running[slots[ends]] = False

    def record(self, slots: I64, tokens: I32, logprobs: F32) -> None:
        """Store one sampled token per slot."""
        count = self.num_outputs[slots]
        self.output_tokens[slots, count] = tokens
        if self.output_logprobs is not None:
            self.output_logprobs[slots, count] = logprobs
        self.num_outputs[slots] = count + 1

    def _take(self, count: int) -> I32:
        assert count <= self.num_free, "more slots were taken than are free"
        self.num_free -= count
        return self._free[self.num_free : self.num_free + count].copy()


class StopSets:
    """Distinct sets of ending tokens as rows of one table; equal sets share a row.

    `table[row, token]` answers "does this token end it" for a whole batch in one look-up, however
    many tokens a set has.
    """

    def __init__(self, vocab_size: int) -> None:
        self.table = np.zeros((1, vocab_size), np.bool_)  # bool[rows, vocab_size]
        self._rows: dict[frozenset[int], int] = {}
        self._users: dict[frozenset[int], int] = {}
        self._unused = [0]

    def acquire(self, token_ids: frozenset[int]) -> int:
        """The set's row, kept until as many `release` as `acquire` were called."""
        self._users[token_ids] = self._users.get(token_ids, 0) + 1
        if token_ids not in self._rows:
            row = self._rows[token_ids] = self._unused.pop() if self._unused else self._grow()
            self.table[row] = False
            self.table[row, list(token_ids)] = True
        return self._rows[token_ids]

    def release(self, token_ids: frozenset[int]) -> None:
        self._users[token_ids] -= 1
        if not self._users[token_ids]:
            del self._users[token_ids]
            self._unused.append(self._rows.pop(token_ids))

    def _grow(self) -> int:
        rows = len(self.table)
        self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        self._unused = list(range(2 * rows - 1, rows, -1))
        return rows
