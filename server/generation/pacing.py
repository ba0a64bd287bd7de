"""`stream_interval`: fewer and larger events, with at least so many tokens of a choice in each.

A choice's first tokens are passed on at once, so that the time to the first token does not grow;
so are its last, since nothing comes after them. Knows no JSON and no HTTP.
"""

from __future__ import annotations

from server.text.sample import Delta, join


class Pacing:
    """Holds back the deltas of a choice until they have enough tokens."""

    def __init__(self, min_tokens: int) -> None:
        self._min_tokens = min_tokens
        self._held: dict[int, list[Delta]] = {}
        self._num_held: dict[int, int] = {}  # tokens

    def take(self, deltas: list[Delta]) -> list[Delta]:
        """Return what may be sent now, joined with what was held back before it."""
        ready = []
        for delta in deltas:
            held = self._held.setdefault(delta.index, [])
            held.append(delta)
            count = self._num_held.get(delta.index, 0) + delta.num_tokens
            if delta.is_first or delta.finish_reason or count >= self._min_tokens:
                ready.append(join(self._held.pop(delta.index)))
                count = 0
            self._num_held[delta.index] = count
        return ready
