"""Completion: takes in a step's result: keeps tokens, ends sequences, makes what callers get.

What depends on time comes from the batch, since the table may be one step ahead already. Loops over
ended sequences, streams and chunks of scored prompts, never over the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from srm.engine.messages import PROMPT, REASONS, Output
from srm.engine.scheduler.accept import RequestRegistry
from srm.engine.scheduler.admission import Admission
from srm.engine.state.parked import Parked
from srm.engine.state.sequence import SequenceGroup
from srm.engine.state.slots import DELTA, FINAL, NO_LOGPROBS, TOKENS, SlotTable
from srm.engine.steps.batch import F32, I32, I64, Batch, Bool, Scores, StepResult
from srm.engine.steps.tokens import Tokens, step_tokens

RUNNING, STOP, LENGTH, ERROR, _ABORT = range(5)  # indices into REASONS
NOT_FINITE = "the model's output was not finite"
NOT_ALLOWED = NOT_FINITE + ", or its constraint became too complex to say what may follow"
NO_PLACE = -1


class SampledRows(NamedTuple):
    """Decode rows of a step, with what they sampled."""

    slots: I64
    """int64 is what numpy indexes with: it would convert an int32 index at every use."""
    positions: I32
    ends: Bool  # it is the sequence's last allowed token
    token_ids: I32
    logprobs: F32
    places: I64  # of its scores in the step's; NO_PLACE: it has none

    def select(self, rows: Bool | I64) -> SampledRows:
        """Return some of the rows."""
        choose: Any = itemgetter(rows)
        return SampledRows(*map(choose, self))


def sampled_rows(batch: Batch, result: StepResult) -> SampledRows:
    """Return all decode rows of a step."""
    places = np.full(batch.num_decode, NO_PLACE)
    places[batch.score_rows[: batch.num_scored_decode]] = np.arange(batch.num_scored_decode)
    return SampledRows(
        *(batch.slots.astype(np.int64), batch.positions, batch.ends),
        *(result.token_ids, result.logprobs, places),
    )


def make_outputs(
    table: SlotTable,
    groups: Mapping[int, SequenceGroup],
    rows: SampledRows,
    reasons: I64,
    scores: Scores,
    unreported: Set[int],
) -> list[Output]:
    """Make the Outputs of these rows' sequences: their new tokens, or all of them at their end.

    They end or go on for these `reasons`. Groups are by first id. `unreported` ones get all tokens.
    """
    slots, positions = rows.slots, rows.positions
    sequence_ids, is_delta = table.sequence_id[slots], table.emit[slots] == DELTA
    if unreported:
        is_delta &= ~np.isin(sequence_ids, list(unreported))
    columns = (
        slots,
        sequence_ids,
        table.first_id[slots],
        np.where(is_delta, positions, table.first_position[slots]),
        positions + (reasons != ERROR),  # an error is no token
        table.num_logprobs[slots],
        reasons,
        rows.places,
    )
    outputs = []
    for slot, sequence_id, first_id, start, stop, num_logprobs, reason, place in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        group = groups[first_id]
        first = len(group.prompt) - 1
        own = {"versions": table.switches.versions(sequence_id, start - first, stop - first)}
        if place != NO_PLACE:  # then it streams, and has one new token at most
            own |= scores.as_bytes(place, place + stop - start, num_logprobs)
        elif num_logprobs != NO_LOGPROBS:
            assert table.output_logprobs is not None
            own["logprobs"] = table.output_logprobs.read(slot, start, stop)
        outputs.append(
            Output(
                id=group.request.id,
                index=sequence_id - first_id,
                token_ids=table.output_tokens.read(slot, start, stop),
                finish_reason=REASONS[reason],
                error=_error(group) if reason == ERROR else None,
                cached_tokens=group.cached,
                first_version=group.first_version,
                **own,
            )
        )
    return outputs


class StepTokens(NamedTuple):
    """A step's new tokens of sequences with `emit` = "tokens", for all API processes together."""

    tokens: Tokens
    """Owners are stream numbers."""
    cached: list[tuple[int, int]]
    """Stream and cached tokens of groups that begin to sample."""
    finished: list[str]
    """Ids of requests that end with these rows."""

    def split(self, bits: int) -> list[tuple[int, StepTokens]]:
        """Split by client: the bits of a stream number above the lowest `bits`, which are kept."""
        clients = self.tokens.owners >> bits
        return [(client, self._of_client(client, bits)) for client in np.unique(clients).tolist()]

    def _of_client(self, client: int, bits: int) -> StepTokens:
        is_own = self.tokens.owners >> bits == client
        tokens = self.tokens if is_own.all() else self.tokens.select(is_own)
        return StepTokens(
            tokens.with_owners(tokens.owners - (client << bits)),
            [(own - (client << bits), n) for own, n in self.cached if own >> bits == client],
            [],
        )


def make_tokens(
    table: SlotTable,
    groups: Mapping[int, SequenceGroup],
    rows: SampledRows,
    reasons: I64,
    scores: Scores,
) -> StepTokens:
    """Make the Tokens of these rows' sequences; see `make_outputs`. The caller, who counts the
    ends, fills `finished` in."""
    is_scored = rows.places != NO_PLACE
    num_top, num_scored = 0, np.count_nonzero(is_scored)
    logprobs = rows.logprobs
    if num_scored:  # theirs are the first rows
        order = np.argsort(~is_scored, kind="stable")
        rows, reasons = rows.select(order), reasons[order]
        logprobs = rows.logprobs
        logprobs[:num_scored] = scores.logprobs[rows.places[:num_scored]]
        num_top = int(table.num_logprobs[rows.slots[:num_scored]].max())
    slots, scored = rows.slots, rows.places[:num_scored]
    is_first = rows.positions == table.first_position[slots]
    begun = [groups[first_id] for first_id in np.unique(table.first_id[slots[is_first]]).tolist()]
    asks = bool((table.num_logprobs[slots] != NO_LOGPROBS).any())
    tokens = step_tokens(
        *(table.stream[slots], rows.token_ids, reasons.astype(np.uint8)),
        logprobs if asks else logprobs[:0],
        *(scores.top_ids[scored, :num_top], scores.top_logprobs[scored, :num_top]),
    )
    cached = [(group.request.stream, group.cached) for group in begun if group.cached]
    return StepTokens(tokens, cached, [])


def make_prompt_scores(
    group: SequenceGroup, batch: Batch, row: int, scores: Scores
) -> Output | None:
    """Return the scores of the chunk that the prefill row of this number fed; None if they are not
    finite."""
    begin, end = (batch.prefill["end"][row : row + 2] - batch.num_decode).tolist()
    shift = batch.num_scored_decode  # their scores come after those of decode rows
    if np.isnan(scores.logprobs[begin + shift : end + shift]).any():
        return None
    return Output(
        id=group.request.id,
        index=PROMPT,
        token_ids=batch.targets[1 + begin : 1 + end].tobytes(),
        finish_reason=None,
        error=None,
        cached_tokens=group.cached,
        first_version=group.first_version,
        **scores.as_bytes(begin + shift, end + shift, group.request.params.prompt_logprobs or 0),
    )


def make_unsampled(group: SequenceGroup, reason: int) -> list[Output]:
    """Make the last Outputs, indices 0 and up, of a group none of which has begun to sample."""
    error = _error(group) if reason == ERROR else None
    end: dict[str, Any] = {"finish_reason": REASONS[reason], "error": error}
    return [
        Output(group.request.id, index, cached_tokens=group.cached, **end)
        for index in range(group.unfinished)
    ]


def make_aborted(
    table: SlotTable, group: SequenceGroup, slots: I64, parked: list[Parked]
) -> list[Output]:
    """Make the last Outputs of a group that ends early: of its sequences in these slots, parked
    ones and those that have not started. What was sent of their tokens is not sent again."""
    is_whole, asks = group.request.emit == "final", group.request.params.logprobs is not None
    first = len(group.prompt) - 1
    history: list[tuple[int, bytes, bytes]] = [  # of each: index, tokens, log-probabilities
        row for piece in parked for row in zip(piece.indices.tolist(), piece.tokens,
                                               piece.logprobs, strict=True)
    ]  # fmt: skip
    for slot, stop in zip(slots.tolist(), table.position[slots].tolist(), strict=True):
        logprobs = table.output_logprobs.read(slot, first, stop) if asks else b""  # type: ignore[union-attr]  # it is there if anyone asks
        index = int(table.sequence_id[slot]) - group.first_id
        history.append((index, table.output_tokens.read(slot, first, stop), logprobs))
    history += [(index, b"", b"") for index in group.next_fresh(group.unstarted).tolist()]
    outputs = []
    for index, tokens, logprobs in sorted(history):
        own: dict[str, Any] = {}
        if is_whole:
            versions = table.switches.versions(group.first_id + index, 0, len(tokens) // 4)
            own = {"token_ids": tokens, "logprobs": logprobs, "versions": versions}
        outputs.append(
            Output(
                id=group.request.id,
                index=index,
                finish_reason=REASONS[_ABORT],
                cached_tokens=group.cached,
                first_version=group.first_version,
                **own,
            )
        )
    return outputs


def _error(group: SequenceGroup) -> str:
    """Return what to say of a row without a token."""
    return NOT_ALLOWED if group.request.params.constraint else NOT_FINITE


class StepCompletion:
    """Takes in the results of steps."""

    def __init__(self, admission: Admission, registry: RequestRegistry) -> None:
        self._table = admission.table
        self._stop_sets = admission.stop_sets
        self._latencies = admission.latencies
        self._registry, self._prefixes = registry, admission.prefixes
        self._tokens: list[StepTokens] = []
        self._copies: list[tuple[int, int]] = []

    def take_tokens(self) -> list[StepTokens]:
        """Take the Tokens of the steps since the last call, step by step."""
        tokens, self._tokens = self._tokens, []
        return tokens

    def take_copies(self) -> tuple[I64, I64]:
        """Take the slots whose states are kept, and the slots that are to have them."""
        copies, self._copies = self._copies, []
        slots = np.array(copies, np.int64).reshape(-1, 2)
        return slots[:, 0], slots[:, 1]

    def complete(self, batch: Batch, result: StepResult) -> list[Output]:
        """See `Scheduler.complete`."""
        table, registry, scores = self._table, self._registry, result.scores
        prompt_outputs = self._report_prompts(batch, scores)
        rows, starting = sampled_rows(batch, result), batch.starting
        is_live = table.sequence_id[rows.slots] == batch.sequence_ids
        if not is_live.all():  # aborted, or ended by the step before this one
            rows, starting = rows.select(is_live), starting[is_live[starting]]
        first = batch.slots[starting].astype(np.int64)
        self._latencies.sample(rows.slots, first, table.first_id[first], batch.is_partial)
        table.record(rows.slots, rows.positions, rows.token_ids, rows.logprobs)
        is_reported = rows.ends | self._stop_sets.may_end[rows.token_ids]
        if table.num_streaming:
            is_reported |= table.emit[rows.slots] != FINAL
        rows = rows.select(np.flatnonzero(is_reported))  # few, unless there are many streams
        is_stop = self._stop_sets.table[table.stop_row[rows.slots], rows.token_ids]
        reasons = np.where(is_stop, STOP, np.where(rows.ends, LENGTH, RUNNING))
        reasons[rows.token_ids < 0] = ERROR
        is_end, emit = reasons != RUNNING, table.emit[rows.slots]
        ended = rows.select(is_end)
        lengths = ended.positions - table.first_position[ended.slots] + (reasons[is_end] != ERROR)
        self._latencies.end(ended.slots, table.first_id[ended.slots], lengths)
        if table.num_keeping and table.keeps_end[ended.slots].any():
            self._keep_ends(ended, reasons[is_end])
        in_outputs = (is_end | (emit != FINAL)) & (emit != TOKENS)
        own, unreported = rows.select(in_outputs), registry.unreported
        outputs = make_outputs(
            table, registry.by_first_id, own, reasons[in_outputs], scores, unreported
        )
        if unreported:
            unreported.difference_update(table.sequence_id[own.slots].tolist())
        registry.count_ends(rows.slots[in_outputs & is_end])
        in_tokens = emit == TOKENS
        if table.num_streaming and in_tokens.any():
            own = rows.select(in_tokens)
            step = make_tokens(table, registry.by_first_id, own, reasons[in_tokens], scores)
            step.finished.extend(registry.count_ends(rows.slots[in_tokens & is_end]))
            self._tokens.append(step)
        table.free(ended.slots)
        return prompt_outputs + outputs

    def _keep_ends(self, rows: SampledRows, reasons: I64) -> None:
        """Keep the states of those of these ended sequences that something may go on from."""
        table, prefixes = self._table, self._prefixes
        if not prefixes.keep:
            return
        keeps = table.keeps_end[rows.slots] & (reasons != ERROR)
        keeps &= ~table.switches.have_met(table.sequence_id[rows.slots])  # of several weights
        rows, reasons = rows.select(keeps), reasons[keeps]
        for slot, position, token, reason in zip(
            *(rows.slots.tolist(), rows.positions.tolist(), rows.token_ids.tolist(), reasons),
            strict=True,
        ):
            group = self._registry.by_first_id[int(table.first_id[slot])]
            if reason == STOP and token not in group.request.params.stop_token_ids:
                continue  # the text is complete
            sampled = table.output_tokens.read(slot, len(group.prompt) - 1, position)
            tokens = np.concatenate([group.prompt, np.frombuffer(sampled, "<i4")])
            prefix = prefixes.claim(tokens, group.order, group.request.salt, only_new=True)
            if prefix is not None:
                prefixes.finish(prefix)
                prefixes.release(prefix)
                self._copies.append((slot, prefix.slot))

    def _report_prompts(self, batch: Batch, scores: Scores) -> list[Output]:
        """Return prompts' scores; end requests that want no more or whose scores are not finite."""
        outputs: list[Output] = []
        for row, first_id in enumerate(batch.scored_ids.tolist()):
            group = self._registry.by_first_id.get(first_id)
            if group is None:  # aborted, or broken by the step before this one
                continue
            output = make_prompt_scores(group, batch, row, scores)
            if output is None:
                outputs += self._end_unsampled(group, ERROR)
                continue
            outputs.append(output)
            group.scored += len(output.logprobs) // 4
            if not group.max_outputs and not group.is_scored:
                outputs += self._end_unsampled(group, LENGTH)
        return outputs

    def return_state(self, group: SequenceGroup, state: bytes) -> list[Output]:
        """End a request that wanted the state of its prompt; return its Outputs."""
        return [Output(group.request.id, PROMPT, state=state), *self._end_unsampled(group, LENGTH)]

    def _end_unsampled(self, group: SequenceGroup, reason: int) -> list[Output]:
        self._registry.drop(group)
        self._latencies.finish(group)
        return make_unsampled(group, reason)
