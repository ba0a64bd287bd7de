"""Turn a step's samples and scores into what callers get: Outputs and Tokens; change nothing.

Loops over ended sequences, streams and chunks of scored prompts, never over the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from srm.engine.messages import PROMPT, REASONS, Output
from srm.engine.state.parked import Parked
from srm.engine.state.sequence import SequenceGroup
from srm.engine.state.slots import DELTA, NO_LOGPROBS, SlotTable
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
    return [
        Output(group.request.id, index, finish_reason=REASONS[reason], error=error)
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
