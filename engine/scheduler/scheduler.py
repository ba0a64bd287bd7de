"""The scheduler: add, abort, stop, park, schedule, complete.

A sequence is a slot and never grows, so nothing is paged or predicted, and overload is refused at
the door. A slot is taken away only for a higher priority, for a share that has next to none, or for
a higher precedence in its own share; the sequence is then parked, and goes on as if it had never
stopped. Pure: no device, clock, randomness or I/O; the same calls give the same batches. Keeps:
every accepted sequence gets exactly one terminal Output, unless its request is aborted; no slot
that a row writes is touched by another row of its batch.

A request waits, then prefills its prompt once (all but the last token), then its n sequences start
as slots fall free, each fed the last prompt token first. The prompt is prefilled into a prefix
slot, which every sequence reads in its first step and which is kept while it is of use; or, with
n = 1 and no such slot to be had, into the sequence's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.constraints.grammars import Grammars
from srm.engine.messages import Output, Request
from srm.engine.scheduler.accept import RequestRegistry, accept
from srm.engine.scheduler.admission import Admission
from srm.engine.scheduler.assembly import assemble, mask_rows
from srm.engine.scheduler.completion import StepCompletion, StepTokens, make_aborted
from srm.engine.scheduler.parking import Parking, check_fits, collect_states
from srm.engine.scheduler.preemption import choose_preempted
from srm.engine.scheduler.round_robin import RoundRobin
from srm.engine.state.latency import Latencies
from srm.engine.state.parked import Parked
from srm.engine.state.prefixes import NO_SLOT, Prefixes
from srm.engine.state.sequence import PATIENCE, SequenceGroup
from srm.engine.state.slots import SlotTable, StopSets
from srm.engine.steps.batch import I32, I64, NO_EDITS, Batch, SlotStates, StepResult
from srm.errors import InvalidRequest, Overloaded


class Scheduler:
    """Which sequences the next step feeds, and what its result means for them."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, grammars: Grammars | None = None
    ) -> None:
        """Without `grammars` no request may have a constraint."""
        assert config.num_slots, "how many slots fit is for the runner to count"
        self.table = SlotTable(config.num_slots, model.n_ctx)
        self.stop_sets = StopSets(model.vocab_size)
        # The rows of the pool behind those of sequences, so that nothing kept costs a sequence.
        behind = range(config.num_slots, config.num_slots + config.prefix_slots)
        self.prefixes = Prefixes(behind, config.prefix_cache)
        self.latencies = Latencies(config.num_slots)
        self.parking = Parking(config.max_parked_bytes)
        self._model = model
        self._grammars = grammars or Grammars(model, None)
        self._config = config
        self._max_logprobs = config.logprobs_limit(model)
        self._state_bytes = 4 * model.state_width
        self._max_rows, _ = config.step_limits(model)
        self._prefill_step_tokens = config.prefill_step_limit(model)
        self.admission = Admission(
            *(self.table, self.stop_sets, self.prefixes, self.parking, self.latencies),
            self._prefill_step_tokens,
        )
        """Who wants slots."""
        self.registry = RequestRegistry(self.admission)
        """The requests that have not ended."""
        self._completion = StepCompletion(self.admission, self.registry)
        self._round_robin = RoundRobin()
        self._next_id = 0
        self._num_prompt_tokens = 0  # of all requests accepted
        self.num_tabled = 0
        """Decode rows that had a table, ever."""

    @property
    def num_waiting(self) -> int:
        """Sequences that wait to start in a slot; neither what is parked counts, nor what waits
        for others of its request to end."""
        return self.admission.num_waiting

    @property
    def waiting_bytes(self) -> int:
        """Bytes of requests that have sequences to start."""
        return self.admission.waiting_bytes

    @property
    def num_requests(self) -> int:
        return len(self.registry.by_id)

    @property
    def num_left(self) -> int:
        """Sequences that have ever left the queue: started, or dropped with their request."""
        return self.admission.num_left

    def has_request(self, request_id: str) -> bool:
        return request_id in self.registry.by_id

    def request_ids(self) -> list[str]:
        return list(self.registry.by_id)

    def check(self, request: Request) -> SequenceGroup:
        """Return a request's sequences, none of which is added. Raises the RequestError that says
        why it can never be accepted."""
        constraint = request.params.constraint
        grammar = self._grammars.compile(constraint) if constraint else None
        group = accept(request, self._model, self._next_id, grammar, self._max_logprobs)
        if (count := request.params.n) > (limit := self._config.max_waiting):
            raise InvalidRequest(f"n must be at most max_waiting = {limit}, got {count}", "n")
        return group

    def add(self, request: Request, parked: Parked | None = None) -> None:
        """Accept a request, or raise the RequestError that says why not.

        Its samples in `parked`, if they can, go on from there. If it repeats a durable one that
        runs, it takes over what runs; then no step may be under way when the next one is scheduled.
        """
        group, limit = self.check(request), self._config.max_waiting
        running = self.registry.by_id.get(request.id)
        if running is not None:
            if not self.is_sent_again(request):
                raise InvalidRequest(f"id {request.id!r} is in use by a running request", "id")
            # Its sender knows none of its tokens.
            self.admission.shares.weigh(running.share, request.weight)
            running.request, running.unfinished = request, request.params.n
            self.registry.report_again(running, self.admission.begin_again(running))
            return
        if parked and group.is_resumable:
            check_fits(group, parked)
            group.start_anew(np.setdiff1d(np.arange(request.params.n), parked.indices))
        else:
            parked = None
        count, share = group.startable, self.admission.shares.find(request)
        waiting = self.admission.waiting_before(request.priority + 1)
        waiting += share.waiting_before(request.precedence) if share else 0
        if waiting + count > limit:
            raise Overloaded(
                f"{waiting} of at most {limit} sequences are waiting",
                excess=waiting + count - limit,
            )
        waiting_bytes, limit = self.waiting_bytes + group.num_bytes, self._config.max_waiting_bytes
        # Who waits alone always has room, and so has a share that holds less than its part.
        if waiting_bytes > limit and not self.admission.has_part(share, group.num_bytes, limit):
            raise Overloaded(
                f"requests of {self.waiting_bytes} of at most {limit} bytes are waiting",
                excess=math.ceil(self.num_waiting * (waiting_bytes - limit) / waiting_bytes),
            )
        self.registry.acquire_table(group)
        self._next_id += request.params.n
        group.rank = self._num_prompt_tokens + PATIENCE * len(group.prompt)
        self._num_prompt_tokens += len(group.prompt)
        self.registry.enter(group)
        if parked is not None:
            self.parking.put(group, parked, self.latencies.unknown(len(parked)))
            self.registry.report_again(group, parked.indices)

    def is_durable(self, request_id: str) -> bool:
        """Whether this request runs and is durable."""
        group = self.registry.by_id.get(request_id)
        return group is not None and group.request.durable

    def is_sent_again(self, request: Request) -> bool:
        """Whether it repeats, but for its weight, a durable request that runs and is resumable."""
        group = self.registry.by_id.get(request.id)
        if group is None or not group.is_resumable:
            return False
        return msgspec.structs.replace(request, weight=group.request.weight) == group.request

    def abort(self, request_id: str) -> int:
        """Forget a request and free its slots at once; return how many sequences that ends: 0 of an
        unknown one. A step under way may still write these slots: `complete` says why that is
        safe."""
        group = self.registry.by_id.get(request_id)
        if group is None:
            return 0
        self.registry.drop(group)
        self.latencies.abort(group)
        return group.unfinished

    def count_sampled(self, request_id: str) -> int:
        """Return how many tokens those sequences of a request have sampled that have not ended."""
        if (group := self.registry.by_id.get(request_id)) is None:
            return 0
        slots, table = self._slots_of(group), self.table
        sampled = int((table.position[slots] - table.first_position[slots]).sum())
        ids, counts = self.parking.num_tokens()
        is_own = (ids >= group.first_id) & (ids < group.first_id + group.request.params.n)
        return sampled + int(counts[is_own].sum())

    def _slots_of(self, group: SequenceGroup) -> I64:
        slots = np.unique(group.slots[: group.reach]).astype(np.int64)
        own: I64 = slots[self.table.first_id[slots] == group.first_id]
        return own

    def end(self, request_id: str) -> list[Output]:
        """End a request that runs; return the Outputs, with their tokens so far, of its sequences
        that had not ended. No step may be under way."""
        group = self.registry.by_id[request_id]
        slots = self._slots_of(group)
        parked = [own for of_group, own in self.parking.records() if of_group is group]
        outputs = make_aborted(self.table, group, slots, parked)
        self.abort(request_id)
        return outputs

    def stop(self, request_id: str, indices: I32, cut: int | None = None) -> int:
        """End these samples of a request and free their slots at once; return how many there were
        to end.

        `cut` also ends all samples from that index on, started or not. As with `abort`, a step
        under way may still write these slots. Costs what is ended, not n.
        """
        group = self.registry.by_id.get(request_id)
        if group is None:
            return 0
        table = self.table
        within = indices[(indices >= 0) & (indices < group.reach)].astype(np.int64)
        unstarted = 0
        if cut is not None:
            within = np.append(within, np.arange(max(cut, 0), group.reach))
            unstarted = group.unstarted_from(cut)
        within = np.unique(within)
        slots = group.slots[within].astype(np.int64)
        slots = slots[table.sequence_id[slots] == group.first_id + within]
        lengths = table.position[slots] - table.first_position[slots]
        self.latencies.end(slots, table.first_id[slots], lengths)
        count = len(slots) + unstarted + self._stop_parked(group, indices, cut)
        if count == group.unfinished:
            self.registry.drop(group)
            self.latencies.finish(group)
            return count
        if unstarted:
            self.admission.start_no_more(group, unstarted)
        if group.prefix is not None:
            self.admission.count_forks(group, len(table.unforked(slots)))
        table.free(slots)
        self.admission.shares.own(group.share, group.request.precedence, -len(slots))
        group.unfinished -= count
        return count

    def start_below(self, request_id: str, index: int) -> None:
        """Let the samples before this index start, where the request held them back."""
        if (group := self.registry.by_id.get(request_id)) is not None:
            self.admission.start_below(group, index)

    def _stop_parked(self, group: SequenceGroup, indices: I32, cut: int | None) -> int:
        """End these samples of a group where they are parked; return how many were."""
        if not self.parking.holds(group):
            return 0
        count, least = 0, group.request.params.n if cut is None else cut
        cut_off = np.arange(max(least, 0), group.request.params.n, dtype=np.int64)
        wanted = np.concatenate([indices.astype(np.int64), cut_off])
        for positions, times in self.parking.drop(group, wanted):
            tokens = positions.astype(np.int64) - (len(group.prompt) - 1)
            self.latencies.end_parked(group.first_id, times, tokens)
            count += len(tokens)
        return count

    def choose_preempted(self) -> I64:
        """Return the slots, ascending, whose sequences should be parked for those who wait: cheap
        if none.

        They may be parked once no step is under way; by then the answer may have changed.
        """
        return choose_preempted(self.admission, self._state_bytes)

    def park(self, slots: I64, states: SlotStates) -> None:
        """Take these slots from their sequences, of which the pool holds `states`.

        Some of `choose_preempted`, and no step is under way. The sequences go on when there are
        slots for them, at the latest when all others have ended.
        """
        for first_id, own, parked in collect_states(self.table, slots, states):
            group = self.registry.by_first_id[first_id]
            # Memory of their own: what is left of others would keep it all.
            own_memory = parked.only(np.arange(len(parked)))
            self.parking.put(group, own_memory, self.latencies.park(own))
            self.parking.num_ever_parked += len(own)
            self.admission.shares.own(group.share, group.request.precedence, -len(own))
        self.table.free(slots)

    def take_resumed(self) -> list[tuple[I64, SlotStates]]:
        """Take states of resumed sequences, to be written to their slots before the next step."""
        return self.admission.take_resumed()

    def durable_among(self, slots: I64) -> I64:
        """Select the slots whose sequences' requests are durable, and can go on elsewhere."""
        first_ids, groups = np.unique(self.table.first_id[slots], return_inverse=True)
        durable = [
            self.registry.by_first_id[first_own_id].is_resumable
            for first_own_id in first_ids.tolist()
        ]
        may_go_on = np.array(durable, np.bool_)[groups]
        # Whoever goes on elsewhere would not know which weights made its first tokens.
        return slots[may_go_on & ~self.table.switches.have_met(self.table.sequence_id[slots])]

    def parked_in(self, slots: I64, states: SlotStates) -> Iterator[tuple[Request, Parked]]:
        """Yield what the sequences in these slots, of which the pool holds `states`, need to go on
        elsewhere; they also go on here."""
        for first_id, _, parked in collect_states(self.table, slots, states):
            yield self.registry.by_first_id[first_id].request, parked

    def parked_apart(self) -> Iterator[tuple[Request, Parked]]:
        """Yield the parked sequences of durable requests."""
        for group, parked in self.parking.records():
            if group.is_resumable:
                have_met = self.table.switches.have_met(group.first_id + parked.indices)
                yield group.request, parked.only(np.flatnonzero(~have_met))

    @property
    def has_work(self) -> bool:
        """Whether a request has something to do, and does not wait for StartSamples alone."""
        is_all_paced = len(self.admission.paced) == self.num_requests
        return not (is_all_paced and self.is_quiet)

    @property
    def is_quiet(self) -> bool:
        """Whether no sequence and no prompt is under way."""
        is_fed = self.admission.prefill.is_busy
        return not (self.table.num_owned or self.parking.num_parked or is_fed)

    @property
    def is_held(self) -> bool:
        """Whether nothing new is begun; what was begun goes on, parked sequences included."""
        return self.admission.is_held

    @is_held.setter
    def is_held(self, is_held: bool) -> None:
        self.admission.is_held = is_held

    def renew(self, version: int, refeeds: bool = False) -> None:
        """Forget kept states after a change of weights; `version` is of those before. No batch may
        be under way. `refeeds`: whatever runs is fed again what it has.

        Prompts of which nothing runs are prefilled again for the sequences that they are still to
        start; all others go on from where they are.
        """
        self.prefixes.forget()
        owned, parked = self.table.num_tokens(), self.parking.num_tokens()
        ids, counts = map(np.concatenate, zip(owned, parked, strict=True))
        self.table.switches.note(version, ids, counts)
        sampled = np.sort(ids[counts > 0])
        if refeeds:
            self.admission.refeed.begin_anew(parked[0])
        for group in self.registry.by_id.values():
            first, last = group.first_id, group.first_id + group.request.params.n
            has_output = (
                group.scored or group.sampled or np.diff(sampled.searchsorted([first, last]))
            )
            if group.reach and not group.first_version and (has_output or not refeeds):
                group.first_version = version
            group.state_length = 0
            if refeeds or group.request.returns_state:  # which is of one version's weights
                self.admission.feed_again(group)
            elif group.prefilled and group.unstarted and not self._runs(group):
                self.admission.prefill_again(group)

    def _runs(self, group: SequenceGroup) -> bool:
        """Whether any of the group's sequences or its prompt is under way."""
        slots = group.slots[: group.reach]
        is_owner = self.table.first_id[slots] == group.first_id
        return bool(is_owner.any()) or (group.num_unprefilled > 0)

    def take_tokens(self) -> list[StepTokens]:
        """Take the Tokens of the steps since the last call, step by step."""
        return self._completion.take_tokens()

    def take_copies(self) -> tuple[I64, I64]:
        """Take the slots whose states are to be copied before the next step, and where to."""
        return self._completion.take_copies()

    def schedule(self) -> Batch | None:
        """The next step's batch, or None when there is nothing to feed. The tables advance before
        the device has run: the step after can be scheduled at once."""
        admission = self.admission
        admission.admit()
        slots, is_partial = self._round_robin.choose_slots(
            self.table, admission.shares, self._decode_room()
        )
        masks = NO_EDITS.masks
        if self.table.num_masked:  # some may wait until their last token is known
            unfed = admission.prefill.num_tokens + admission.refeed.num_tokens
            fed = min(unfed, self._prefill_step_tokens)
            limited = self._round_robin.limit_masked(self.table, admission.shares, slots, fed)
            slots, masks = mask_rows(self.table, limited)
            is_partial = True
        room = self._prefill_step_tokens - len(slots)
        refed = admission.refeed.chunks(room) if admission.refeed.num_tokens else []
        if refed:
            room -= sum(chunk.stop - chunk.start for chunk in refed)
        chunks, prefilled = admission.prefill.chunks(room)
        chunks = refed + chunks
        if not len(slots) and not chunks:
            return None
        batch = assemble(self.table, slots, chunks, is_partial, masks)
        if batch.has_tables:
            self.table.tables.unsent = []
            self.num_tabled += int(np.count_nonzero(self.table.sampling["table"][slots]))
        new = slots[batch.new["row"]]
        self.table.is_new[new] = False
        first_ids = self.table.first_id[new[batch.new["read_slot"] != new]]
        self.table.advance(slots, batch.positions, batch.ends)
        for group in prefilled:
            if group.request.returns_state:
                admission.prepared.append(group)
            if not group.max_outputs:
                continue  # it only wants scores
            if group.needs_prefix:
                admission.line_up(admission.forking, group)
            else:
                self.table.is_running[group.slot] = True
        # Only now, so that no row of this batch can have been given a slot that another one reads.
        groups, counts = np.unique(first_ids, return_counts=True)
        for first_id, count in zip(groups.tolist(), counts.tolist(), strict=True):
            admission.count_forks(self.registry.by_first_id[first_id], count)
        return batch

    def take_prepared(self) -> tuple[list[SequenceGroup], I64]:
        """Take the requests that want the state of their prompt and whose prompts are in batches,
        with the slot that has it, -1 for that of no tokens."""
        prepared, self.admission.prepared = self.admission.prepared, []
        slots = [group.prefix.slot if group.prefix else NO_SLOT for group in prepared]
        return prepared, np.array(slots, np.int64)

    def return_state(self, group: SequenceGroup, state: bytes) -> list[Output]:
        """End a prepared request; return its Outputs."""
        return self._completion.return_state(group, state)

    def _decode_room(self) -> int:
        """Most rows that the next step decodes.

        Where prompts are fed the step is short, so that their first tokens come soon. First tokens
        have what they need of it, prompts their share, next tokens the rest.
        """
        waiting = self.admission.prefill.num_tokens + self.admission.refeed.num_tokens
        if not waiting:
            return self._max_rows
        tokens = self._prefill_step_tokens
        prompts = min(max(int(self._config.max_prefill_share * tokens), 1), tokens - 1, waiting)
        first = int(np.count_nonzero(self.table.is_new & self.table.is_running))
        return min(self._max_rows, max(tokens - prompts, min(first, tokens - 1)))

    def complete(self, batch: Batch, result: StepResult) -> list[Output]:
        """Record what a step sampled, end and free the sequences it ended; say what it scored.

        A slot freed here may still be written by the step now under way. That harms nobody: the
        slot is given out in a later schedule, and steps run in the order launched; a row at
        position 0 ignores what its slot holds; parked states are written after that step.
        """
        return self._completion.complete(batch, result)
