"""Tables: the automata of requests that are not over, in one array that the device has too.

Equal constraints share one. A table is where it is until the last request that has it ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from srm.engine.constraints.automaton import TokenAutomaton
from srm.engine.constraints.byte_table import START
from srm.engine.steps.batch import I32, U16
from srm.errors import Overloaded

TABLE_ENTRIES = 2**26
"""Entries of the array, all uint16: 128 MiB, which a thousand objects of three properties fit."""
TURN = 8
"""Entries that are read together. Each table begins at a multiple of it, the first at TURN: 0
stands for none."""


@dataclass(slots=True)
class _Table:
    start: int
    size: int
    users: int = 0


class Tables:
    """Where each constraint's table is."""

    def __init__(self, num_entries: int = TABLE_ENTRIES) -> None:
        self._num_entries = num_entries
        self._by_constraint: dict[str, _Table] = {}  # by where they begin, ascending
        self.unsent: list[tuple[int, U16]] = []
        """Tables that the device does not have yet, and where they begin."""
        self.nbytes = 0
        """Bytes of all tables."""

    def acquire(self, constraint: str, automaton: TokenAutomaton) -> int:
        """Return where the constraint's table begins, which is there until as many `release` as
        `acquire` were called. Raises Overloaded if there is no room for it."""
        table = self._by_constraint.get(constraint)
        if table is None:
            entries = _pack(automaton)
            table = _Table(self._find_room(len(entries)), len(entries))
            self._by_constraint[constraint] = table
            self._by_constraint = dict(
                sorted(self._by_constraint.items(), key=lambda item: item[1].start)
            )
            self.unsent.append((table.start, entries))
            self.nbytes += entries.nbytes
        table.users += 1
        return table.start

    def release(self, constraint: str) -> None:
        table = self._by_constraint[constraint]
        table.users -= 1
        if not table.users:
            del self._by_constraint[constraint]
            self.unsent = [own for own in self.unsent if own[0] != table.start]
            self.nbytes -= 2 * table.size

    def _find_room(self, size: int) -> int:
        start = TURN
        for table in self._by_constraint.values():
            if table.start - start >= size:
                return start
            start = table.start + -(-table.size // TURN) * TURN
        if self._num_entries - start >= size:
            return start
        raise Overloaded(
            f"the tables of constraints take {self.nbytes} of {2 * self._num_entries} bytes, and "
            f"this one takes {2 * size}",
            excess=1,
        )


def _pack(automaton: TokenAutomaton) -> U16:
    """Lay an automaton out as `mojo_kernels/srm/logits/constraints.mojo` reads it."""
    num_states, num_classes = automaton.next_state.shape
    sizes, class_of = np.zeros(TURN, np.uint16), automaton.class_of
    sizes[:2] = num_classes, num_states
    padding = np.zeros(-len(class_of) % TURN, np.uint16)
    after = automaton.next_state.reshape(-1)
    return np.concatenate([sizes, class_of, padding, after, automaton.distance])


def walk_each(automaton: TokenAutomaton, texts: Sequence[bytes]) -> I32:
    """Return the state after each of these texts' tokens, int32 in bytes: i32[texts]."""
    lengths = np.array([len(text) // 4 for text in texts])
    tokens = np.zeros((len(texts), max(lengths, default=0)), np.int32)
    tokens[np.arange(tokens.shape[1]) < lengths[:, None]] = np.frombuffer(b"".join(texts), "<i4")
    states = np.full(len(texts), START, np.int32)
    for place in range(tokens.shape[1]):
        goes_on = lengths > place
        classes = automaton.class_of[tokens[goes_on, place]]
        states[goes_on] = automaton.next_state[states[goes_on], classes]
    return states
