"""Parking: sequences without a slot, kept until they get one again.

Keeps: memory of what is parked is counted until it is given back, which is when the last of those
that were parked together goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from srm.engine.scheduler.wait_queues import FairQueue
from srm.engine.state.fair_share import FairShare
from srm.engine.state.latency import RequestTimes
from srm.engine.state.parked import Parked
from srm.engine.state.sequence import SequenceGroup
from srm.engine.state.slots import NO_LOGPROBS, SlotTable
from srm.engine.steps.batch import I32, I64, SlotStates


class Taken(NamedTuple):
    """Sequences of one group, out of their slots."""

    first_id: int
    slots: I64  # i64[k] which they had
    parked: Parked


def parkable(table: SlotTable) -> I64:
    """Slots of sequences that go on and have sampled: their state lies in their own slot."""
    return np.flatnonzero(table.is_running & (table.position > table.first_position))


def check_fits(group: SequenceGroup, parked: Parked) -> None:
    """Assert that these are sequences of the group: whoever kept them had its request."""
    first, asks = len(group.prompt) - 1, group.request.params.logprobs is not None
    lengths = (4 * (parked.positions.astype(np.int64) - first)).tolist()
    assert (np.diff(parked.indices) > 0).all() and len(parked.states) == len(parked)
    assert all(0 <= index < group.request.params.n for index in parked.indices[[0, -1]])
    assert all(0 < length // 4 < group.max_outputs for length in lengths)
    assert [len(token) for token in parked.tokens] == lengths
    assert [len(logprob) for logprob in parked.logprobs] == [length * asks for length in lengths]


def collect_states(table: SlotTable, slots: I64, states: SlotStates) -> Iterator[Taken]:
    """Yield what these slots' sequences need to go on in others, by group; the groups share memory.

    `slots` are some of `parkable`, `states` what the pool holds of them, all steps being completed.
    """
    order = np.argsort(table.sequence_id[slots])
    slots = slots[order]
    first_ids, begins = np.unique(table.first_id[slots], return_index=True)
    ends = [*begins[1:].tolist(), len(slots)][: len(begins)]
    all_of_them = _parked(table, slots, states.only(order))
    for first_id, begin, end in zip(first_ids.tolist(), begins.tolist(), ends, strict=True):
        own = slice(begin, end)
        yield Taken(first_id, slots[own], all_of_them.only(own))


def merge_writes(
    resumed: list[tuple[I64, SlotStates]], most: int
) -> Iterator[tuple[I64, SlotStates]]:
    """Merge writes into few of about `most` slots each, ascending: neighbouring slots meet."""
    while resumed:
        count, size = 0, 0
        while count < len(resumed) and size < most:
            size += len(resumed[count][0])
            count += 1
        some, resumed = resumed[:count], resumed[count:]
        slots = np.concatenate([slots for slots, _ in some])
        order = np.argsort(slots)
        yield slots[order], SlotStates.join([states for _, states in some]).only(order)


def _parked(table: SlotTable, slots: I64, states: SlotStates) -> Parked:
    firsts, positions = table.first_position[slots], table.position[slots]
    asks = table.num_logprobs[slots] != NO_LOGPROBS
    rows = list(zip(slots.tolist(), firsts.tolist(), positions.tolist(), strict=True))
    logprobs = table.output_logprobs
    return Parked(
        indices=table.sequence_id[slots] - table.first_id[slots],
        positions=positions,
        states=states,
        tokens=tuple(table.output_tokens.read(*row) for row in rows),
        logprobs=tuple(
            b"" if logprobs is None or not is_asked else logprobs.read(*row)
            for row, is_asked in zip(rows, asks.tolist(), strict=True)
        ),
    )


@dataclass(slots=True, eq=False)
class _Piece:
    """Sequences of one group that were parked together; those before `begin` run again."""

    parked: Parked
    times: RequestTimes
    begin: int = 0

    def rest(self) -> tuple[Parked, RequestTimes]:
        """Return the sequences still parked, and their times."""
        rest = slice(self.begin, len(self.parked))
        return self.parked.only(rest), self.times.only(rest)


class Parking:
    """All parked sequences, and the groups in line to go on."""

    def __init__(self, max_bytes: int) -> None:
        self.line = FairQueue()
        self.num_bytes = 0
        self.num_parked = 0
        self.num_ever_parked = 0
        self.num_resumed = 0
        self._max_bytes = max_bytes
        self._pieces: dict[SequenceGroup, deque[_Piece]] = {}

    @property
    def room(self) -> int:
        """Bytes that are left for parking."""
        return self._max_bytes - self.num_bytes

    @property
    def own_room(self) -> int:
        """Bytes that are left where a share parks for itself: it must not fill what others need."""
        return self.room - self._max_bytes // 2

    def holds(self, group: SequenceGroup) -> bool:
        """Whether sequences of the group are parked."""
        return group in self._pieces

    def records(self) -> Iterator[tuple[SequenceGroup, Parked]]:
        """Yield all that is parked; a group may come several times."""
        for group, pieces in self._pieces.items():
            for piece in pieces:
                yield group, piece.rest()[0]

    def num_tokens(self) -> tuple[I64, I64]:
        """Return all parked sequences, and how many tokens each has sampled."""
        ids, counts = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for group, parked in self.records():
            ids.append(group.first_id + parked.indices)
            counts.append(parked.positions.astype(np.int64) - (len(group.prompt) - 1))
        return np.concatenate(ids), np.concatenate(counts)

    def indices(self, group: SequenceGroup) -> I64:
        """Return which samples of the group are parked, in no order."""
        pieces = [piece.rest()[0].indices for piece in self._pieces.get(group, ())]
        return np.concatenate([np.empty(0, np.int64), *pieces])

    def count(self, share: FairShare, above: int) -> int:
        """Number of the share's parked sequences that have a higher precedence than `above`."""
        count = 0
        for group in self.line.get_queue(share.tier.priority).list_groups(share):
            if group.request.precedence <= above:
                break
            count += sum(len(piece.parked) - piece.begin for piece in self._pieces[group])
        return count

    def put(self, group: SequenceGroup, parked: Parked, times: RequestTimes) -> None:
        """Keep these sequences of the group, which hold no slot from now on."""
        pieces = self._pieces.get(group)
        if pieces is None:
            pieces = self._pieces[group] = deque()
            self.line.push(group)
        pieces.append(_Piece(parked, times))
        self.num_bytes += parked.nbytes
        self._count(group, len(parked))

    def pop_parked(self, group: SequenceGroup, count: int) -> tuple[Parked, RequestTimes]:
        """Take sequences that are to go on, `count` at most; those parked first come first."""
        pieces = self._pieces[group]
        piece = pieces[0]
        parked, times = piece.rest()
        chosen = slice(0, count)
        piece.begin += min(count, len(parked))
        if piece.begin == len(piece.parked):
            self._remove(group, piece)
        self.num_resumed += min(count, len(parked))
        self._count(group, -min(count, len(parked)))
        return parked.only(chosen), times.only(chosen)

    def drop(self, group: SequenceGroup, wanted: I64) -> list[tuple[I32, RequestTimes]]:
        """Forget the group's sequences of these indices; return their positions and times."""
        dropped = []
        for piece in list(self._pieces.get(group, ())):
            parked, times = piece.rest()
            goes = np.isin(parked.indices, wanted)
            if goes.any():
                dropped.append((parked.positions[goes], times.only(goes)))
                self._count(group, -int(np.count_nonzero(goes)))
                left = _Piece(parked.only(np.flatnonzero(~goes)), times.only(~goes))
                self._remove(group, piece, left)
        return dropped

    def _remove(self, group: SequenceGroup, piece: _Piece, left: _Piece | None = None) -> None:
        """Replace a piece by what is left of it, or remove it if nothing is."""
        pieces = self._pieces[group]
        self.num_bytes -= piece.parked.nbytes
        if left and len(left.parked):
            pieces[pieces.index(piece)] = left
            self.num_bytes += left.parked.nbytes
            return
        pieces.remove(piece)
        if not pieces:
            del self._pieces[group]
            self.line.discard(group)

    def _count(self, group: SequenceGroup, more: int) -> None:
        self.num_parked += more
        group.share.parked += more
