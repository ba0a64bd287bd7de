"""What holds of a scheduler between any two calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

import numpy as np

from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.state.prefixes import NO_SLOT, Prefix
from srm.engine.state.slots import FREE


def slots_add_up(scheduler: Scheduler) -> None:
    table = scheduler.table
    assert table.num_free + table.num_owned == table.num_slots
    free = table.free_slots[: table.num_free]
    assert sorted(free.tolist()) == np.flatnonzero(table.sequence_id == FREE).tolist()
    owners = table.sequence_id[table.sequence_id >= 0]
    assert len(owners) == len(set(owners.tolist())) == table.num_owned
    assert not table.is_running[table.sequence_id < 0].any()


def queues_add_up(scheduler: Scheduler) -> None:
    """Each sample that is not over waits, has a slot or is parked, and its share knows."""
    parking, table, admission = scheduler.parking, scheduler.table, scheduler.admission
    groups = list(scheduler.registry.by_id.values())
    waiting = [group for group in groups if group.unstarted]
    assert scheduler.num_waiting == sum(group.startable for group in waiting)
    assert scheduler.waiting_bytes == sum(group.num_bytes for group in waiting)
    for priority in {group.request.priority for group in groups}:
        ahead = [group.startable for group in waiting if group.request.priority >= priority]
        assert admission.waiting_before(priority) == sum(ahead)
    assert parking.num_parked == sum(len(record) for _, record in parking.records())
    assert (parking.num_bytes > 0) == (parking.num_parked > 0)
    for group in groups:
        owned = table.sequence_id[table.first_id == group.first_id] - group.first_id
        to_start = group.next_fresh(group.unstarted)
        alive = [*parking.indices(group).tolist(), *owned.tolist(), *to_start.tolist()]
        assert len(alive) == len(set(alive)) == group.unfinished, "lost, or in two places"
        is_paced = group.unstarted and not group.startable
        assert is_paced or group not in admission.paced, "may start, and is in no line"
    tiers = admission.shares.tiers.values()
    shares = [share for tier in tiers for share in tier.members.values()]
    assert {share.number for share in shares} == {group.share.number for group in groups}
    for share in shares:
        own = [group for group in groups if group.share is share]
        assert share.groups == Counter(group.request.precedence for group in own)
        assert (share in admission.shares.mixed) == (len(share.groups) > 1)
        counts: Counter[int] = Counter()
        for group in own:
            counts[group.request.precedence] += group.startable
        assert share.waiting == +counts
        assert share.waiting_bytes == sum(
            solution.num_bytes for solution in own if solution.unstarted
        )
        assert share.pins == sum(len(solution.pinned) for solution in own)
        ids = [group.first_id for group in own]
        assert share.owned == np.count_nonzero(np.isin(table.first_id, ids))
        held = np.flatnonzero(np.isin(table.first_id, ids))
        assert share.owned_at == Counter(table.precedence[held].tolist())
        assert share.parked == sum(len(parking.indices(group)) for group in own)
    for tier in tiers:
        assert tier.owned == sum(share.owned for share in tier.members.values())
        assert tier.weight == sum(share.weight for share in tier.members.values())
    waiting_in = (
        each.get_queue(priority) for each in admission.lines for priority in each.priorities
    )
    for line in waiting_in:
        assert line.weight == sum(share.weight for share in line.shares())
        loads = [share.load for share in line.shares()]
        assert loads == sorted(loads), "a share waits behind one that has more"


def prefixes_add_up(scheduler: Scheduler) -> None:
    """Each slot of a prefix is free, kept or pinned, by as many as hold it."""
    prefixes, first = scheduler.prefixes, scheduler.table.num_slots
    pins = Counter(chain(*(group.pinned for group in scheduler.registry.by_id.values())))
    assert all(prefix.pins == count for prefix, count in pins.items())
    assert len(pins) == prefixes.num_pinned
    held = [prefix.slot for prefix in chain(pins, prefixes.idle)]
    assert sorted(held + prefixes.free) == list(range(first, first + prefixes.num_slots))
    listed = {prefix for root in prefixes.roots.values() for prefix in _below(root)}
    assert all(prefix in listed and prefix.is_ready for prefix in prefixes.idle)
    for prefix in listed:
        assert prefix.slot == NO_SLOT or prefix in pins or prefix in prefixes.idle
        assert prefix.slot != NO_SLOT or (len(prefix.children) > 1 and not prefix.is_ready)


def _below(prefix: Prefix) -> Iterator[Prefix]:
    """All nodes of a tree but its root; checks that each is where its tokens say."""
    for token, child in prefix.children.items():
        assert child.parent is prefix and child.tokens[prefix.length] == token
        assert np.array_equal(child.tokens[: prefix.length], prefix.tokens)
        yield child
        yield from _below(child)
