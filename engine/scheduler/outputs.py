"""Turn a step's samples and scores into Outputs for the callers; change nothing.

Loops over ended sequences, streams and chunks of scored prompts, never over the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass

import numpy as np

from engine.messages import PROMPT, REASONS, Columns, Output
from engine.state.sequence import SequenceGroup
from engine.state.slots import DELTA, NO_LOGPROBS, SlotTable
from engine.steps.batch import F32, I32, I64, Batch, Bool, Scores
from engine.steps.token_deltas import U8

RUNNING, STOP, LENGTH, ERROR = range(4)  # indices into REASONS
NOT_FINITE = "the model's output was not finite"


NO_PLACE = -1


def places_of_scores(batch: Batch) -> I64:
    """i64[decode rows]: the place of each one's scores in the step's; NO_PLACE: it has none."""
    places = np.full(batch.num_decode, NO_PLACE)
    places[batch.score_rows[: batch.num_scored_decode]] = np.arange(batch.num_scored_decode)
    return places


def sampled(
    table: SlotTable,
    groups: Mapping[int, SequenceGroup],
    slots: I64,
    positions: I32,
    reasons: I64,
    places: I64,
    scores: Scores,
    untold: Set[int],
) -> list[Output]:
    """Make the Outputs of these slots' sequences: their new tokens, or all of them at their end.

    Their rows stood at `positions`, and they end or go on for these `reasons`. Groups are by first
    id, `places` of `places_of_scores`. Sequences in `untold` get all their tokens.
    """
    sequence_ids, tells_news = table.sequence_id[slots], table.emit[slots] == DELTA
    if untold:
        tells_news &= ~np.isin(sequence_ids, list(untold))
    columns = (
        slots,
        sequence_ids,
        table.first_id[slots],
        np.where(tells_news, positions, table.first_position[slots]),
        positions + (reasons != ERROR),  # an error is no token
        table.num_logprobs[slots],
        reasons,
        places,
    )
    outputs = []
    for slot, sequence_id, first_id, start, stop, num_logprobs, reason, place in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        group = groups[first_id]
        fields: dict[str, bytes] = {}
        if place != NO_PLACE:  # then it streams, and has one new token at most
            fields = scores.as_bytes(place, place + stop - start, num_logprobs)
        elif num_logprobs != NO_LOGPROBS:
            assert table.output_logprobs is not None
            fields = {"logprobs": table.output_logprobs.read(slot, start, stop)}
        outputs.append(
            Output(
                id=group.request.id,
                index=sequence_id - first_id,
                token_ids=table.output_tokens.read(slot, start, stop),
                finish_reason=REASONS[reason],
                error=NOT_FINITE if reason == ERROR else None,
                cached_tokens=group.cached,
                first_version=group.first_version,
                **fields,
            )
        )
    return outputs


@dataclass(frozen=True, slots=True, eq=False)
class NewTokens:
    """A step's new tokens of sequences with `emit` = "columns", for all API processes together."""

    streams: I64  # i64[rows]
    token_ids: I32  # i32[rows]
    reasons: U8  # u8[rows]
    logprobs: F32  # f32[rows], or none where nobody asked
    top_ids: I32  # i32[first rows, k] for those that asked, as many as any did
    top_logprobs: F32  # f32[first rows, k]
    cached: list[tuple[int, int]]  # stream and cached tokens of groups that begin to sample
    finished: list[str]  # ids of requests that end with these rows

    def split(self, bits: int) -> list[tuple[int, Columns]]:
        """Split into messages by owner: the bits of a stream number above the lowest `bits`."""
        owners = self.streams >> bits
        if len(owners) and (owners == owners[0]).all():
            return [(int(owners[0]), self._columns(slice(None), bits, int(owners[0])))]
        return [
            (owner, self._columns(owners == owner, bits, owner))
            for owner in np.unique(owners).tolist()
        ]

    def _columns(self, rows: slice | Bool, bits: int, owner: int) -> Columns:
        firsts = rows if isinstance(rows, slice) else rows[: len(self.top_ids)]
        return Columns(
            streams=(self.streams[rows] - (owner << bits)).tobytes(),
            token_ids=self.token_ids[rows].tobytes(),
            reasons=self.reasons[rows].tobytes(),
            logprobs=self.logprobs[rows].tobytes() if len(self.logprobs) else b"",
            num_top=self.top_ids.shape[1],
            top_ids=self.top_ids[firsts].tobytes(),
            top_logprobs=self.top_logprobs[firsts].tobytes(),
            cached=[
                (stream - (owner << bits), count)
                for stream, count in self.cached
                if stream >> bits == owner
            ],
        )


def new_tokens(
    table: SlotTable,
    groups: Mapping[int, SequenceGroup],
    slots: I64,
    positions: I32,
    tokens: I32,
    logprobs: F32,
    reasons: I64,
    places: I64,
    scores: Scores,
) -> NewTokens:
    """Collect what these slots' sequences sampled at these positions, and which end; see `sampled`.
    The caller, who counts the ends, fills `finished` in."""
    num_top, found = 0, places[places != NO_PLACE]
    if len(found):  # theirs are the first rows
        order = np.argsort(places == NO_PLACE, kind="stable")
        slots, positions, tokens = slots[order], positions[order], tokens[order]
        logprobs, reasons = logprobs[order], reasons[order]
        logprobs[: len(found)] = scores.logprobs[found]
        num_top = int(table.num_logprobs[slots[: len(found)]].max())
    first_ids = np.unique(table.first_id[slots[positions == table.first_position[slots]]])
    begun = [groups[first_id] for first_id in first_ids.tolist()]
    asks = bool((table.num_logprobs[slots] != NO_LOGPROBS).any())
    return NewTokens(
        streams=table.stream[slots],
        token_ids=tokens,
        reasons=reasons.astype(np.uint8),
        logprobs=logprobs if asks else logprobs[:0],
        top_ids=scores.top_ids[found, :num_top],
        top_logprobs=scores.top_logprobs[found, :num_top],
        cached=[(group.request.stream, group.cached) for group in begun if group.cached],
        finished=[],
    )


def prompt_scores(group: SequenceGroup, batch: Batch, row: int, scores: Scores) -> Output | None:
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


def unsampled(group: SequenceGroup, reason: int) -> list[Output]:
    """Make the last Outputs, indices 0 and up, of a group none of which has begun to sample."""
    return [
        Output(
            id=group.request.id,
            index=index,
            finish_reason=REASONS[reason],
            error=NOT_FINITE if reason == ERROR else None,
        )
        for index in range(group.unfinished)
    ]
