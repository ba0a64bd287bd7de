"""Regexes as trees: classes of characters, literals, runs and groups, and their text."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby

NO_END = -1
"""Upper bound of a quantifier without one."""
ONCE = (1, 1)
DIGIT = r"\d"
_ESCAPED = frozenset(r".+*?()[]{}|\^$")


class Characters:
    """A class of characters: how it is written, and which are drawn for it, more often those that
    stand there more often. `is_narrow` if a wider class is simpler."""

    __slots__ = ("drawn", "is_narrow", "members", "text")

    def __init__(self, text: str, drawn: str, is_narrow: bool = False) -> None:
        self.text, self.drawn, self.is_narrow = text, drawn, is_narrow
        self.members = frozenset(drawn)


@dataclass(slots=True)
class Literal:
    """A text that stands there as it is."""

    text: str


@dataclass(slots=True)
class Run:
    """Characters of a class, `least` to `most` of them."""

    of: Characters
    least: int = 1
    most: int = 1
    seen: set[int] = field(default_factory=set)
    """Lengths in the strings that match."""
    characters: set[str] = field(default_factory=set)
    """Characters in them."""


@dataclass(slots=True)
class Group:
    """One of some sequences, `least` to `most` times."""

    branches: list[Nodes]
    least: int = 1
    most: int = 1
    seen: set[int] = field(default_factory=set)
    """How often it stood in a string that matches."""
    chosen: list[int] = field(default_factory=list)
    """Branches in the strings that match, by first appearance."""


Node = Literal | Run | Group
Nodes = list[Node]


def write_regex(nodes: Nodes) -> str:
    """Return the shortest text of a regex."""
    first = nodes[0] if len(nodes) == 1 else None
    if isinstance(first, Group) and (first.least, first.most) == ONCE:
        return "|".join(map(write_regex, first.branches))
    return "".join(map(_write, nodes))


def _write(node: Node) -> str:
    if isinstance(node, Literal):
        return _escaped(node.text)
    if isinstance(node, Run):
        return _quantified(node.of.text, node.least, node.most)
    text = "|".join("".join(map(_write, branch)) for branch in node.branches)
    once = (node.least, node.most) == ONCE
    if len(node.branches) == 1:
        (branch,) = node.branches
        if once:
            return text
        if len(branch) == 1 and _is_one_character(branch[0]):
            return _quantified(text, node.least, node.most)
    return _quantified(f"({text})", node.least, node.most)


def _is_one_character(node: Node) -> bool:
    if isinstance(node, Literal):
        return len(node.text) == 1
    return isinstance(node, Run) and (node.least, node.most) == ONCE


def _escaped(text: str) -> str:
    return "".join("\\" + letter if letter in _ESCAPED else letter for letter in text)


def _quantified(text: str, least: int, most: int) -> str:
    if least == most:
        again = f"{text}{{{least}}}"
        return text * least if len(text) * least <= len(again) else again
    if most == NO_END:
        return text + ("*", "+")[least] if least < 2 else f"{text}{{{least},}}"
    return text + "?" if (least, most) == (0, 1) else f"{text}{{{least},{most}}}"


def range_of(first: str, last: str) -> Characters:
    """Return the class of the characters from one to another."""
    return class_of("".join(map(chr, range(ord(first), ord(last) + 1))))


def class_of(members: str) -> Characters:
    """Return the class of these characters; three neighbours or more are written as a range."""
    codes = sorted({*map(ord, members)} - {*map(ord, "-^")})
    text = ""
    for _, group in groupby(enumerate(codes), lambda pair: pair[1] - pair[0]):
        run = [chr(code) for _, code in group]
        text += f"{run[0]}-{run[-1]}" if len(run) > 2 else "".join(run)
    text = f"[{text}{'^' * ('^' in members)}{'-' * ('-' in members)}]"
    return Characters(DIGIT if text == "[0-9]" else text, members, is_narrow=True)


def copied(node: Node) -> Node:
    """Return a node with nothing seen."""
    if isinstance(node, Literal):
        return node
    if isinstance(node, Run):
        return Run(node.of, node.least, node.most)
    return Group([[*map(copied, branch)] for branch in node.branches], node.least, node.most)
