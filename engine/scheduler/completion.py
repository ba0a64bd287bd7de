"""Completion: takes in a step's result: keeps tokens, ends sequences, makes what callers get.

What depends on time comes from the batch, since the table may be one step ahead already.
"""

from __future__ import annotations

import numpy as np

from srm.engine.messages import Output
from srm.engine.scheduler.admission import Admission
from srm.engine.scheduler.outputs import (
    ERROR,
    LENGTH,
    RUNNING,
    STOP,
    StepTokens,
    make_outputs,
    make_prompt_scores,
    make_tokens,
    make_unsampled,
    sampled_rows,
)
from srm.engine.scheduler.request_registry import RequestRegistry
from srm.engine.state.sequence import SequenceGroup
from srm.engine.state.slots import FINAL, TOKENS
from srm.engine.steps.batch import Batch, Scores, StepResult


class StepCompletion:
    """Takes in the results of steps."""

    def __init__(self, admission: Admission, registry: RequestRegistry) -> None:
        self._table = admission.table
        self._stop_sets = admission.stop_sets
        self._latencies = admission.latencies
        self._registry = registry
        self._tokens: list[StepTokens] = []

    def take_tokens(self) -> list[StepTokens]:
        """Take the Tokens of the steps since the last call, step by step."""
        tokens, self._tokens = self._tokens, []
        return tokens

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
            if not group.max_outputs and group.scored == len(group.prompt) - 1:
                outputs += self._end_unsampled(group, LENGTH)
        return outputs

    def _end_unsampled(self, group: SequenceGroup, reason: int) -> list[Output]:
        self._registry.drop(group)
        self._latencies.finish(group)
        return make_unsampled(group, reason)
