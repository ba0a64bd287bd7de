"""Finds stop strings in completions as soon as their tokens arrive, so that slots come free.

A stream with stop strings is read whether or not somebody takes its tokens. `StopStringWatch`
searches only completions with a new token that has a stop string or the beginning of one in it,
which is known by token, or whose text ended in such a beginning: the others cost a look-up in an
array. Keeps no text but what may be the beginning of a stop string.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from srm.engine.steps.tokens import U8, Tokens
from srm.server.text.stream import NEAR, UNKNOWN, ByteTable, StopStrings


class StopStringWatch:
    """Finds stop strings in completions that are asked for together."""

    def __init__(self, table: ByteTable, stops: StopStrings, num_choices: int) -> None:
        self._table = table
        self._stops = stops
        self._kinds: U8 = np.frombuffer(stops.kinds, np.uint8)
        self._has_begun = np.zeros(num_choices, np.bool_)
        self._begun: dict[int, bytes] = {}  # beginnings of stop strings that texts end in

    def find_stopped(self, tokens: Tokens) -> list[int]:
        """Return the completions that have now reached a stop string, but for those that the engine
        has ended."""
        self.learn(tokens.token_ids)
        kinds = self._kinds[tokens.token_ids]
        num_near = np.zeros(len(kinds) + 1, np.int64)
        np.cumsum(kinds == NEAR, out=num_near[1:])
        is_near = num_near[tokens.offsets[1:]] > num_near[tokens.offsets[:-1]]
        is_near = (is_near | self._has_begun[tokens.owners]) & (tokens.reasons == 0)
        near = tokens.select(is_near)
        return [
            index
            for index, begin, end, _ in near.rows()
            if self._has_stopped(index, near.token_ids[begin:end].tobytes())
        ]

    def learn(self, token_ids: npt.NDArray[np.int32]) -> None:
        """Find out of which kinds these tokens are."""
        kinds = self._kinds[token_ids]
        if not kinds.all():
            for token in np.unique(token_ids[kinds == UNKNOWN]).tolist():
                self._stops.learn(token)

    def note(self, index: int, beginning: bytes) -> None:
        """Note which beginning of a stop string a completion's text ends in, if any."""
        self._has_begun[index] = bool(beginning)
        self._begun[index] = beginning

    def _has_stopped(self, index: int, token_ids: bytes) -> bool:
        data = self._begun.get(index, b"") + self._table.join(token_ids)
        is_over = self._stops.search(data) is not None
        undecided = 0 if is_over else self._stops.count_undecided(data)
        self.note(index, data[len(data) - undecided :])
        return is_over
