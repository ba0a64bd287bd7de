"""Chunk and assemble: the rows of a step as one Batch.

Decode rows come first, then chunks of prompts that are scored, then the other chunks: so the tokens
that the output head is wanted for are the first ones, and a step that scores nothing pays nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from srm.engine.constraints.grammars import Grammar
from srm.engine.state.sequence import SequenceGroup
from srm.engine.state.slots import SlotTable
from srm.engine.steps.batch import (
    FROM_DEVICE,
    I32,
    I64,
    NEW_ROW,
    NO_EDITS,
    PREFILL_ROW,
    SAMPLED,
    Batch,
    Edits,
    Records,
)
from srm.engine.steps.token_edits import EditList, add_masks, without_ends

NOTHING: I32 = np.empty(0, np.int32)
FED, FOLLOWING = np.array([FROM_DEVICE], np.int32), np.array([SAMPLED], np.int32)
"""Token ids and targets that stand for all decode rows."""


class PromptChunk(NamedTuple):
    """The part of a group's prompt that one prefill row feeds: tokens start … stop - 1."""

    group: SequenceGroup | None
    """None: it is no prompt, but all tokens of a sequence that is fed again."""
    tokens: I32
    start: int
    stop: int
    read_slot: int
    write_slot: int

    @property
    def num_scored(self) -> int:
        """Tokens whose next token is scored: all or none."""
        group = self.group
        is_scored = group is not None and group.is_scored and self.start >= group.num_quiet
        return self.stop - self.start if is_scored else 0

    @property
    def num_top(self) -> int:
        """Number of likeliest tokens wanted for each."""
        return (self.group and self.group.request.params.prompt_logprobs) or 0

    @property
    def named(self) -> tuple[int, ...]:
        """The tokens wanted instead of these, if any."""
        return self.group.request.params.prompt_logprob_token_ids if self.group else ()


class NamedLists:
    """Lists of tokens, as `Batch.named` has them; equal ones are one."""

    def __init__(self) -> None:
        self._begins: dict[tuple[int, ...], int] = {}
        self._ids: list[int] = []

    def add(self, token_ids: tuple[int, ...]) -> int:
        """Return what `Batch.num_top` says of such a list."""
        if token_ids not in self._begins:
            self._begins[token_ids] = len(self._ids)
            self._ids += [len(token_ids), *token_ids]
        return ~self._begins[token_ids]

    def build(self) -> I32:
        """Return all lists."""
        return np.array(self._ids, np.int32)


def mask_rows(table: SlotTable, slots: I64) -> tuple[I64, I32]:
    """Return those of these slots that can sample now, and the masks of those that a grammar masks:
    i32[masked, words]. The others need a longer search for the end of their text."""
    places = np.flatnonzero(table.is_masked[slots])
    if not len(places):
        return slots, NO_EDITS.masks
    masks, waiting = _masks(table, slots[places])
    return np.delete(slots, places[waiting]), np.delete(masks, waiting, axis=0)


def assemble(
    table: SlotTable,
    slots: I64,
    chunks: list[PromptChunk],
    is_partial: bool = False,
    masks: I32 = NO_EDITS.masks,
) -> Batch:
    """Make the batch that decodes these slots, i64[D], with the masks of `mask_rows`, and feeds
    these chunks. `is_partial`: others run too."""
    scored = [chunk for chunk in chunks if chunk.num_scored]
    chunks = scored + [chunk for chunk in chunks if not chunk.num_scored]
    positions = table.position[slots]
    rows = np.flatnonzero(table.is_new[slots])
    return Batch(
        sequence_ids=table.sequence_id[slots],
        slots=slots.astype(np.int32),
        positions=positions,
        ends=positions == table.last_position[slots],
        new=_new_rows(table, slots, rows),
        prefill=_prefill_rows(chunks, len(slots)),
        token_ids=np.concatenate([FED, *(c.tokens[c.start : c.stop] for c in chunks)]),
        scored_ids=np.array([chunk.group.first_id for chunk in scored if chunk.group], np.int64),
        edits=_edits(table, slots, masks),
        has_tables=table.tables.nbytes > 0,
        tables=table.tables.unsent,
        starting=rows[positions[rows] == table.first_position[slots[rows]]],
        is_partial=is_partial,
        **_scored(table, slots, scored),
    )


def _new_rows(table: SlotTable, slots: I64, rows: I64) -> Records:
    of = slots[rows]
    new = np.empty(len(rows), NEW_ROW)
    new["row"], new["read_slot"], new["token"] = rows, table.first_read[of], table.first_token[of]
    new["sampling"] = table.sampling[of]
    return new


def _prefill_rows(chunks: list[PromptChunk], num_decode: int) -> Records:
    rows, end = [(0, 0, 0, num_decode)], num_decode
    for chunk in chunks:
        end += chunk.stop - chunk.start
        rows.append((chunk.read_slot, chunk.write_slot, chunk.start, end))
    return np.array(rows, PREFILL_ROW)


def _scored(table: SlotTable, slots: I64, scored: list[PromptChunk]) -> dict[str, I32]:
    if not scored and not table.num_asking:
        return {
            "targets": FOLLOWING,
            **dict.fromkeys(("score_rows", "num_top", "named"), NOTHING),
        }
    alternatives, named = table.num_logprobs[slots], NamedLists()
    rows = np.flatnonzero(alternatives > 0).astype(np.int32)
    wanted = alternatives[rows]
    if table.named:
        groups, whose = np.unique(table.first_id[slots[rows]], return_inverse=True)
        own = [table.named.get(first_id, ()) for first_id in groups.tolist()]
        lists = np.array([named.add(token_ids) if token_ids else 0 for token_ids in own], np.int32)
        wanted = np.where(lists[whose] < 0, lists[whose], wanted)
    given = [chunk.tokens[chunk.start + 1 : chunk.stop + 1] for chunk in scored]
    targets = np.concatenate([FOLLOWING, *given])
    head_rows = np.arange(len(slots), len(slots) + len(targets) - 1, dtype=np.int32)
    tops = [
        np.full(
            chunk.num_scored, named.add(chunk.named) if chunk.named else chunk.num_top, np.int32
        )
        for chunk in scored
    ]
    return {
        "targets": targets,
        "score_rows": np.concatenate([rows, head_rows]),
        "num_top": np.concatenate([wanted, *tops]),
        "named": named.build(),
    }


def _edits(table: SlotTable, slots: I64, masks: I32) -> Edits:
    if not table.edits:
        return NO_EDITS
    edits, masked = EditList(), np.flatnonzero(table.is_masked[slots])
    rows = np.flatnonzero(table.is_edited[slots])
    edited = slots[rows]
    columns = (rows, edited, table.first_position[edited], table.position[edited])
    for row, slot, first, position in zip(*(column.tolist() for column in columns), strict=True):
        plan, num_sampled = table.edits[slot], position - first
        if plan.has_edits(num_sampled):
            # The device adds the last token itself: the host may not have it yet.
            reads = plan.reads_history and num_sampled > 1
            known = table.output_tokens.read(slot, first, position - 1) if reads else b""
            edits.add(row, plan, num_sampled, known)
        if plan.grammar is not None and num_sampled < plan.min_tokens:
            place = int(np.searchsorted(masked, row))
            masks[place] = without_ends(masks[place], plan.ends)
    return add_masks(edits.build(), masked, masks) if len(masked) else edits.build()


def _masks(table: SlotTable, slots: I64) -> tuple[I32, list[int]]:
    """Return what each of these slots may sample, i32[slots, words], as `Edits.masks` has it, and
    the rows of which that is not known yet."""
    firsts, positions = table.first_position[slots], table.position[slots]
    is_begun = positions > firsts
    begun, fresh = slots[is_begun], slots[~is_begun]
    last = table.output_tokens.read_each(begun, positions[is_begun] - 1)

    def find(slot: int) -> tuple[Grammar, bytes]:
        """Return a slot's grammar, and all tokens of its sequence."""
        first, position = int(table.first_position[slot]), int(table.position[slot])
        return table.grammar(slot), table.output_tokens.read(slot, first, position)

    parts = [table.matchers.next_masks(begun.tolist(), last.tolist(), find)] if len(begun) else []
    parts += [table.grammar(slot).first_mask[None] for slot in fresh.tolist()]
    order = np.concatenate([begun, fresh])
    masks = np.concatenate(parts) if len(fresh) else parts[0]
    lefts = table.last_position[order] - table.position[order] + 1
    lasts = [*last.tolist(), *[None] * len(fresh)]
    waiting = table.matchers.close(order.tolist(), lefts.tolist(), lasts, masks, table.grammar)
    if not len(fresh):
        return masks, waiting
    places = np.concatenate([np.flatnonzero(is_begun), np.flatnonzero(~is_begun)])
    return masks[np.argsort(places)], places[waiting].tolist()
