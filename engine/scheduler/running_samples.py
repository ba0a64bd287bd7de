"""Running samples as they stand: their tokens, and their state as one that prompts begin from."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

import numpy as np

from srm.engine.messages import ReadSample, Request
from srm.engine.scheduler.parking import Parking
from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.state.sequence import SequenceGroup
from srm.engine.state.slots import SlotTable
from srm.engine.steps.batch import I32, SlotStates


class RunningSample(NamedTuple):
    """A sample that has not ended, between two steps with none under way."""

    group: SequenceGroup
    tokens: I32  # its prompt's and those that it has sampled
    slot: int | None = None  # with the state after all of them but the last, if one has it
    states: SlotStates | None = None  # the same of one that is parked


def find_sample(asked: ReadSample, scheduler: Scheduler) -> RunningSample | None:
    """Find the sample that is asked for; None if there is none, or none that runs or waits."""
    by_id = scheduler.registry.by_id
    named = [by_id[asked.of]] if asked.of in by_id else []  # most are; others are looked for
    for group in chain(named, by_id.values()):
        if group.request.share == asked.share and _is_named(group.request, asked.of):
            samples = group.samples_at(np.arange(group.request.params.n))
            if (own := np.flatnonzero(samples == asked.index)).size:
                return _read(group, int(own[0]), scheduler.table, scheduler.parking)
    return None


def _is_named(request: Request, of: str) -> bool:
    id = request.id.partition("#")[0].partition("~")[0]  # that of the request it is a part of
    return of in (id, f"{request.name}-{id.rpartition('-')[2]}")


def _read(
    group: SequenceGroup, index: int, table: SlotTable, parking: Parking
) -> RunningSample | None:
    prompt, id = group.prompt, group.first_id + index
    is_of_weights = not table.switches.have_met(np.array([id]))[0]
    if index < group.reach and table.sequence_id[slot := int(group.slots[index])] == id:
        first, position = int(table.first_position[slot]), int(table.position[slot])
        sampled = table.output_tokens.read(slot, first, position)
        # One that is being fed again has no row, nor a state.
        has_state = bool(table.is_running[slot]) and position > first and is_of_weights
        return RunningSample(group, _joined(prompt, sampled), slot if has_state else None)
    for of_group, parked in parking.records() if parking.holds(group) else ():
        if of_group is group and (places := np.flatnonzero(parked.indices == index)).size:
            own = parked.only(places)
            states = own.states if is_of_weights else None
            return RunningSample(group, _joined(prompt, own.tokens[0]), states=states)
    is_to_start = index in group.next_fresh(group.unstarted)
    return RunningSample(group, prompt) if is_to_start else None


def _joined(prompt: I32, sampled: bytes) -> I32:
    return np.concatenate([prompt, np.frombuffer(sampled, "<i4")])
