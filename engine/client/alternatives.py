"""Alternatives: the likeliest tokens in place of each token that nobody has read.

Few requests ask for them, so each row that does has a list of its own.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from engine.steps.batch import F32, I32, I64
from engine.steps.tokens import NO_TOP_IDS, NO_TOP_LOGPROBS


class Alternatives:
    """Queues of alternatives by row."""

    def __init__(self) -> None:
        self._ids: defaultdict[int, list[bytes]] = defaultdict(list)
        self._logprobs: defaultdict[int, list[bytes]] = defaultdict(list)

    @property
    def num_rows(self) -> int:
        """Rows that are not empty."""
        return len(self._ids)

    def append(self, rows: I64, counts: I32, ids: I32, logprobs: F32) -> None:
        """Append those of one token to each of these rows: the first ones, as many as `counts` says
        of each."""
        for row, count, own_ids, own_logprobs in zip(
            rows.tolist(), counts.tolist(), ids, logprobs, strict=True
        ):
            self._ids[row].append(own_ids[:count].tobytes())
            self._logprobs[row].append(own_logprobs[:count].tobytes())

    def read(self, rows: I64, count: int) -> tuple[I32, F32]:
        """Take everything out of these rows, which have `count` for each token."""
        if not count:
            return NO_TOP_IDS, NO_TOP_LOGPROBS
        ids = b"".join(part for row in rows.tolist() for part in self._ids.pop(row, ()))
        logprobs = b"".join(part for row in rows.tolist() for part in self._logprobs.pop(row, ()))
        shape = -1, count
        return (
            np.frombuffer(ids, np.int32).reshape(shape),
            np.frombuffer(logprobs, np.float32).reshape(shape),
        )

    def forget(self, rows: I64) -> None:
        """Empty these rows."""
        self.read(rows, 1)
