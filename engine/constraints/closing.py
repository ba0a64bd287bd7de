"""How a JSON text that is masked on the host ends before its last token.

A table knows how far every state is from an end. Where there is none, a short end is sought from
the text as it is: one byte after the other, those first that close something. How much longer that
end may become by one token is known from the schema. So an end is sought only where it may come to
matter, and near it tokens that begin something are left out, and at last all but those of the end.

A search asks which bytes may follow, one byte after the other. The searches of a step share a
budget of such looks, so the work of a step has a bound whatever the schemas are.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from srm.engine.constraints.schema_facts import longest_start

I32 = npt.NDArray[np.int32]
_STRINGS = b" ~_zQ"
"""Bytes of which one is allowed within most strings, and none outside."""
_FREE = b'"~z {'
_OPENING = b'"{[,'
_DIGITS = b"0123456789"
_LETTERS = bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(ord("a"), ord("z") + 1))
_ASCII = bytes(range(128))
_IN_STRING = bytes(dict.fromkeys(_DIGITS + _LETTERS + _ASCII[32:92] + _ASCII[93:] + b"\\"))
_OUTSIDE = bytes(dict.fromkeys(_DIGITS + b'ntf"-' + _ASCII[33:123] + b"{" + _ASCII))
"""Bytes by how soon they end a text."""
_BEYOND = bytes(range(128, 256))
"""Bytes that are looked at where no other is allowed."""
_QUOTE, _ESCAPE = b'"\\'
_ENDS_VALUE = b"}],"
_SWEEPS = 3
"""Bytes of a string before each of which all are tried for one behind which the string may end.
After these it is done before every second, fourth, eighth … byte."""
LONGEST = 200
"""Most looks of a search, each of which adds a byte to the end."""
LONGEST_START = 600
"""The same of the search for the end of an empty text, which no step waits for."""
LOOKS = 256
"""Looks that all searches of a step may take together. A look tries at most some 600 bytes."""
_ALWAYS = 2**31
_REQUIRED = re.compile(r'"required":(\["(?:[^"\\]|\\.)*"(?:,"(?:[^"\\]|\\.)*")*\])')
_PATTERN = re.compile(r'"pattern":("(?:[^"\\]|\\.)*")')
_CLASS = re.compile(
    r"\[(?:\\.|[^\[\]\\]|\[(?:\\.|[^\]\\])*\])*\]|\{[\d,]*\}|\\u[\da-fA-F]{4}|\\x..|\\\w"
)
_WORD = re.compile(r"(?:\\\W|[^\\^$.*+?()\[\]{}|])+")
_LONGEST_PATTERN = 500
_MOST_WORDS, _MOST_NAMES = 16, 48
"""Most of them that are tried, and most names of properties that objects must have."""
_MOST_BRANCHES = 8
"""Most branches of a place that are tried for a shorter end of an empty text."""
BITS: I32 = (np.uint32(1) << np.arange(32, dtype=np.uint32)).view(np.int32)
"""A word of a mask by the token, of 32, that it allows."""
_SPARE = 8
"""Tokens that a text is longer at most by one that begins nothing, as half a character or -."""


class Reach(NamedTuple):
    """How far a text is from an end."""

    most: int
    """The most tokens of a short end, with the one that ends the text; negative: none is known."""
    is_free: bool
    """Whether it stands within a string of any characters."""
    end: tuple[int, ...] = ()
    """The tokens of the end found last."""
    is_forced: bool = False
    """Whether the text goes on with that end and nothing else."""
    is_stale: bool = False
    """Whether that end is of a text before this one, and not known to end this one."""
    again: int = _ALWAYS
    """Tokens left at which an end is sought again, after none was found."""


UNKNOWN = Reach(-1, False)


class Looks:
    """The budget that all searches of a step share."""

    def __init__(self, left: int = LOOKS) -> None:
        self.left = left
        self.failed = set[Closing]()
        """Those by which no end was found in this step: one search of each is enough."""


class _Inside:
    """A search's record of the string or number that it is in."""

    def __init__(self, words: Sequence[bytes]) -> None:
        self.words = list(words)
        """Those not taken yet."""
        self.num_chosen = 0
        self.used = Counter[int]()
        self.before: Sequence[int] = ()
        """Bytes that were allowed before the last one."""


class Closing:
    """The ends of the texts of one constraint."""

    def __init__(
        self,
        rise: int,
        may_be_text: bool,
        tokenizer: LLTokenizer,
        openings: Openings,
        start: LLMatcher,
        words: Sequence[bytes] = (),
    ) -> None:
        """`rise`: tokens by which one token that begins something makes the end longer, at most.
        `may_be_text`: what may end anywhere is no JSON. `start`: of an empty text, and its own.
        `words`: characters that patterns ask for, and names that objects must have."""
        self._words = words
        self._may_be_text = may_be_text
        self._tokenizer = tokenizer
        self.openings = openings
        """Shared by all constraints of a vocabulary."""
        self._rise = min(rise, LONGEST)  # no longer one would be found
        self._margin = self._rise + _SPARE
        self._rests: list[tuple[bytes, list[int]]] = []
        text = self._find_start(start)
        self.start = None if text is None else self._tokens(text)
        """The end of an empty text; None if it is too long."""
        if text is not None:
            self._rests = [
                (text[place:], self._spell(text[place:]))
                for place in range(len(text) - 1, -1, -1)
                if not place or text[place - 1] in b'"{[]}:,'
            ]
        """The parts of that end that begin behind a quotation mark, bracket, comma or colon."""
        self._longest = max(LONGEST, len(self.start or ()))

    def begin(self, mask: I32, is_free: bool, left: int) -> Reach:
        """As `restrict`, of an empty text."""
        return self._leave(mask, is_free, left, self.start)

    def restrict(
        self,
        mask: I32,
        is_free: bool,
        left: int,
        known: Reach,
        last: int,
        matcher: LLMatcher,
        looks: Looks,
    ) -> Reach | None:
        """Leave in a mask only tokens after which the text can end, in place.

        `is_free`: `Openings.are_free` of the mask. `left`: tokens that may be sampled, this one
        included. `known`: what this returned for the text before its `last` token; UNKNOWN: nothing
        is known of it. Returns the same of this one, or None, and leaves the mask as it is, if an
        end is to be sought and `looks` has too little left.
        """
        is_opening = bool(self.openings.counts[last])
        end: tuple[int, ...] | None = None
        if known.most >= 0:
            most = known.most + self._rise * (is_opening or not known.is_free)
            if left > most + self._margin:
                return Reach(most, is_free, known.end, is_stale=True)
            end = known.end
        elif left > min(known.again, self._longest + self._margin):
            return known
        # Within one string its end stays the same.
        is_same = known.is_free and is_free and not known.is_stale and not is_opening
        if end is None or not (is_same or self._is_end(matcher, end)):
            if self in looks.failed or not looks.left:
                return None
            allowed = min(looks.left, LONGEST)
            text = self._find_bytes(matcher.deep_copy(), looks, allowed)
            if text is None and allowed < LONGEST:
                return None
            end = None if text is None else self._tokens(text)
            if end is None:
                looks.failed.add(self)
        return self._leave(mask, is_free, left, end)

    def _leave(self, mask: I32, is_free: bool, left: int, end: tuple[int, ...] | None) -> Reach:
        """Leave in a mask the tokens after which this end, or one not much longer, has room."""
        if end is None:
            return Reach(-1, is_free, again=left // 2)
        is_whole = len(end) == 1
        if left <= len(end) + self._margin and not (is_whole and self._may_be_text):
            if is_free and left > len(end) + _SPARE:
                mask &= self.openings.plain
                _allow(mask, end[0])
            elif left == 1 or not is_whole:
                mask[:] = 0
                _allow(mask, end[0])
                return Reach(len(end), False, end, is_forced=True)
        return Reach(len(end), is_free, end)

    def _tokens(self, text: bytes) -> tuple[int, ...]:
        return (*self._tokenizer.tokenize_bytes(text), self._tokenizer.eos_token)

    def _spell(self, text: bytes) -> list[int]:
        """As `_tokens`, a byte each."""
        return [*map(self.openings.bytes.__getitem__, text), self._tokenizer.eos_token]

    def _is_end(self, matcher: LLMatcher, end: Iterable[int]) -> bool:
        tokens = [*end]
        return matcher.validate_tokens(tokens) == len(tokens)

    def _find_start(self, start: LLMatcher) -> bytes | None:
        """Return an end of an empty text. Where it takes one of a few branches, as the tag of a
        union or an optional property, the others are tried too, and the shortest is kept."""
        best = self._find_bytes(start.deep_copy(), Looks(LONGEST_START), LONGEST_START)
        place, looks = 0, Looks(LONGEST_START)
        while best is not None and place < len(best) and looks.left > 0:
            looks.left -= 1
            _, allowed = self._look(start, is_all=True)
            for byte in allowed if len(allowed) <= _MOST_BRANCHES else ():
                if byte != best[place]:
                    branch = start.deep_copy()
                    branch.consume_token(self.openings.bytes[byte])
                    rest = self._find_bytes(branch, looks, len(best) - place - 2)
                    if rest is not None:
                        best = best[:place] + bytes([byte]) + rest
            start.consume_token(self.openings.bytes[best[place]])
            place += 1
        return best

    def _find_bytes(self, matcher: LLMatcher, looks: Looks, most: int) -> bytes | None:
        """Return bytes that end the text, few of them; None if none were found by so many looks.
        Moves the matcher."""
        text, string, may_be_known = bytearray(), _Inside(self._words), True
        for _ in range(most):
            if matcher.is_accepting():
                return bytes(text)
            if may_be_known:
                for rest, tokens in self._rests:
                    if self._is_end(matcher, tokens):
                        return bytes(text) + rest
            looks.left -= 1
            ends, allowed = self._look(matcher)
            if not allowed:
                return None
            may_be_known = allowed[0] in ends
            if may_be_known:
                chosen, string = bytes(allowed), _Inside(self._words)
            else:
                chosen = self._choose(matcher, ends, allowed, string)
                string.num_chosen += 1
                string.used.update(chosen)
                string.before = allowed
            matcher.consume_tokens([self.openings.bytes[byte] for byte in chosen])
            text += chosen
        return bytes(text) if matcher.is_accepting() else None

    def _look(self, matcher: LLMatcher, is_all: bool = False) -> tuple[bytes, list[int]]:
        """Return the bytes that end a value or a string here, and those that may follow: one of
        the former alone, if it may, unless `is_all`."""
        is_string = any(self._fits(matcher, byte) for byte in _STRINGS)
        ends = b'"' if is_string else _ENDS_VALUE
        for byte in () if is_all else ends:
            if self._fits(matcher, byte):
                return ends, [byte]
        if not is_all and not is_string and self._closes(matcher):
            return b'"', [_QUOTE]
        for order in (_IN_STRING if is_string else _OUTSIDE, _BEYOND):
            known, fits = self.openings.bytes, matcher.validate_tokens
            if allowed := [own for own in order if own in known and fits([known[own]])]:
                break
        return ends, allowed

    def _closes(self, matcher: LLMatcher) -> bool:
        """Whether a quotation mark may follow, and ends a string of few characters."""
        return (
            self._fits(matcher, _QUOTE)
            and not any(self._fits(matcher, _QUOTE, byte) for byte in b'"z0')
            and (
                any(self._fits(matcher, _QUOTE, byte) for byte in b"}],:")
                or self._is_end(matcher, self._spell(b'"'))
            )
        )

    def _choose(
        self, matcher: LLMatcher, ends: bytes, allowed: list[int], inside: _Inside
    ) -> bytes:
        """Return what is likeliest to lead to an end: a byte or word behind which there is one, a
        byte that was not allowed before the last one, a word of a pattern, or the byte that was
        taken least often."""
        count = inside.num_chosen
        is_swept = ends != b'"' or count < _SWEEPS or not count & count - 1
        if len(allowed) > 1 and is_swept:
            for byte in allowed:
                if byte != _ESCAPE and any(
                    self._fits(matcher, byte, end) for end in {*ends, _QUOTE}
                ):
                    return bytes([byte])
            for word in self._words:
                if self._fits(matcher, *word, _QUOTE):
                    return word
        fresh = [byte for byte in allowed if byte not in inside.before]
        for word in [] if fresh else inside.words:
            if self._fits(matcher, *word):
                inside.words.remove(word)
                return word
        return bytes([min(fresh or allowed, key=inside.used.__getitem__)])

    def _fits(self, matcher: LLMatcher, *text: int) -> bool:
        known = self.openings.bytes
        try:
            return matcher.validate_tokens([known[byte] for byte in text]) == len(text)
        except KeyError:  # the vocabulary has no such byte
            return False


def _allow(mask: I32, token: int) -> None:
    mask[token // 32] |= BITS[token % 32]


class Openings:
    """What the tokens of a vocabulary begin."""

    def __init__(self, tokens: Sequence[bytes], num_words: int) -> None:
        self.counts = [sum(text.count(byte) for byte in _OPENING) for text in tokens]
        """Quotation marks, brackets and commas of each token."""
        known = {text[0]: token for token, text in enumerate(tokens) if len(text) == 1}
        self.bytes = known
        """Tokens of bytes."""

        def mask_of(wanted: Iterable[int]) -> I32:
            bits = np.zeros(32 * num_words, np.uint8)
            bits[list(wanted)] = 1
            return np.packbits(bits, bitorder="little").view(np.int32)

        self.plain = mask_of(token for token, count in enumerate(self.counts) if not count)
        """The mask of tokens that begin nothing."""
        self.free = mask_of(known[byte] for byte in _FREE if byte in known)
        """The mask of bytes that are all allowed only within strings of any characters."""

    def are_free(self, masks: I32) -> list[bool]:
        """Whether each text of these masks stands within a string of any characters."""
        free: list[bool] = (masks & self.free == self.free).all(axis=1).tolist()
        return free


def make_closing(
    constraint: str, tokenizer: LLTokenizer, openings: Openings, start: Callable[[], LLMatcher]
) -> Closing | None:
    """Make the closing of a constraint that llguidance has taken; None if its texts are no JSON.
    `start` returns a new matcher of an empty text."""
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
    texts = [json.loads(own) for own in _PATTERN.findall(constraint)]
    words = [
        word.replace("\\", "").encode(errors="ignore")
        for text in texts
        for word in _WORD.findall(_CLASS.sub("|", text[:_LONGEST_PATTERN]))
    ]
    lists: list[list[str]] = [json.loads(own) for own in _REQUIRED.findall(constraint)]
    names = [
        json.dumps(name, ensure_ascii=False)[1:-1].encode(errors="ignore")
        for own in lists
        for name in own
    ]
    known = [*dict.fromkeys(words)][:_MOST_WORDS] + [*dict.fromkeys(names)][:_MOST_NAMES]
    return Closing(rise, bool(around), tokenizer, openings, start(), known)
