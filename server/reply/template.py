"""Template: JSON with holes, made of an encoded example; and the text of every token as JSON.

What is the same in many events is encoded once, with marks in the places of what changes.
"""

from __future__ import annotations

import secrets

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from srm.server.schema.json_parts import escape_line_ends
from srm.server.text.text import Text

encode_json = msgspec.json.Encoder().encode


def _number() -> int:
    return 2**52 + secrets.randbits(52)


TEXT = secrets.token_hex(16)
"""Marks a text; within its quotation marks."""
SCORES = Raw(encode_json(secrets.token_hex(16)))
"""Marks a value of any kind."""
CHOICES = Raw(encode_json({secrets.token_hex(16): 0}))
"""Marks an object."""
INDEX, OTHER_INDEX, COMPLETION_TOKENS, NUMBER = (_number() for _ in range(4))
"""Mark numbers; NUMBER is one of which each event has another, behind text and scores. No client or
operator can name any of these: they are drawn when this starts."""

NO_TEMPLATE = (LookupError, TypeError, ValueError)
"""Errors of a format that cannot encode the example, or has its holes in another order."""


class Template:
    """The bytes between the holes of an example."""

    def __init__(self, example: bytes, *marks: str | int | Raw) -> None:
        """Raises ValueError if these marks are not in the example in this order."""
        pieces = []
        for mark in marks:
            data = bytes(mark) if isinstance(mark, Raw) else str(mark).encode()
            piece, separator, example = example.partition(data)
            if not separator:
                raise ValueError("the holes of the example are in another order")
            pieces.append(piece)
        self.pieces = (*pieces, example)
        """One more than there are marks."""


def escape(text: str) -> bytes:
    """Return the text as JSON, without the quotation marks, for an event of a stream."""
    return escape_line_ends(encode_json(text)[1:-1])


class Pieces:
    """The text of every token as JSON."""

    def __init__(self, text: Text) -> None:
        size = text.model.vocab_size
        self.json: npt.NDArray[np.object_] = np.empty(size, np.object_)
        """bytes[vocab_size]; empty where a token is not whole characters."""
        entries = text.table().entries
        self.num_characters = text.table().num_characters
        for token, entry in enumerate(entries):
            try:
                self.json[token] = escape(entry.decode())
            except UnicodeDecodeError:
                self.json[token] = b""
        self.is_whole = self.json != b""
        """bool[vocab_size]: whether each token is whole characters, and at least one."""
