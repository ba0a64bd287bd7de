"""Refeed: sequences that are fed again what they have, since other weights are in use.

One keeps its slot, and has no decode row until the state of all its tokens but the last is made
anew; then it goes on. It is fed from position 0 on, which ignores the state that its slot holds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from srm.engine.scheduler.assembly import PromptChunk
from srm.engine.state.sequence import SequenceGroup
from srm.engine.state.slots import SlotTable
from srm.engine.steps.batch import I32, I64


@dataclass(slots=True)
class _Refed:
    group: SequenceGroup
    slot: int
    sequence_id: int
    num_tokens: int
    fed: int = 0


class Refeed:
    """The sequences that are being fed again, and those that will be once they have a slot."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._line: deque[_Refed] = deque()
        self._due: set[int] = set()  # parked sequences
        self.num_tokens = 0
        """Tokens still to be fed, those of sequences that have ended meanwhile included."""

    def begin_anew(self, parked: I64) -> None:
        """Feed none of those that are being fed, and these parked sequences when they go on."""
        for own in self._line:
            if self._is_live(own):
                self._table.is_running[own.slot] = True
        self._line.clear()
        self.num_tokens = 0
        self._due = set(parked.tolist())

    def begin(self, group: SequenceGroup, slots: I32 | I64) -> None:
        """Have the group's sequences in these slots, which run, fed again."""
        for slot in slots.tolist():
            position = int(self._table.position[slot])
            if position:
                self._table.is_running[slot] = False
                sequence_id = int(self._table.sequence_id[slot])
                self._line.append(_Refed(group, slot, sequence_id, position))
                self.num_tokens += position

    def resume(self, group: SequenceGroup, slots: I32) -> None:
        """The same for those of a group that were parked, and go on, as far as they are due."""
        if self._due:
            ids = self._table.sequence_id[slots].tolist()
            is_due = np.array([id in self._due for id in ids], np.bool_)
            self._due.difference_update(ids)
            self.begin(group, slots[is_due])

    def chunks(self, room: int) -> list[PromptChunk]:
        """Return the next chunks, `room` tokens at most. Those that these are the last ones of have
        a row in the step after."""
        chunks: list[PromptChunk] = []
        while self._line and room > 0:
            own = self._line[0]
            if not self._is_live(own):
                self._line.popleft()
                self.num_tokens -= own.num_tokens - own.fed
                continue
            stop = min(own.fed + room, own.num_tokens)
            tokens = self._tokens(own)
            chunks.append(PromptChunk(None, tokens, own.fed, stop, own.slot, own.slot))
            room -= stop - own.fed
            self.num_tokens -= stop - own.fed
            own.fed = stop
            if stop == own.num_tokens:
                self._line.popleft()
                self._table.is_running[own.slot] = True
        return chunks

    def _is_live(self, own: _Refed) -> bool:
        return bool(self._table.sequence_id[own.slot] == own.sequence_id)

    def _tokens(self, own: _Refed) -> I32:
        """All of a sequence's tokens but the last one, which its next decode row feeds."""
        first = len(own.group.prompt) - 1
        if own.num_tokens == first:
            return own.group.prompt
        sampled = self._table.output_tokens.read(own.slot, first, own.num_tokens - 1)
        return np.concatenate([own.group.prompt, np.frombuffer(sampled, "<i4")])
