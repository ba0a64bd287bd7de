"""Parked: sequences of one request that hold no slot, and all that they need to go on in any.

One goes on bit for bit as if it had never stopped: its state and last token are the device's own,
and what it draws depends on its seed and position alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from srm.engine.steps.batch import I32, I64, SlotStates

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Parked:
    """k sequences that have sampled something, of one request."""

    indices: I64  # i64[k] which of the request's samples, ascending
    positions: I32  # i32[k] of each one's next decode row
    states: SlotStates  # of k slots
    tokens: tuple[bytes, ...]  # k x int32[sampled], little-endian
    logprobs: tuple[bytes, ...]  # k x float32[sampled]; empty bytes where nobody asked

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def nbytes(self) -> int:
        """About how many bytes keeping it takes."""
        sampled = sum(map(len, self.tokens)) + sum(map(len, self.logprobs))
        return self.states.states.nbytes + sampled + 128 * len(self)

    def only(self, places: slice | I64) -> Parked:
        """Select the sequences at these places, which ascend; those of a slice share memory."""

        def select(column: tuple[bytes, ...]) -> tuple[bytes, ...]:
            if isinstance(places, slice):
                return column[places]
            return tuple(column[place] for place in places.tolist())

        return Parked(
            self.indices[places],
            self.positions[places],
            self.states.only(places),
            select(self.tokens),
            select(self.logprobs),
        )


def merged(parts: Sequence[Parked]) -> Parked:
    """Merge parts; no sample may be in two."""
    indices = np.concatenate([part.indices for part in parts])
    together = Parked(
        indices,
        np.concatenate([part.positions for part in parts]),
        SlotStates.join([part.states for part in parts]),
        tuple(token for part in parts for token in part.tokens),
        tuple(logprob for part in parts for logprob in part.logprobs),
    )
    return together.only(np.argsort(indices))


def latest(parts: Sequence[Parked]) -> Parked:
    """Merge parts; a sample in several is taken from the last."""
    known: list[Parked] = []
    for place, part in enumerate(parts):
        later = np.concatenate([part.indices[:0], *(part.indices for part in parts[place + 1 :])])
        known.append(part.only(np.flatnonzero(~np.isin(part.indices, later))))
    return merged(known)


def in_parts(records: Iterable[tuple[T, Parked]], most: int) -> Iterator[list[tuple[T, Parked]]]:
    """Yield the records in order, together as many as have `most` sequences, but at least one."""
    part: list[tuple[T, Parked]] = []
    count = 0
    for record in records:
        if part and count + len(record[1]) > most:
            yield part
            part, count = [], 0
        part.append(record)
        count += len(record[1])
    if part:
        yield part
