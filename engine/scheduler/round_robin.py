"""Round robin: which running sequences a step decodes when there are more than it has rows.

Sequences of the highest priority first, then those of the next one; within a priority those that
have not sampled yet, of each share as many, then the others in turn; a share's own rows go to its
highest precedence. Keeps: with one priority and precedence, the work of a step depends on its rows
and not on how many slots there are, but for counting those that run or begin.
"""

from __future__ import annotations

import numpy as np

from srm.engine.state.fair_share import FairShare, FairShares
from srm.engine.state.slots import SlotTable
from srm.engine.steps.batch import I64, Bool

PATIENCE = 8
"""Steps on end in which new sequences may have most of the rows. Then the others have half, so that
those who begin without end do not keep them from going on."""


MASKED, MASKED_PART = 16, 8
"""Most rows of a step that a grammar masks where others have rows: so many, or one for so many of
the others. A mask takes time of the host, which others are not to wait for."""


class RoundRobin:
    """The slot whose turn it is, for each priority."""

    def __init__(self) -> None:
        self._next: dict[int, int] = {}  # the slot whose turn it is, by priority
        self._next_masked = 0  # the masked slot whose turn it is
        self._num_steps = 0  # in which not all had a row
        self._num_crowded = 0  # steps on end in which new sequences had most of the rows

    def choose_slots(self, table: SlotTable, shares: FairShares, room: int) -> tuple[I64, bool]:
        """The slots to decode, i64[room at most], and whether others run too."""
        num_running = int(np.count_nonzero(table.is_running))
        if num_running <= room:
            return np.flatnonzero(table.is_running), False
        owning = shares.owning
        self._num_steps += 1
        self._next = {key: slot for key, slot in self._next.items() if key in owning}
        if len(owning) > 1:
            slots = self._by_priority(table, shares, room)
        else:
            slots = self._in_turn(table, shares, None, owning[0], num_running, room)
        for share in shares.mixed:
            if len(share.owned_at) > 1:
                slots = self._by_precedence(table, share, slots)
        return slots, True

    def limit_masked(self, table: SlotTable, shares: FairShares, slots: I64, num_fed: int) -> I64:
        """Return these slots without masked ones whose turn it is not: those of the highest
        priorities come first, and of these the ones that have not sampled. `num_fed` tokens of
        prompts are in the same step."""
        is_masked = table.is_masked[slots]
        masked = slots[is_masked]
        num_others = len(slots) - len(masked) + num_fed
        most = max(MASKED, num_others // MASKED_PART)
        if not num_others or len(masked) <= most:
            return slots
        since = (masked - self._next_masked) % table.num_slots
        priorities = np.asarray(shares.priorities)[table.share[masked]]
        begun = table.position[masked] > table.first_position[masked]
        order = np.lexsort((since, begun, -table.precedence[masked].astype(np.int64), -priorities))
        chosen = masked[order[:most]]
        self._next_masked = int(chosen[-1]) + 1
        return np.sort(np.concatenate([slots[~is_masked], chosen]))

    def _by_priority(self, table: SlotTable, shares: FairShares, room: int) -> I64:
        """All running slots of the higher priorities, and a turn of the first that does not fit."""
        descending = shares.owning[::-1]
        counts = np.cumsum(
            [shares.tiers[priority].owned for priority in descending]
        )  # or fewer that run
        fitting = int(np.searchsorted(counts, room, "right"))
        chosen = []
        if fitting:
            is_above = shares.priorities >= descending[fitting - 1]  # by place: few
            chosen.append(np.flatnonzero(is_above[table.share] & table.is_running))
            room -= len(chosen[0])
        for priority in descending[fitting:]:
            if not room:
                break
            its_own, owned = shares.priorities == priority, shares.tiers[priority].owned
            chosen.append(self._in_turn(table, shares, its_own, priority, owned, room))
            room -= len(chosen[-1])
        return np.concatenate(chosen)

    def _by_precedence(self, table: SlotTable, share: FairShare, chosen: I64) -> I64:
        """The slots chosen, where those of the share are as many of its highest precedences."""
        is_own = table.share[chosen] == share.place
        own, others = chosen[is_own], chosen[~is_own]
        slots = np.flatnonzero(table.is_running & (table.share == share.place))
        if not len(own) or len(own) == len(slots):
            return chosen
        # Whose turn it was is among them while it is of the precedence that takes turns.
        waits = ~np.isin(slots, own)
        since = (slots - self._next.get(share.tier.priority, 0)) % table.num_slots
        order = np.lexsort((since, waits, -table.precedence[slots].astype(np.int64)))
        return np.concatenate([others, slots[order[: len(own)]]])

    def _in_turn(
        self,
        table: SlotTable,
        shares: FairShares,
        its_own: Bool | None,
        priority: int,
        most: int,
        limit: int,
    ) -> I64:
        """Up to `limit` running slots of the priority: new ones, then from the one whose turn it is
        on.

        `most` slots of the priority run. `its_own[place]`: whether a share belongs to the priority;
        None if no other priority runs.
        """
        is_running = table.is_running
        new = np.flatnonzero(table.is_new & is_running)
        if its_own is not None:
            new = new[its_own[table.share[new]]]
        most_new = limit
        self._num_crowded = self._num_crowded + 1 if len(new) > limit // 2 else 0
        if self._num_crowded > PATIENCE:
            self._num_crowded = 0
            runs = is_running if its_own is None else is_running & its_own[table.share]
            most_new -= min(limit - limit // 2, int(np.count_nonzero(runs)) - len(new))
        if len(new) > most_new:
            if len(shares.tiers[priority].members) > 1:
                new = self._of_each_share(table, new, most_new)
            else:
                new = new[np.argpartition(table.sequence_id[new], most_new)[:most_new]]
        chosen, turn = [new], self._next.get(priority, 0)
        missing, left = limit - len(new), len(is_running)
        while missing and left:
            # Expect them in so many slots; do not wrap around, nor pass where the search began.
            stretch = min(1 + missing * len(is_running) // most, len(is_running) - turn, left)
            runs = is_running[turn : turn + stretch] & ~table.is_new[turn : turn + stretch]
            if its_own is not None:
                runs = runs & its_own[table.share[turn : turn + stretch]]
            runnable = turn + np.flatnonzero(runs)[:missing]
            if len(runnable):
                chosen.append(runnable)
                self._next[priority] = int(runnable[-1]) + 1
            missing -= len(runnable)
            left -= stretch
            turn = turn + stretch if turn + stretch < len(is_running) else 0
        return np.concatenate(chosen)

    def _of_each_share(self, table: SlotTable, slots: I64, count: int) -> I64:
        """Return `count` of these slots: of each share as many, the earliest sequences first."""
        order = np.lexsort((table.sequence_id[slots], table.share[slots]))
        slots, places = slots[order], table.share[slots][order].astype(np.int64)
        ranks = np.arange(len(slots)) - np.searchsorted(places, places)  # within the share
        turns = (places - self._num_steps) % (places[-1] + 1)  # another share is first each time
        return slots[np.lexsort((turns, ranks))[:count]]
