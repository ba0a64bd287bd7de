"""Completion: takes in a step's result: keeps tokens, ends sequences, makes what callers are told.

What depends on time comes from the batch, since the table may be one step ahead already.
"""

from __future__ import annotations

import numpy as np

from engine.messages import Output
from engine.scheduler.admission import Admission
from engine.scheduler.outputs import (
    ERROR,
    LENGTH,
    RUNNING,
    STOP,
    NewTokens,
    new_tokens,
    places_of_scores,
    prompt_scores,
    sampled,
    unsampled,
)
from engine.scheduler.request_registry import RequestRegistry
from engine.state.sequence import SequenceGroup
from engine.state.slots import COLUMNS, FINAL
from engine.steps.batch import F32, I32, I64, Batch, Scores, StepResult


class StepCompletion:
    """Takes in the results of steps."""

    def __init__(self, admission: Admission, roster: RequestRegistry) -> None:
        self._table = admission.table
        self._stop_sets = admission.stop_sets
        self._latencies = admission.latencies
        self._roster = roster
        self._columns: list[NewTokens] = []

    def take_columns(self) -> list[NewTokens]:
        """Take the columns of the steps since the last call, step by step."""
        columns, self._columns = self._columns, []
        return columns

    def complete(self, batch: Batch, result: StepResult) -> list[Output]:
        """See `Scheduler.complete`."""
        table = self._table
        prompt_outputs = self._report_prompts(batch, result.scores)
        # int64 is what numpy indexes with: it would convert an int32 index at every use.
        slots, positions, ends = batch.slots.astype(np.int64), batch.positions, batch.ends
        tokens, logprobs, starting = result.token_ids, result.logprobs, batch.starting
        places = places_of_scores(batch)
        is_live = table.sequence_id[slots] == batch.sequence_ids
        if not is_live.all():  # aborted, or ended by the step before this one
            slots, positions, ends = slots[is_live], positions[is_live], ends[is_live]
            tokens, logprobs, places = tokens[is_live], logprobs[is_live], places[is_live]
            starting = starting[is_live[starting]]
        first = batch.slots[starting].astype(np.int64)
        self._latencies.sample(slots, first, table.first_id[first], batch.is_turn)
        table.record(slots, positions, tokens, logprobs)
        may_speak = ends | self._stop_sets.may_end[tokens]
        if table.num_streaming:
            may_speak |= table.emit[slots] != FINAL
        rows = np.flatnonzero(may_speak)  # few, unless there are many streams
        slots, positions, tokens, ends = slots[rows], positions[rows], tokens[rows], ends[rows]
        places = places[rows]
        is_stop = self._stop_sets.table[table.stop_row[slots], tokens]
        reasons = np.where(is_stop, STOP, np.where(ends, LENGTH, RUNNING))
        reasons[tokens < 0] = ERROR
        emit = table.emit[slots]
        in_columns = np.flatnonzero(emit == COLUMNS)
        speaks = ((reasons != RUNNING) | (emit != FINAL)) & (emit != COLUMNS)
        outputs = sampled(
            table,
            self._roster.by_first_id,
            slots[speaks],
            positions[speaks],
            reasons[speaks],
            places[speaks],
            result.scores,
            self._roster.untold,
        )
        if self._roster.untold:
            self._roster.untold.difference_update(table.sequence_id[slots[speaks]].tolist())
        is_end = reasons != RUNNING
        ended = slots[is_end]
        lengths = positions[is_end] - table.first_position[ended] + (reasons[is_end] != ERROR)
        self._latencies.end(ended, table.first_id[ended], lengths)
        self._roster.count_ends(slots[speaks & is_end])
        if len(in_columns):
            self._complete_columns(
                *(slots[in_columns], positions[in_columns], tokens[in_columns]),
                *(logprobs[rows][in_columns], reasons[in_columns]),
                *(places[in_columns], result.scores),
            )
        table.free(ended)
        return prompt_outputs + outputs

    def _complete_columns(
        self,
        slots: I64,
        positions: I32,
        tokens: I32,
        logprobs: F32,
        reasons: I64,
        places: I64,
        scores: Scores,
    ) -> None:
        columns = new_tokens(
            *(self._table, self._roster.by_first_id, slots, positions, tokens),
            *(logprobs, reasons, places, scores),
        )
        columns.finished.extend(self._roster.count_ends(slots[reasons != RUNNING]))
        self._columns.append(columns)

    def _report_prompts(self, batch: Batch, scores: Scores) -> list[Output]:
        """Return prompts' scores; end requests that want no more or whose scores are not finite."""
        outputs: list[Output] = []
        for row, first_id in enumerate(batch.scored_ids.tolist()):
            group = self._roster.by_first_id.get(first_id)
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
        self._roster.drop(group)
        self._latencies.finish(group)
        return unsampled(group, reason)
