"""Parking: sequences that run or wait without a slot, as records from which they go on.

Knows the slots' arrays and no order of service, and never the device: what the pool holds of the
slots is handed in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from engine.batch import I64, SlotStates
from engine.parked import Parked
from engine.slots import NO_LOGPROBS, SlotTable


class Taken(NamedTuple):
    """Sequences of one group, out of their slots."""

    first_id: int
    slots: I64  # i64[k] which they had
    parked: Parked


def parkable(table: SlotTable) -> I64:
    """Slots of sequences that go on and have sampled: their state lies in their own slot."""
    return np.flatnonzero(table.is_running & (table.position > table.first_position))


def taken(table: SlotTable, slots: I64, states: SlotStates) -> Iterator[Taken]:
    """What these slots' sequences need to go on in others, group by group.

    `slots` are some of `parkable`, and `states` what the pool holds of them when all steps have
    been completed.
    """
    order = np.argsort(table.sequence_id[slots])
    slots = slots[order]
    first_ids, begins = np.unique(table.first_id[slots], return_index=True)
    ends = [*begins[1:].tolist(), len(slots)]
    for first_id, begin, end in zip(first_ids.tolist(), begins.tolist(), ends, strict=True):
        own, places = slots[begin:end], order[begin:end]
        yield Taken(first_id, own, _parked(table, own, states, places, first_id))


def _parked(table: SlotTable, slots: I64, states: SlotStates, places: I64, first_id: int) -> Parked:
    firsts, positions = table.first_position[slots], table.position[slots]
    rows = list(zip(slots.tolist(), firsts.tolist(), positions.tolist(), strict=True))
    asks = table.num_logprobs[slots[0]] != NO_LOGPROBS  # of one request: all or none
    logprobs = table.output_logprobs if asks else None
    return Parked(
        indices=table.sequence_id[slots] - first_id,
        positions=positions,
        states=SlotStates(states.states[places], states.last_tokens[places]),
        tokens=tuple(table.output_tokens.read(*row) for row in rows),
        logprobs=tuple(b"" if logprobs is None else logprobs.read(*row) for row in rows),
    )
