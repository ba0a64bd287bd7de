"""Preemption: choose whose slots are taken away for those who wait, no more than they need.

Sequences of lower priority go first, the lowest and youngest first. Within a priority, shares that
hold more than their part give to those that hold less than half of theirs: so nobody is starved by
sequences that run for long, and nothing moves to and fro between shares that hold about their
parts. Within a share, lower precedence gives to higher. Pure.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import takewhile

import numpy as np

from srm.engine.scheduler.admission import EVERY, Admission
from srm.engine.scheduler.parking import parkable
from srm.engine.state.fair_share import FairShare, Tier
from srm.engine.state.slots import NO_LOGPROBS, SlotTable
from srm.engine.steps.batch import I64

NONE: I64 = np.empty(0, np.int64)
_ID_BITS = 48  # no sequence's id is as large as 2 to it
RECORD_BYTES = 128  # about how many bytes a parked sequence takes besides its state and tokens


def choose_preempted(admission: Admission, state_bytes: int) -> I64:
    """Slots to be given up now, ascending; `state_bytes` is the size of a slot's state."""
    table, parking = admission.table, admission.parking
    waiting = {priority for line in admission.lines for priority in line.priorities}
    priorities = sorted(waiting, reverse=True)
    owning = admission.shares.owning
    if not priorities or not owning or parking.room <= 0 or admission.is_held:
        return NONE
    preempted, room = NONE, parking.room
    if priorities[0] > owning[0]:
        preempted = _choose_lower_priority(
            admission, [priority for priority in priorities if priority > owning[0]], owning
        )
    if not len(preempted):
        preempted = _choose_above_share(admission, admission.shares.tiers[priorities[0]])
    if not len(preempted) and admission.shares.mixed and parking.own_room > 0:
        preempted = np.concatenate(
            [NONE, *map(partial(_of_own, admission), admission.shares.mixed)]
        )
        room = parking.own_room
    sizes = table.position[preempted].astype(np.int64) - table.first_position[preempted]
    sizes *= np.where(table.num_logprobs[preempted] == NO_LOGPROBS, 4, 8)
    fits = np.cumsum(sizes + state_bytes + RECORD_BYTES) <= room
    return np.sort(preempted[fits])


def _choose_lower_priority(admission: Admission, priorities: list[int], owning: list[int]) -> I64:
    """Choose slots for groups of these priorities, the highest first."""
    table, tiers = admission.table, admission.shares.tiers
    limit = table.num_free + sum(
        tiers[priority].owned for priority in owning if priority < priorities[0]
    )
    wants = []
    for priority in priorities:
        shares = tiers[priority].members.values()
        wants.append((priority, sum(admission.usable(share, limit) for share in shares)))
    if sum(want for _, want in wants) <= table.num_free:
        return NONE
    slots = parkable(table)
    of = admission.shares.priorities[table.share[slots]]
    chosen, count = [NONE], 0
    for lower in owning:
        needed = sum(want for priority, want in wants if priority > lower)
        needed -= table.num_free + count
        if needed <= 0:
            break
        preempted = _youngest(table, slots[of == lower], needed)
        chosen.append(preempted)
        count += len(preempted)
    return np.concatenate(chosen)


def _choose_above_share(admission: Admission, tier: Tier) -> I64:
    """Choose slots for shares of the tier that wait and hold little, of others that hold much."""
    table = admission.table
    lines = [line.get_queue(tier.priority) for line in admission.lines]
    if len(tier.members) < 2 or not any(
        admission.is_below_share(share)
        for line in lines
        for share in takewhile(admission.holds_little, line.shares())
    ):
        return NONE
    below_share = [share for share in tier.members.values() if admission.is_below_share(share)]
    lacks = [int(admission.part(share)) - share.owned for share in below_share]
    needed = sum(
        min(most, admission.usable(share, most))
        for share, most in zip(below_share, lacks, strict=True)
    )
    needed -= table.num_free
    if needed <= 0:
        return NONE
    spare = {
        share: share.owned - math.ceil(admission.part(share)) for share in tier.members.values()
    }
    slots = parkable(table)
    chosen = [NONE]
    for share in sorted(spare, key=lambda each: (-each.load, each.number)):
        if needed <= 0 or spare[share] <= 0:
            break
        own = slots[table.share[slots] == share.place]
        preempted = _youngest(table, own, min(needed, spare[share]))
        chosen.append(preempted)
        needed -= len(preempted)
    return np.concatenate(chosen)


def _of_own(admission: Admission, share: FairShare) -> I64:
    """Choose slots of a share for its own groups of higher precedence."""
    heads = (
        next(line.get_queue(share.tier.priority).list_groups(share), None)
        for line in admission.lines
    )
    highest = max((head.request.precedence for head in heads if head), default=EVERY)
    levels = [precedence for precedence in sorted(share.owned_at) if precedence < highest]
    if not levels:
        return NONE
    table = admission.table
    slots = parkable(table)
    slots = slots[table.share[slots] == share.place]
    chosen, count = [NONE], 0
    for level in levels:
        needed = admission.usable(share, share.owned, above=level) - table.num_free - count
        if needed <= 0:
            break
        chosen.append(_youngest(table, slots[table.precedence[slots] == level], needed))
        count += len(chosen[-1])
    return np.concatenate(chosen)


def _youngest(table: SlotTable, slots: I64, count: int) -> I64:
    """Return `count` of these slots: of the lowest precedence, and of these the latest ones."""
    if len(slots) <= count:
        return slots
    ids = table.sequence_id[slots] - (table.precedence[slots].astype(np.int64) << _ID_BITS)
    return slots[np.argpartition(ids, len(slots) - count)[len(slots) - count :]]
