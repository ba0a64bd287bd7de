"""Chunk and assemble: the rows of a step as one Batch.

Decode rows come first, then chunks of prompts that are scored, then the other chunks: so the tokens
that the output head is wanted for are the first ones, and a step that scores nothing pays nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.state.latency import Turn
from engine.state.sequence import SequenceGroup
from engine.state.slots import SlotTable
from engine.steps.batch import FROM_DEVICE, I32, I64, NO_EDITS, SAMPLED, Batch, Edits
from engine.steps.token_edits import EditList

NOTHING: I32 = np.empty(0, np.int32)


class PromptChunk(NamedTuple):
    """The part of a group's prompt that one prefill row feeds: tokens start … stop - 1."""

    group: SequenceGroup
    start: int
    stop: int
    read_slot: int
    write_slot: int

    @property
    def num_scored(self) -> int:
        """Tokens whose next token is scored: all or none."""
        return self.stop - self.start if self.group.is_scored else 0

    @property
    def num_top(self) -> int:
        """Number of likeliest tokens wanted for each."""
        return self.group.request.params.prompt_logprobs or 0


def assemble(
    table: SlotTable, slots: I64, chunks: list[PromptChunk], turn: Turn | None = None
) -> Batch:
    """Make the batch that decodes these slots, i64[D], of that `turn`, and feeds these chunks."""
    scored = [chunk for chunk in chunks if chunk.num_scored]
    chunks = scored + [chunk for chunk in chunks if not chunk.num_scored]
    prefill_reads = np.array([chunk.read_slot for chunk in chunks], np.int32)
    prefill_writes = np.array([chunk.write_slot for chunk in chunks], np.int32)
    prefill_positions = np.array([chunk.start for chunk in chunks], np.int32)
    row_offsets = np.arange(len(slots) + len(chunks) + 1, dtype=np.int32)
    row_offsets[len(slots) + 1 :] = len(slots) + np.cumsum([c.stop - c.start for c in chunks])
    prompts = [chunk.group.prompt[chunk.start : chunk.stop] for chunk in chunks]
    positions = table.position[slots]
    own_slots = slots.astype(np.int32)
    read_slots, tokens = own_slots.copy(), np.full(len(slots), FROM_DEVICE, np.int32)
    starting = np.flatnonzero(positions == table.first_position[slots])
    read_slots[starting] = table.first_read[slots[starting]]
    tokens[starting] = table.first_token[slots[starting]]
    targets, score_rows, num_top = _scored(table, slots, scored)
    return Batch(
        sequence_ids=table.sequence_id[slots],
        read_slots=np.concatenate([read_slots, prefill_reads]),
        write_slots=np.concatenate([own_slots, prefill_writes]),
        positions=np.concatenate([positions, prefill_positions]),
        row_offsets=row_offsets,
        token_ids=np.concatenate([tokens, *prompts]),
        ends=positions == table.last_position[slots],
        temperature=table.temperature[slots],
        top_k=table.top_k[slots],
        top_p=table.top_p[slots],
        min_p=table.min_p[slots],
        seeds=table.seed[slots],
        scored_ids=np.array([chunk.group.first_id for chunk in scored], np.int64),
        targets=targets,
        score_rows=score_rows,
        num_top=num_top,
        edits=_edits(table, slots),
        starting=starting,
        turn=turn,
    )


def _scored(table: SlotTable, slots: I64, scored: list[PromptChunk]) -> tuple[I32, I32, I32]:
    sampled = np.full(len(slots), SAMPLED, np.int32)
    if not scored and not table.num_asking:
        return sampled, NOTHING, NOTHING
    alternatives = table.num_logprobs[slots]
    rows = np.flatnonzero(alternatives > 0).astype(np.int32)
    given = [chunk.group.prompt[chunk.start + 1 : chunk.stop + 1] for chunk in scored]
    targets = np.concatenate([sampled, *given])
    head_rows = np.arange(len(slots), len(targets), dtype=np.int32)
    tops = [np.full(chunk.num_scored, chunk.num_top, np.int32) for chunk in scored]
    num_top = np.concatenate([alternatives[rows], *tops])
    return targets, np.concatenate([rows, head_rows]), num_top


def _edits(table: SlotTable, slots: I64) -> Edits:
    if not table.edits:
        return NO_EDITS
    edits = EditList()
    rows = np.flatnonzero(table.is_edited[slots])
    edited = slots[rows]
    columns = (rows, edited, table.first_position[edited], table.position[edited])
    for row, slot, first, position in zip(*(one.tolist() for one in columns), strict=True):
        plan, num_sampled = table.edits[slot], position - first
        if plan.has_edits(num_sampled):
            # The device adds the last token itself: the host may not have it yet.
            reads = plan.reads_history and num_sampled > 1
            known = table.output_tokens.read(slot, first, position - 1) if reads else b""
            edits.add(row, plan, num_sampled, known)
    return edits.build()
