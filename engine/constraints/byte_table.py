"""Automata over bytes as tables: the smallest one, and how far its states are from an end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from srm.engine.constraints.byte_automaton import Dfa, NotCompiled, Work

I32 = npt.NDArray[np.int32]
Bool = npt.NDArray[np.bool_]
DEAD, START = 0, 1
"""States of a table. What cannot end any more is DEAD."""
FAR = 2**31 - 1
"""A distance: nothing leads there."""


@dataclass(frozen=True, eq=False)
class ByteDfa:
    """The smallest automaton of a constraint, over classes of bytes that it does not tell apart."""

    next_state: I32
    """[states, classes]; the first two are DEAD and START."""
    class_of: I32
    """[256]"""
    accepting: Bool
    """[states]"""


def smallest(dfa: Dfa, work: Work) -> ByteDfa:
    """Make states one that no text tells apart. Raises NotCompiled."""
    sets = list(dict.fromkeys(byte_set for arcs in dfa.arcs for byte_set, _ in arcs))
    raw = b"".join(byte_set.to_bytes(32, "little") for byte_set in sets)
    bits = np.unpackbits(np.frombuffer(raw, np.uint8).reshape(-1, 32), axis=1, bitorder="little")
    columns: dict[bytes, int] = {}
    class_of = np.array(
        [columns.setdefault(bits[:, byte].tobytes(), len(columns)) for byte in range(256)], np.int32
    )
    first_byte = [class_of.tolist().index(number) for number in range(len(columns))]
    number_of = {byte_set: number for number, byte_set in enumerate(sets)}
    arcs = np.array(
        [
            (state, number_of[byte_set], to)
            for state, row in enumerate(dfa.arcs, START)
            for byte_set, to in row
        ],
        np.int32,
    ).reshape(-1, 3)
    work.spend(len(arcs))
    table = np.zeros((len(dfa.arcs) + START, len(columns)), np.int32)
    own, classes = np.nonzero(bits[arcs[:, 1]][:, first_byte])
    table[arcs[own, 0], classes] = arcs[own, 2] + START
    accepting = np.array([False, *dfa.accepting])
    group = _number(_group(table, accepting, work)[:, None])
    if group[START] == group[DEAD]:
        raise NotCompiled("nothing meets it")
    first = np.unique(group, return_index=True)[1]
    return ByteDfa(group[table[first]], class_of, accepting[first])


def _group(table: I32, accepting: Bool, work: Work) -> I32:
    """Return numbers of states, the same for those that no text tells apart: [states].

    States are grouped by how far the nearest end is. Then groups are split whose states lead to
    different ones; the largest part keeps the number, so that little has to be looked at again.
    """
    arrows = _Arrows(table)
    group = _number(arrows.count_steps(accepting)[:, None])
    sizes = np.bincount(group).tolist()
    changed = np.arange(len(table))
    while len(changed):
        work.spend(10 + len(changed) * (8 + table.shape[1]) // 8)
        parts: dict[int, list[npt.NDArray[np.int64]]] = {}
        numbers = _number(np.column_stack([group[changed], group[table[changed]]]))
        order = np.argsort(numbers, kind="stable")
        for part in np.split(changed[order], np.flatnonzero(np.diff(numbers[order])) + 1):
            parts.setdefault(int(group[part[0]]), []).append(part)
        split = []
        for number, own in parts.items():
            rest = sizes[number] - sum(map(len, own))
            largest = max(range(len(own)), key=lambda place: len(own[place]))
            if rest >= len(own[largest]):
                split += own
                sizes[number] = rest
                continue
            sizes[number] = len(own[largest])
            if rest:
                split.append(np.setdiff1d(np.flatnonzero(group == number), np.concatenate(own)))
            split += own[:largest] + own[largest + 1 :]
        for part in split:
            group[part] = len(sizes)
            sizes.append(len(part))
        changed = arrows.before(np.concatenate(split)) if split else changed[:0]
    return group


def _number(rows: npt.NDArray[np.integer]) -> I32:
    """Number rows in the order in which they first come; equal ones have one number."""
    raw, width = np.ascontiguousarray(rows, np.int32).tobytes(), rows.shape[1] * 4
    known: dict[bytes, int] = {}
    places = range(0, len(raw), width)
    return np.array([known.setdefault(raw[i : i + width], len(known)) for i in places], np.int32)


class _Arrows:
    """From where each state of a table is reached."""

    def __init__(self, table: npt.NDArray[np.integer]) -> None:
        sources, classes = np.nonzero(table != DEAD)
        arrows = np.unique(table[sources, classes].astype(np.int64) * len(table) + sources)
        ends, self._sources = np.divmod(arrows, len(table))
        self._bounds = np.searchsorted(ends, np.arange(len(table) + 1))

    def before(self, states: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """Return the states from which one of these is reached."""
        starts = self._bounds[states]
        lengths = self._bounds[states + 1] - starts
        offsets = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
        return np.unique(self._sources[offsets + np.arange(len(offsets))])

    def count_steps(self, goals: Bool) -> I32:
        """Return how many steps each state is from the nearest goal; FAR where none is ahead."""
        steps = np.full(len(goals), FAR, np.int32)
        reached, count = np.flatnonzero(goals), 0
        while len(reached):
            steps[reached] = count
            count += 1
            before = self.before(reached)
            reached = before[steps[before] == FAR]
        return steps


def count_steps(table: npt.NDArray[np.integer], goals: Bool) -> I32:
    """Return how many steps each state of a table [states, classes] is from the nearest goal: FAR
    where none is ahead."""
    return _Arrows(table).count_steps(goals)
