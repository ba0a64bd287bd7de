"""The requests that are not over: each until all its samples have ended or are to be forgotten, and
then nothing of it is left anywhere."""

from __future__ import annotations

import numpy as np

from srm.engine.scheduler.admission import Admission
from srm.engine.state.sequence import SequenceGroup
from srm.engine.steps.batch import I64


class RequestRegistry:
    """Groups by request id and by first sequence id."""

    def __init__(self, admission: Admission) -> None:
        self.by_id: dict[str, SequenceGroup] = {}
        self.by_first_id: dict[int, SequenceGroup] = {}
        self.unreported: set[int] = (
            set()
        )  # ids of sequences of which all so far is to be sent again
        self._admission = admission
        self._table, self._latencies = admission.table, admission.latencies

    def acquire_table(self, group: SequenceGroup) -> None:
        """Give a group's automaton room, until it is forgotten. Raises Overloaded if there is none.
        The group must be entered next."""
        if group.automaton is not None:
            constraint = group.request.params.constraint
            group.table = self._table.tables.acquire(constraint, group.automaton)

    def enter(self, group: SequenceGroup) -> None:
        """Add an accepted request."""
        self.by_id[group.request.id] = self.by_first_id[group.first_id] = group
        self._admission.enter(group)
        self._latencies.arrive(group)

    def report_again(self, group: SequenceGroup, indices: I64) -> None:
        """Have all tokens of these samples sent again, the earlier ones included."""
        if group.request.emit == "delta":
            self.unreported.update((group.first_id + indices).tolist())

    def drop(self, group: SequenceGroup) -> None:
        """Take the group out of everything and free its slots at once."""
        self._admission.leave(group)
        self._forget(group)

    def count_ends(self, slots: I64) -> list[str]:
        """Count sequences that ended in these slots; return the ids of requests that finishes."""
        finished = []
        first_ids, counts = np.unique(self._table.first_id[slots], return_counts=True)
        for first_id, count in zip(first_ids.tolist(), counts.tolist(), strict=True):
            group = self.by_first_id[first_id]
            group.unfinished -= count
            self._admission.shares.own(group.share, group.request.precedence, -count)
            if not group.unfinished:
                finished.append(group.request.id)
                self._latencies.finish(group)
                self._forget(group)
        return finished

    def _forget(self, group: SequenceGroup) -> None:
        del self.by_id[group.request.id], self.by_first_id[group.first_id]
        self._admission.shares.leave(group.share, group.request.precedence)
        if self.unreported:
            ids = range(group.first_id, group.first_id + group.request.params.n)
            self.unreported = {id for id in self.unreported if id not in ids}
        if group.stop_row >= 0:
            self._admission.stop_sets.release(group.stop_ids)
        if group.table:
            self._table.tables.release(group.request.params.constraint)
