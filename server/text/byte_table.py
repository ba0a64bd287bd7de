"""Token ids to bytes: the table of a vocabulary, read in the way that is fastest for the length.

A short run of tokens is a join of Python bytes. A long one is a gather of rows of equal width and
one pass that drops what fills them: no Python object is made per token. Knows no tokenizer.
"""

from __future__ import annotations

from array import array

import numpy as np

_WIDTH = 16
"""Bytes of a row. Runs with a longer token are joined as Python bytes."""
_FILL = b"\xff"
_ELSEWHERE = b"\xfe"
"""First byte of a row that does not hold its token. Neither byte is ever part of UTF-8, so besides
long tokens only those with such a byte are not in their rows."""
BROKEN = -1
_FEW = 64
"""Fewest tokens for which the gather is faster."""


class ByteTable:
    """The bytes of every token id, from 0 on."""

    def __init__(self, entries: list[bytes]) -> None:
        self.entries = entries
        self.num_characters = [_num_characters(entry) for entry in entries]
        """Characters of each token; BROKEN if it begins or ends inside one."""
        rows = b"".join(map(_row, entries))
        self._rows = np.frombuffer(rows, np.dtype((np.void, _WIDTH)))

    def join(self, token_ids: bytes) -> bytes:
        """The bytes of int32 little-endian token ids, one after the other."""
        if len(token_ids) >= 4 * _FEW:
            rows = self._rows.take(np.frombuffer(token_ids, np.int32)).tobytes()
            if _ELSEWHERE not in rows:
                return rows.translate(None, _FILL)
        entries = self.entries
        return b"".join([entries[token] for token in array("i", token_ids)])

    def pieces(self, token_ids: bytes) -> list[bytes]:
        """The bytes of each token."""
        entries = self.entries
        return [entries[token] for token in array("i", token_ids)]


def _num_characters(entry: bytes) -> int:
    try:
        return len(entry.decode())
    except UnicodeDecodeError:
        return BROKEN


def _row(entry: bytes) -> bytes:
    is_here = len(entry) <= _WIDTH and _FILL not in entry and _ELSEWHERE not in entry
    return (entry if is_here else _ELSEWHERE).ljust(_WIDTH, _FILL)
