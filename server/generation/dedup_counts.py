"""Counts the samples of a prompt that have the same text, without keeping them all.

For each distinct text, pattern group or score, the sample of lowest index is kept if choices are
wanted, else only the text. Samples of different scores are never the same. Knows no wire shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from srm.errors import InvalidRequest
from srm.server.generation.detokenize import ChoicePart

MAX_DISTINCT_BYTES = 256 * 2**20
"""Most bytes that the distinct samples of a request may take while they are counted."""
_ENTRY_BYTES = 512
"""Bytes charged for each distinct entry besides its text and scores."""


@dataclass(slots=True)
class Tallied:
    """Samples with the same text, pattern group or score."""

    text: str | None
    """Their text, or their pattern group; None for samples without a group, and by score."""
    score: float | None
    count: int = 0
    matched: int = 0
    first: ChoicePart | None = None
    """The sample of lowest index, if choices are wanted."""


class Budget:
    """The memory limit that all counts of one request share."""

    def __init__(self, num_bytes: int = MAX_DISTINCT_BYTES) -> None:
        self._limit = self._left = num_bytes

    def charge(self, num_bytes: int) -> None:
        """Raise InvalidRequest when the total exceeds the limit."""
        self._left -= num_bytes
        if self._left < 0:
            raise InvalidRequest(
                f"the distinct samples take more than {self._limit} bytes: ask for fewer at once, "
                "or count them by a group of until.match",
                "return",
            )


class DedupCounts:
    """Counts one prompt's samples."""

    def __init__(
        self, count_by: Literal["text", "group", "score"], keeps_first: bool, budget: Budget
    ) -> None:
        self._count_by = count_by
        self._keeps_first = keeps_first
        self._budget = budget
        self._entries: dict[str | tuple[str | None, float] | None, Tallied] = {}

    def add(self, sample: ChoicePart) -> None:
        """Count a sample. Raises InvalidRequest when there are too many distinct ones."""
        text = sample.group
        if self._count_by != "group":
            text = sample.text if self._count_by == "text" else None
        key = text if sample.score is None else (text, sample.score)
        entry = self._entries.get(key)
        if entry is None:
            self._budget.charge(_ENTRY_BYTES + 4 * len(text or ""))
            entry = self._entries[key] = Tallied(text, sample.score)
        entry.count += 1
        entry.matched += bool(sample.matched)
        if not self._keeps_first:
            return
        if entry.first is None or sample.index < entry.first.index:
            self._budget.charge(_size(sample) - (_size(entry.first) if entry.first else 0))
            entry.first = sample

    def by_count(self) -> list[Tallied]:
        """Return the most frequent first; ties are ordered by text, None first, then by score, the
        highest first."""
        return sorted(
            self._entries.values(),
            key=lambda entry: (
                *(-entry.count, entry.text is not None, entry.text),
                -(entry.score or 0),
            ),
        )

    def firsts(self) -> list[ChoicePart]:
        """Return the sample of lowest index of each distinct text, with its count, by index."""
        counted = (
            replace(entry.first, count=entry.count)
            for entry in self._entries.values()
            if entry.first is not None
        )
        return sorted(counted, key=lambda sample: sample.index)


def _size(sample: ChoicePart) -> int:
    tokens = sample.tokens
    arrays = (tokens.token_ids, tokens.logprobs, tokens.top_ids, tokens.top_logprobs)
    return 4 * len(sample.text) + sum(map(len, arrays)) + 32 * len(sample.text_offset)
