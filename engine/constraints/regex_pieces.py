"""Regexes as pieces of an automaton over bytes.

The syntax is Rust's, as llguidance reads it, without what depends on Unicode's tables or on flags.
A regex comes here only after llguidance has taken it: what it refuses is not refused again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from srm.engine.constraints.byte_automaton import (
    Nfa,
    NotCompiled,
    Piece,
    Work,
    choice,
    repeat,
    sequence,
)

Ranges = list[tuple[int, int]]
"""Characters, from the first to the last of each range."""
_LAST = 0x10FFFF
ANY: Ranges = [(0, _LAST)]
MAX_NESTED = 50
"""Most groups in each other."""
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\"}
"""What JSON writes with a backslash, by its letter."""
_UNWRITTEN: Ranges = [(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C), (0x7F, 0x7F)]
"""Characters that a string of JSON does not have as they are."""
_SURROGATES: Ranges = [(0xD800, 0xDFFF)]
_COUNT = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_CODE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\})"
)
_ESCAPED = frozenset(" !\"#$%&'()*+,-./:;=?@[\\]^_`{|}~")
"""What stands for itself behind a backslash."""
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}


def regex(pattern: str, work: Work) -> Piece:
    """Reads a text that the regex matches from the first to the last character."""
    work.spend(len(pattern))
    return _Parser(pattern, _Ends(), False).parse()


def regex_in_string(pattern: str, work: Work) -> Piece:
    """As `regex`, as a string of JSON has such a text, without its quotes."""
    work.spend(len(pattern))
    return _Parser(pattern, _Ends(), True).parse()


def search_in_string(pattern: str, work: Work) -> Piece:
    """Reads a text in which the regex matches anywhere, as a string of JSON has it, without its
    quotes."""
    work.spend(len(pattern))
    ends = _Ends()
    inner = _Parser(pattern, ends, True, is_search=True).parse()
    loop = repeat(characters(ANY, True), 0, None)

    def build(nfa: Nfa, node: int) -> int:
        ends.start, ends.end = nfa.add(), nfa.add()
        nfa.skip(node, ends.start)
        anywhere = nfa.add()
        nfa.skip(loop(nfa, ends.start), anywhere)
        nfa.skip(loop(nfa, inner(nfa, anywhere)), ends.end)
        return ends.end

    return build


def characters(ranges: Ranges, in_string: bool) -> Piece:
    """Reads one of these characters in UTF-8, or as a string of JSON has it."""
    ways: dict[tuple[int, ...], int] = {}
    """Sets of first bytes, by the sets of those that follow."""
    if in_string:
        for letter, character in _ESCAPES.items():
            if any(low <= ord(character) <= high for low, high in ranges):
                _add_way(ways, (1 << ord("\\"), 1 << ord(letter)))
        ranges = invert([*_UNWRITTEN, *invert(ranges)])
    for low, high in invert([*_SURROGATES, *invert(ranges)]):
        for way in _utf8(low, high):
            _add_way(ways, way)

    def build(nfa: Nfa, node: int) -> int:
        tails: dict[tuple[int, ...], int] = {(): nfa.add()}
        for tail, first in ways.items():
            for start in range(len(tail) - 1, -1, -1):
                if tail[start:] not in tails:
                    tails[tail[start:]] = nfa.add()
                    nfa.read(tails[tail[start:]], tail[start], tails[tail[start + 1 :]])
            nfa.read(node, first, tails[tail])
        return tails[()]

    return build


def _add_way(ways: dict[tuple[int, ...], int], way: tuple[int, ...]) -> None:
    ways[way[1:]] = ways.get(way[1:], 0) | way[0]


def _utf8(low: int, high: int) -> Iterable[tuple[int, ...]]:
    """Yield sets of the first byte, the second one and so on that together are these characters."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            yield from _utf8(low, last)
            yield from _utf8(last + 1, high)
            return
    for tail in range(1, len(chr(high).encode())):
        rest = (1 << 6 * tail) - 1
        if low & ~rest != high & ~rest:
            if low & rest:
                yield from _utf8(low, low | rest)
                yield from _utf8((low | rest) + 1, high)
                return
            if high & rest != rest:
                yield from _utf8(low, (high & ~rest) - 1)
                yield from _utf8(high & ~rest, high)
                return
    pairs = zip(chr(low).encode(), chr(high).encode(), strict=True)
    yield tuple((1 << last + 1) - (1 << first) for first, last in pairs)


def invert(ranges: Ranges) -> Ranges:
    """Return all other characters, in order."""
    others, following = [], 0
    for low, high in sorted(ranges):
        if low > following:
            others.append((following, low - 1))
        following = max(following, high + 1)
    return [*others, (following, _LAST)] if following <= _LAST else others


class _Ends:
    """Where the text begins and ends, in the automaton that is being built."""

    start = -1
    end = -1

    def begin(self, nfa: Nfa, node: int) -> int:  # noqa: ARG002
        """Read nothing, at the start of the text."""
        return self.start

    def finish(self, nfa: Nfa, node: int) -> int:
        """Read nothing, at the end of the text."""
        nfa.skip(node, self.end)
        return nfa.add()


class _Parser:
    """Reads one regex."""

    def __init__(
        self, pattern: str, ends: _Ends, in_string: bool, *, is_search: bool = False
    ) -> None:
        self._pattern = pattern
        self._place = 0
        self._ends = ends
        self._in_string = in_string
        self._is_search = is_search
        self._num_nested = 0
        self._num_anchors = 0

    def parse(self) -> Piece:
        piece = self._read_choice()
        if self._place < len(self._pattern):
            raise NotCompiled("the regex has a bracket that is not opened")
        return piece

    def _next(self) -> str:
        return self._pattern[self._place : self._place + 1]

    def _skip_if(self, text: str) -> bool:
        if is_next := self._pattern.startswith(text, self._place):
            self._place += len(text)
        return is_next

    def _read_choice(self) -> Piece:
        self._num_nested += 1
        if self._num_nested > MAX_NESTED:
            raise NotCompiled(f"the regex nests deeper than {MAX_NESTED}")
        branches = [self._read_sequence()]
        while self._skip_if("|"):
            branches.append(self._read_sequence())
        self._num_nested -= 1
        return choice(branches) if len(branches) > 1 else branches[0]

    def _read_sequence(self) -> Piece:
        pieces = []
        while self._next() and self._next() not in "|)":
            num_anchors = self._num_anchors
            piece = self._read_atom()
            while (counts := self._read_counts()) is not None:
                if num_anchors < self._num_anchors:
                    raise NotCompiled("the regex repeats ^ or $")
                piece = repeat(piece, *counts)
            pieces.append(piece)
        return sequence(pieces)

    def _read_counts(self) -> tuple[int, int | None] | None:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._next())
        if simple:
            self._place += 1
        elif self._next() == "{":
            counts = _COUNT.match(self._pattern, self._place)
            if not counts or len(counts[0]) > 20:
                raise NotCompiled("the regex has a { that is not known here")
            self._place = counts.end()
            least = int(counts[1])
            simple = (least, int(counts[3]) if counts[3] else None if counts[2] else least)
        else:
            return None
        self._skip_if("?")  # lazy: the same texts
        return simple

    def _read_atom(self) -> Piece:
        if self._skip_if("("):
            if self._next() == "?" and not self._skip_if("?:"):
                raise NotCompiled("the regex has a group that is not known here")
            piece = self._read_choice()
            if not self._skip_if(")"):
                raise NotCompiled("the regex has a bracket that is not closed")
            return piece
        if self._next() in "^$":
            self._num_anchors += 1
            is_start = self._next() == "^"
            self._place += 1
            if not self._is_search:
                return sequence([])
            return self._ends.begin if is_start else self._ends.finish
        if self._skip_if("."):
            return characters(invert([(10, 10)]), self._in_string)
        if self._next() in "*+?{" or (self._next() == "/" and not self._in_string):
            raise NotCompiled(f"the regex has {self._next()!r} where it is not known here")
        if self._skip_if("["):
            return characters(self._read_class(), self._in_string)
        code = self._read_character()
        return characters([(code, code)], self._in_string)

    def _read_class(self) -> Ranges:
        """Read what follows a [, with its end."""
        if self._num_nested > MAX_NESTED or self._next() == ":":
            raise NotCompiled("the regex has a class that is not known here")
        is_negated = self._skip_if("^")
        ranges: Ranges = []
        is_first = True
        while is_first or not self._skip_if("]"):
            is_first = False
            if self._skip_if("&&["):
                ranges = invert([*invert(ranges), *invert(self._read_class())])
                if not self._skip_if("]"):
                    raise NotCompiled("the regex has sets of sets")
                break
            if self._pattern[self._place : self._place + 2] in ("&&", "--", "~~"):
                raise NotCompiled("the regex has sets of sets")
            if self._skip_if("["):
                self._num_nested += 1
                ranges += self._read_class()
                self._num_nested -= 1
                continue
            low = high = self._read_character()
            ahead = self._pattern[self._place : self._place + 2]
            if ahead[:1] == "-" and ahead not in ("-]", "-"):
                if ahead in ("--", "-["):
                    raise NotCompiled("the regex has sets of sets")
                self._place += 1
                high = self._read_character()
            ranges.append((low, high))
        return invert(ranges) if is_negated else invert(invert(ranges))

    def _read_character(self) -> int:
        """Read one character, or an escape that stands for one."""
        if not self._next():
            raise NotCompiled("the regex ends too soon")
        if code := _CODE.match(self._pattern, self._place):
            self._place = code.end()
            return int(next(filter(None, code.groups())), 16)
        character = self._next()
        self._place += 1
        if character != "\\":
            return ord(character)
        escaped = self._next()
        self._place += 1
        if escaped in _CONTROLS:
            return ord(_CONTROLS[escaped])
        if escaped not in _ESCAPED:
            raise NotCompiled(f"the regex has \\{escaped}, which is not known here")
        return ord(escaped)
