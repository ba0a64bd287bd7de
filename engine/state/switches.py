"""Switches: which weights made which tokens of the sequences that ran while weights changed.

A change costs one pass over what runs, and nothing is kept of a sequence that no change met.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from srm.engine.steps.batch import I32, I64, Bool


class _Switch(NamedTuple):
    version: int  # of the weights before
    sequence_ids: I64  # i64[k], ascending
    counts: I64  # i64[k] tokens that each had by then, at least 1


class Switches:
    """The changes of weights that sequences have lived through."""

    def __init__(self) -> None:
        self._switches: list[_Switch] = []  # in their order

    def note(self, version: int, sequence_ids: I64, counts: I64) -> None:
        """Note a change from weights `version`: all sequences that run, and how many tokens each
        has. Those that have none will be made by the new weights alone."""
        has_tokens = counts > 0
        sequence_ids, counts = sequence_ids[has_tokens], counts[has_tokens]
        order = np.argsort(sequence_ids)
        self._switches.append(_Switch(version, sequence_ids[order], counts[order]))
        self._switches = [known for known in self._switches if self._still_runs(known)]

    def _still_runs(self, known: _Switch) -> bool:
        return bool(np.isin(known.sequence_ids, self._switches[-1].sequence_ids).any())

    def have_met(self, sequence_ids: I64) -> Bool:
        """Return bool[k]: which of these sequences a change has met."""
        have_met = np.zeros(len(sequence_ids), np.bool_)
        for known in self._switches:
            have_met |= np.isin(sequence_ids, known.sequence_ids)
        return have_met

    def versions(self, sequence_id: int, start: int, stop: int) -> bytes:
        """Return the version, int32 little-endian, that made each of a sequence's tokens start …
        stop - 1; empty where all are of the weights in use."""
        ends: list[tuple[int, int]] = []  # a version, and where its tokens end
        for known in self._switches:
            place = int(np.searchsorted(known.sequence_ids, sequence_id))
            if place < len(known.sequence_ids) and known.sequence_ids[place] == sequence_id:
                ends.append((known.version, int(known.counts[place])))
        if not ends or ends[-1][1] <= start:
            return b""
        version = ends[-1][0] + 1  # each change adds one
        versions: I32 = np.full(stop, version, np.int32)
        for version, end in reversed(ends):
            versions[:end] = version
        return versions[start:].astype("<i4").tobytes()
