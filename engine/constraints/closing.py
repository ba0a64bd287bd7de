"""How a JSON text that is masked on the host ends before its last token.

A table knows how far every state is from an end. Where there is none, a short end is sought from
the text as it is: one byte after the other, those first that close something. How much longer that
end may become by one token is known from the schema. So an end is sought only where it may come to
matter, and near it tokens that begin something are left out, and at last all but those of the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from srm.engine.constraints.schema_facts import longest_start

I32 = npt.NDArray[np.int32]
_STRINGS = frozenset(b" ~_zQ") | frozenset(range(128, 256))
"""Bytes of which one is allowed within most strings, and none outside."""
_FREE = b'"~z {'
_OPENING = b'"{[,'
_DIGITS = b"0123456789"
_LETTERS = bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(ord("a"), ord("z") + 1))
_IN_STRING = bytes(dict.fromkeys(b'"' + _DIGITS + _LETTERS + bytes(range(1, 256))))
_OUTSIDE = bytes(dict.fromkeys(b"}]" + _DIGITS + b'ntf"-' + bytes(range(33, 123)) + b"{"))
"""Bytes by how soon they end a text."""
_QUOTE = ord('"')
_MOST_SOUGHT = 3
"""Most characters of an end that are sought, where a string asks for some."""
_LONGEST = 1_000
"""Most bytes of an end that is sought."""
_SPARE = 8
"""Tokens that a text is longer at most by one that begins nothing, as half a character or -."""


class Reach(NamedTuple):
    """How far a text is from an end."""

    most: int
    """The most tokens of a short end."""
    is_free: bool
    """Whether it stands within a string of any characters."""
    forced: tuple[int, ...] = ()
    """The tokens of its end, of which the first one alone is allowed."""


UNKNOWN = Reach(0, False)


class Closing:
    """The ends of the texts of one constraint."""

    def __init__(
        self, rise: int, may_be_text: bool, tokenizer: LLTokenizer, openings: Openings
    ) -> None:
        """`rise`: tokens by which one token that begins something makes the end longer, at most.
        `may_be_text`: what may end anywhere is no JSON."""
        self._may_be_text = may_be_text
        self._tokenizer = tokenizer
        self._openings = openings
        self._rise = rise
        self._margin = rise + _SPARE

    def restrict(
        self, mask: I32, left: int, known: Reach, last: int | None, matcher: LLMatcher
    ) -> Reach:
        """Leave in a mask only tokens after which the text can end, in place.

        `left`: tokens that may be sampled, this one included. `known`: what this returned for the
        text before its `last` token; UNKNOWN: nothing is known of it. Returns the same of this one.
        """
        openings = self._openings
        if known.forced[1:] and last == known.forced[0]:
            return self._force(mask, known.forced[1:])
        is_free = bool((mask & openings.free == openings.free).all())
        if last is not None and known is not UNKNOWN:
            begun = openings.counts[last] or not known.is_free
            most = known.most + self._rise * begun
            if left > most + self._margin:
                return Reach(most, is_free)
        end = self._find_end(matcher.deep_copy())
        if end is None:
            return UNKNOWN
        if left <= len(end) + self._margin and (end or not self._may_be_text):
            is_loose = is_free and left > len(end) + _SPARE
            if end and not is_loose:
                return self._force(mask, tuple(end))
            if is_loose:
                mask &= openings.plain
            elif left == 1:
                mask[:] = 0
            _allow(mask, end[0] if end else self._tokenizer.eos_token)
        return Reach(len(end), is_free)

    def _force(self, mask: I32, end: tuple[int, ...]) -> Reach:
        mask[:] = 0
        _allow(mask, end[0])
        return Reach(len(end), False, end)

    def _find_end(self, matcher: LLMatcher) -> list[int] | None:
        """Return tokens that end the text, few of them; None if none were found."""
        text, num_sought = bytearray(), 0
        while not matcher.is_accepting():
            allowed = self._allowed(matcher)
            is_string = not allowed.keys().isdisjoint(_STRINGS)
            order = [byte for byte in (_IN_STRING if is_string else _OUTSIDE) if byte in allowed]
            if not order or len(text) == _LONGEST:
                return None
            byte = order[0]
            if is_string and byte != _QUOTE and num_sought < _MOST_SOUGHT:
                num_sought += 1
                byte = next((own for own in order if self._is_last(matcher, allowed[own])), byte)
            matcher.consume_token(allowed[byte])
            text.append(byte)
        return list(self._tokenizer.tokenize_bytes(bytes(text)))

    def _allowed(self, matcher: LLMatcher) -> dict[int, int]:
        """Return the bytes that may follow, and their tokens."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        known = self._openings.bytes
        return {byte: token for byte, token in known if bits[token // 8] >> token % 8 & 1}

    def _is_last(self, matcher: LLMatcher, token: int) -> bool:
        """Whether a string may end behind this token."""
        behind = matcher.deep_copy()
        return behind.consume_token(token) and _QUOTE in self._allowed(behind)


def _allow(mask: I32, token: int) -> None:
    mask[token // 32] |= np.array(1 << token % 32, np.uint32).astype(np.int32)


class Openings:
    """What the tokens of a vocabulary begin."""

    def __init__(self, tokens: Sequence[bytes], num_words: int) -> None:
        self.counts = [sum(text.count(byte) for byte in _OPENING) for text in tokens]
        """Quotation marks, brackets and commas of each token."""
        self.bytes = [(text[0], token) for token, text in enumerate(tokens) if len(text) == 1]
        """Bytes and their tokens."""
        known = dict(self.bytes)

        def mask_of(wanted: Iterable[int]) -> I32:
            bits = np.zeros(32 * num_words, np.uint8)
            bits[list(wanted)] = 1
            return np.packbits(bits, bitorder="little").view(np.int32)

        self.plain = mask_of(token for token, count in enumerate(self.counts) if not count)
        """The mask of tokens that begin nothing."""
        self.free = mask_of(known[byte] for byte in _FREE if byte in known)
        """The mask of bytes that are all allowed only within strings of any characters."""


def make_closing(constraint: str, tokenizer: LLTokenizer, openings: Openings) -> Closing | None:
    """Make the closing of a constraint that llguidance has taken; None if its texts are no JSON."""
    try:
        given = json.loads(constraint)
    except ValueError:  # a grammar alone
        return None
    grammars: list[dict[str, Any]] = given.get("grammars", [])
    schemas = [own["json_schema"] for own in grammars if "json_schema" in own]
    if not schemas:
        return None
    lark = [own["lark_grammar"] for own in grammars if "lark_grammar" in own]
    around = [part for grammar in lark for part in grammar.split("|")]
    rise = max(map(longest_start, schemas)) + max(map(len, around), default=0)
    return Closing(rise, bool(around), tokenizer, openings)
