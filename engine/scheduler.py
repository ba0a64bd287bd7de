"""The scheduler: add, abort, schedule, complete. Admission is its only decision.

A sequence is a slot and never grows, so nothing is paged, predicted or preempted: a slot in hand is
a promise kept, and overload is refused at the door. Pure: no device, clock, randomness or I/O; the
same calls give the same batches. Keeps: every accepted sequence gets exactly one terminal Output,
unless its request is aborted; no slot that a row writes is touched by another row of its batch.

A request waits, then prefills its prompt once (all but the last token), then its n sequences start
as slots fall free, each fed the last prompt token first. The prompt is prefilled into a prefix
slot, which every sequence reads in its first step and which is kept while it is of use; or, with
n = 1 and no such slot to be had, into the sequence's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from engine.assembly import assemble
from engine.batch import F32, I32, I64, Batch, Scores, SlotStates, StepResult
from engine.config import EngineConfig, ModelConfig
from engine.errors import InvalidRequest, Overloaded
from engine.latency import Latencies
from engine.messages import Output, Request
from engine.outputs import (
    ERROR,
    LENGTH,
    RUNNING,
    STOP,
    NewTokens,
    decode_scores,
    new_tokens,
    prompt_scores,
    sampled,
    unsampled,
)
from engine.parked import Parked
from engine.parking import parkable, taken
from engine.prefill import Prefill
from engine.prefixes import Prefixes
from engine.sequence import Line, SequenceGroup, accept
from engine.slots import COLUMNS, FINAL, SlotTable, StopSets


class Scheduler:
    """Which sequences the next step feeds, and what its result means for them."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        assert config.num_slots, "how many slots fit is for the runner to count"
        self.table = SlotTable(config.num_slots, model.n_ctx)
        self.stop_sets = StopSets(model.vocab_size)
        # The rows of the pool behind those of sequences, so that nothing kept costs a sequence.
        behind = range(config.num_slots, config.num_slots + config.prefix_slots)
        self.prefixes = Prefixes(behind, config.prefix_cache)
        self.latencies = Latencies(config.num_slots)
        self.num_waiting = 0  # sequences accepted and not started
        self.waiting_bytes = 0  # of requests that have sequences to start
        self._model = model
        self._config = config
        self._max_rows, self._max_tokens = config.step_limits(model)
        self._by_id: dict[str, SequenceGroup] = {}
        self._by_first_id: dict[int, SequenceGroup] = {}
        self._waiting = Line()  # for a slot to prefill into
        self._prefill = Prefill(self.prefixes, self._waiting)
        self._forking = Line()  # prefilled, for slots to start in
        self._next_id = 0
        self._columns: list[NewTokens] = []
        self._turn = 0  # the slot whose turn it is when not all can be served

    @property
    def num_requests(self) -> int:
        return len(self._by_id)

    @property
    def num_left(self) -> int:
        """Sequences that have ever left the queue: started, or dropped with their request."""
        return self._next_id - self.num_waiting

    def has_request(self, request_id: str) -> bool:
        return request_id in self._by_id

    def request_ids(self) -> list[str]:
        return list(self._by_id)

    def add(self, request: Request, parked: Parked | None = None) -> None:
        """Accept a request, or raise the RequestError that says why not."""
        group = accept(request, self._model, self._next_id)
        count, limit = request.params.n, self._config.max_waiting
        if request.id in self._by_id:
            raise InvalidRequest(f"id {request.id!r} is in use by a running request", "id")
        if count > limit:
            raise InvalidRequest(f"n must be at most max_waiting = {limit}, got {count}", "n")
        if self.num_waiting + count > limit:
            raise Overloaded(
                f"{self.num_waiting} of at most {limit} sequences are waiting",
                excess=self.num_waiting + count - limit,
            )
        waiting_bytes, limit = self.waiting_bytes + group.num_bytes, self._config.max_waiting_bytes
        if self.num_waiting and waiting_bytes > limit:  # one that waits alone always has room
            raise Overloaded(
                f"requests of {self.waiting_bytes} of at most {limit} bytes are waiting",
                excess=math.ceil(self.num_waiting * (waiting_bytes - limit) / waiting_bytes),
            )
        self._next_id += count
        self._by_id[request.id] = self._by_first_id[group.first_id] = group
        self._waiting.push(group)
        self.num_waiting += count
        self.waiting_bytes = waiting_bytes
        self.latencies.arrive(group)

    def abort(self, request_id: str) -> int:
        """Forget a request and free its slots at once; how many sequences that ends, 0 if there
        is no such request.

        A step under way may still write these slots. That is safe for the reason given in
        `complete`.
        """
        group = self._by_id.get(request_id)
        if group is None:
            return 0
        self._drop(group)
        self.latencies.abort(group)
        return group.unfinished

    def stop(self, request_id: str, indices: I32, cut: int | None = None) -> int:
        """End these samples of a request and free their slots at once; how many there were to end.

        And with `cut` all samples from that index on, those that have not started included. As with
        `abort`, a step under way may still write these slots. Costs what is ended, not n.
        """
        group = self._by_id.get(request_id)
        if group is None:
            return 0
        table = self.table
        within = indices[(indices >= 0) & (indices < group.started)].astype(np.int64)
        unstarted = 0
        if cut is not None:
            within = np.append(within, np.arange(max(cut, 0), group.started))
            unstarted = group.to_start - max(cut, group.started)
        within = np.unique(within)
        slots = group.slots[within].astype(np.int64)
        slots = slots[table.sequence_id[slots] == group.first_id + within]
        lengths = table.position[slots] - table.first_position[slots]
        self.latencies.end(slots, table.first_id[slots], lengths)
        count = len(slots) + max(0, unstarted)
        if count == group.unfinished:
            self._drop(group)
            self.latencies.finish(group)
            return count
        if unstarted > 0:
            self._start_no_more(group, unstarted)
        if group.prefix is not None:
            unforked = table.position[slots] == table.first_position[slots]
            self._count_forks(group, int(np.count_nonzero(unforked)))
        table.free(slots)
        group.unfinished -= count
        return count

    def _start_no_more(self, group: SequenceGroup, count: int) -> None:
        """The last `count` sequences of those that a group is to start, of more that there are."""
        group.to_start -= count
        self.num_waiting -= count
        if not group.unstarted:
            self.waiting_bytes -= group.num_bytes
            self._forking.discard(group)
            if group.prefix is not None and not group.unforked:
                self._prefill.release(group)

    def durable_slots(self) -> I64:
        """Slots of sequences of durable requests that can go on elsewhere, ascending."""
        slots = parkable(self.table)
        first_ids = self.table.first_id[slots]
        durable = [
            first_id
            for first_id in np.unique(first_ids).tolist()
            if self._by_first_id[first_id].is_resumable
        ]
        return slots[np.isin(first_ids, np.array(durable, np.int64))]

    def parked_in(self, slots: I64, states: SlotStates) -> Iterator[tuple[Request, Parked]]:
        """What the sequences in these slots need to go on elsewhere; they go on here all the same.

        `states` are what the pool holds of them.
        """
        for first_id, _, parked in taken(self.table, slots, states):
            yield self._by_first_id[first_id].request, parked

    def parked_apart(self) -> Iterator[tuple[Request, Parked]]:
        """What is parked of durable requests."""
        return iter(())

    def take_columns(self) -> list[NewTokens]:
        """What sequences with `emit` = "columns" have new since the last time, step by step."""
        columns, self._columns = self._columns, []
        return columns

    def schedule(self) -> Batch | None:
        """The next step's batch, or None when there is nothing to feed.

        The tables advance here, before the device has run: the step after can be scheduled at once.
        """
        self._admit()
        turn = self._turn
        slots = self._take_turns()
        chunks, prefilled = self._prefill.chunks(self._max_tokens - len(slots))
        if not len(slots) and not chunks:
            return None
        is_all = turn == self._turn  # a turn that leaves some out ends elsewhere than it began
        batch = assemble(self.table, slots, chunks, None if is_all else (turn, self._turn))
        first_ids = self.table.first_id[slots[batch.read_slots[: len(slots)] != slots]]
        self.table.advance(slots, batch.positions[: len(slots)], batch.ends)
        for group in prefilled:
            self._start_or_fork(group)
        # Only now, so that no row of this batch can have been given a slot that another one reads.
        self._release_prefixes(first_ids)
        return batch

    def complete(self, batch: Batch, result: StepResult) -> list[Output]:
        """Record what a step sampled, end and free the sequences it ended; say what it scored.

        What depends on time comes from the batch: the table may be one step ahead already. For the
        same reason a slot freed here may still be written by the step now under way. The slot can
        be given out in the schedule after that one at the earliest, steps run in the order
        launched, and position 0 ignores what a slot holds, so the late write harms nobody.
        """
        table = self.table
        prompt_outputs = self._report_prompts(batch, result.scores)
        # int64 is what numpy indexes with: it would convert an int32 index at every use.
        slots, ends = batch.write_slots[: batch.num_decode].astype(np.int64), batch.ends
        positions = batch.positions[: batch.num_decode]
        tokens, logprobs, starting = result.token_ids, result.logprobs, batch.starting
        is_live = table.sequence_id[slots] == batch.sequence_ids
        if not is_live.all():  # aborted, or ended by the step before this one
            slots, positions, ends = slots[is_live], positions[is_live], ends[is_live]
            tokens, logprobs = tokens[is_live], logprobs[is_live]
            starting = starting[is_live[starting]]
        first = batch.write_slots[starting].astype(np.int64)
        self.latencies.sample(slots, first, table.first_id[first], batch.turn)
        table.record(slots, positions, tokens, logprobs)
        may_speak = ends | self.stop_sets.may_end[tokens]
        if table.num_streaming:
            may_speak |= table.emit[slots] != FINAL
        rows = np.flatnonzero(may_speak)  # few, unless there are many streams
        slots, positions, tokens, ends = slots[rows], positions[rows], tokens[rows], ends[rows]
        is_stop = self.stop_sets.table[table.stop_row[slots], tokens]
        reasons = np.where(is_stop, STOP, np.where(ends, LENGTH, RUNNING))
        reasons[tokens < 0] = ERROR
        emit = table.emit[slots]
        in_columns = np.flatnonzero(emit == COLUMNS)
        speaks = ((reasons != RUNNING) | (emit != FINAL)) & (emit != COLUMNS)
        outputs = sampled(
            table,
            self._by_first_id,
            slots[speaks],
            positions[speaks],
            reasons[speaks],
            decode_scores(batch),
            result.scores,
        )
        is_end = reasons != RUNNING
        ended = slots[is_end]
        lengths = positions[is_end] - table.first_position[ended] + (reasons[is_end] != ERROR)
        self.latencies.end(ended, table.first_id[ended], lengths)
        for output in outputs:
            if output.finish_reason is not None:
                self._count_ends(self._by_id[output.id], 1)
        if len(in_columns):
            self._complete_columns(
                *(slots[in_columns], positions[in_columns], tokens[in_columns]),
                *(logprobs[rows][in_columns], reasons[in_columns]),
            )
        table.free(ended)
        return prompt_outputs + outputs

    def _complete_columns(
        self, slots: I64, positions: I32, tokens: I32, logprobs: F32, reasons: I64
    ) -> None:
        """Of the sequences whose news go into columns."""
        columns = new_tokens(
            self.table, self._by_first_id, slots, positions, tokens, logprobs, reasons
        )
        first_ids, counts = np.unique(
            self.table.first_id[slots[reasons != RUNNING]], return_counts=True
        )
        for first_id, count in zip(first_ids.tolist(), counts.tolist(), strict=True):
            group = self._by_first_id[first_id]
            self._count_ends(group, count)
            if not group.unfinished:
                columns.finished.append(group.request.id)
        self._columns.append(columns)

    def _admit(self) -> None:
        """Give free slots out, in serving order, to prompts and to sequences that can start."""
        room = self._max_tokens - self._prefill.num_tokens
        while self.table.num_free:
            line = self._next_line(room)
            if line is None:
                return
            group = line.pop()
            if group.stop_row < 0:
                group.stop_row = self.stop_sets.acquire(group.stop_ids)
            if group.num_unprefilled and not self._prefill.begin(group):
                continue
            if group.taken_up is None:
                self.latencies.take_up(group)
            if group.num_unprefilled:
                self._begin_prefill(group)
                room -= group.num_unprefilled
            else:
                self._start(group)

    def _next_line(self, room: int) -> Line | None:
        """The line whose first group gets the next free slot."""
        waiting, forking = self._waiting.peek(), self._forking.peek()
        if waiting is not None and waiting.num_unprefilled:
            # A slot taken before the next batches can prefill into it would only stand idle.
            has_prefix = not waiting.needs_prefix or self.prefixes.num_available > 0
            if room <= 0 or not has_prefix:
                waiting = None
        if forking is not None and (waiting is None or forking.order > waiting.order):
            return self._forking
        return self._waiting if waiting is not None else None

    def _begin_prefill(self, group: SequenceGroup) -> None:
        if not group.needs_prefix:
            slots = self.table.take(group, 1)
            group.slot = int(slots[0])
            self._count_started(group, slots)
        self._prefill.push(group)

    def _start(self, group: SequenceGroup) -> None:
        """Start as many of a prefilled group's sequences as there are slots."""
        count = min(group.unstarted, self.table.num_free)
        slots = self.table.take(group, count)
        self.table.is_running[slots] = True
        self._count_started(group, slots)
        if group.unstarted:
            self._forking.push(group)

    def _count_started(self, group: SequenceGroup, slots: I32) -> None:
        self.latencies.start(group, slots)
        if not group.started:
            group.slots = np.empty(group.request.params.n, np.int32)
        group.slots[group.started : group.started + len(slots)] = slots
        group.started += len(slots)
        self.num_waiting -= len(slots)
        if not group.unstarted:
            self.waiting_bytes -= group.num_bytes
        if group.prefix is not None:
            group.unforked += len(slots)

    def _take_turns(self) -> I64:
        """Slots to decode: i64[at most so many rows], ascending from the slot whose turn it is."""
        is_running, limit = self.table.is_running, self._max_rows
        num_running = int(np.count_nonzero(is_running))
        if num_running <= limit:
            return np.flatnonzero(is_running)
        # More are running than are wanted: so they are found before the search comes round.
        chosen, turn = np.empty(0, np.int64), self._turn
        while len(chosen) < limit:
            missing = limit - len(chosen)
            stretch = 1 + missing * len(is_running) // num_running
            found = turn + np.flatnonzero(is_running[turn : turn + stretch])[:missing]
            chosen = np.concatenate([chosen, found])
            turn = turn + stretch if turn + stretch < len(is_running) else 0
        self._turn = int(chosen[-1]) + 1
        return chosen

    def _start_or_fork(self, group: SequenceGroup) -> None:
        """The prompt is prefilled. Where only its scores are wanted, the last of them end it."""
        if group.max_outputs and group.needs_prefix:
            self._forking.push(group)
        elif group.max_outputs:
            self.table.is_running[group.slot] = True

    def _release_prefixes(self, first_ids: I64) -> None:
        """Count first steps, given the group of each; after the last, its prefix may go."""
        groups, counts = np.unique(first_ids, return_counts=True)
        for first_id, count in zip(groups.tolist(), counts.tolist(), strict=True):
            self._count_forks(self._by_first_id[first_id], count)

    def _count_forks(self, group: SequenceGroup, count: int) -> None:
        group.unforked -= count
        if count and not group.unforked and not group.unstarted:
            self._prefill.release(group)

    def _report_prompts(self, batch: Batch, scores: Scores) -> list[Output]:
        """What was scored of prompts; ends requests that want no more, or whose model broke."""
        outputs: list[Output] = []
        for row, first_id in enumerate(batch.scored_ids.tolist(), batch.num_decode):
            group = self._by_first_id.get(first_id)
            if group is None:  # aborted, or broken by the step before this one
                continue
            output = prompt_scores(group, batch, row, scores)
            if output is None:
                outputs += self._end_unsampled(group, ERROR)
                continue
            outputs.append(output)
            group.scored += len(output.logprobs) // 4
            if not group.max_outputs and group.scored == len(group.prompt) - 1:
                outputs += self._end_unsampled(group, LENGTH)
        return outputs

    def _end_unsampled(self, group: SequenceGroup, reason: int) -> list[Output]:
        self._drop(group)
        self.latencies.finish(group)
        return unsampled(group, reason)

    def _drop(self, group: SequenceGroup) -> None:
        """Take the group out of everything and free its slots at once."""
        for line in (self._waiting, self._forking):
            line.discard(group)
        self._prefill.drop(group)
        self.num_waiting -= group.unstarted
        if group.unstarted:
            self.waiting_bytes -= group.num_bytes
        slots = group.slots[: group.started]
        sequence_ids = group.first_id + np.arange(group.started)
        self.table.free(slots[self.table.sequence_id[slots] == sequence_ids])
        self._forget(group)

    def _count_ends(self, group: SequenceGroup, count: int) -> None:
        group.unfinished -= count
        if not group.unfinished:
            self.latencies.finish(group)
            self._forget(group)

    def _forget(self, group: SequenceGroup) -> None:
        del self._by_id[group.request.id], self._by_first_id[group.first_id]
        if group.stop_row >= 0:
            self.stop_sets.release(group.stop_ids)
