"""Finite automata over bytes: built of pieces, made deterministic, and joined.

All that is done is counted. So whatever a constraint asks for ends soon, and one that takes too
much is refused on every machine alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

MAX_WORK = 600_000
"""Most units of work for one constraint; a core does 0.4 to 0.8 million in a second."""


class NotCompiled(Exception):
    """There is no table of a constraint: it is not regular, not known exactly, or too large."""

    def __init__(self, reason: str, place: str = "") -> None:
        """`place`: a JSON pointer into the schema."""
        super().__init__(f"{place}: {reason}" if place else reason)
        self.reason = reason
        self.place = place


class Work:
    """Counts the work that is left for compiling a constraint."""

    def __init__(self, left: int = MAX_WORK) -> None:
        self.left = left

    def spend(self, units: int) -> None:
        """Count these units. Raises NotCompiled if they are too many."""
        self.left -= units
        if self.left < 0:
            raise NotCompiled("it takes too much work to compile")


class Nfa:
    """Nodes, arcs that read a byte of a set, and skips that read nothing. A set of bytes is an
    integer of 256 bits."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.arcs: list[list[tuple[int, int]]] = []
        self.skips: list[list[int]] = []

    def add(self) -> int:
        """Return a new node, to which nothing leads yet."""
        self.work.spend(4)
        self.arcs.append([])
        self.skips.append([])
        return len(self.arcs) - 1

    def read(self, start: int, byte_set: int, end: int | None = None) -> int:
        """Add an arc; return its end, by default a new node."""
        end = self.add() if end is None else end
        self.arcs[start].append((byte_set, end))
        return end

    def skip(self, start: int, end: int) -> None:
        self.skips[start].append(end)


Piece = Callable[[Nfa, int], int]
"""Adds what it reads behind a node, and returns the node where that ends."""


def literal(text: bytes) -> Piece:
    """Reads this text."""

    def build(nfa: Nfa, node: int) -> int:
        for byte in text:
            node = nfa.read(node, 1 << byte)
        return node

    return build


def nothing(nfa: Nfa, node: int) -> int:  # noqa: ARG001
    """Reads no text at all, not even an empty one."""
    return nfa.add()


def sequence(pieces: Sequence[Piece]) -> Piece:
    """Reads one after another."""

    def build(nfa: Nfa, node: int) -> int:
        for piece in pieces:
            node = piece(nfa, node)
        return node

    return build


def choice(pieces: Sequence[Piece]) -> Piece:
    """Reads any one of them."""

    def build(nfa: Nfa, node: int) -> int:
        end = nfa.add()
        for piece in pieces:
            start = nfa.add()
            nfa.skip(node, start)
            nfa.skip(piece(nfa, start), end)
        return end

    return build


def any_text(texts: Sequence[bytes]) -> Piece:
    """Reads one of these texts; common beginnings are read together."""

    def build(nfa: Nfa, node: int) -> int:
        end, start = nfa.add(), nfa.add()
        nfa.skip(node, start)
        after: dict[tuple[int, int], int] = {}
        for text in texts:
            last = start
            for byte in text:
                if (last, byte) not in after:
                    after[last, byte] = nfa.read(last, 1 << byte)
                last = after[last, byte]
            nfa.skip(last, end)
        return end

    return build


def repeat(piece: Piece, least: int, most: int | None) -> Piece:
    """Reads it that many times; any number of times if there is no `most`."""

    def build(nfa: Nfa, node: int) -> int:
        if most is not None and least > most:
            return nfa.add()
        for _ in range(least):
            nfa.work.spend(1)
            node = piece(nfa, node)
        end = nfa.add()
        nfa.skip(node, end)
        if most is None:
            loop = nfa.add()
            nfa.skip(node, loop)
            nfa.skip(piece(nfa, loop), loop)
            nfa.skip(loop, end)
        for _ in range((most or least) - least):
            nfa.work.spend(1)
            start = nfa.add()
            nfa.skip(node, start)
            node = piece(nfa, start)
            nfa.skip(node, end)
        return end

    return build


@dataclass(frozen=True)
class Dfa:
    """A deterministic automaton; it begins in state 0."""

    arcs: list[list[tuple[int, int]]]
    """[states]: sets of bytes, disjoint in each state, and the states they lead to."""
    accepting: list[bool]

    def piece(self, nfa: Nfa, node: int) -> int:
        """Read what it reads: a Piece."""
        nodes = [nfa.add() for _ in self.arcs]
        nfa.skip(node, nodes[0])
        end = nfa.add()
        for state, arcs in enumerate(self.arcs):
            for byte_set, to in arcs:
                nfa.read(nodes[state], byte_set, nodes[to])
            if self.accepting[state]:
                nfa.skip(nodes[state], end)
        return end


def determinize(piece: Piece, work: Work) -> Dfa:
    """Make the deterministic automaton of a piece. Raises NotCompiled."""
    nfa = Nfa(work)
    start = nfa.add()
    end = piece(nfa, start)
    closures: dict[int, frozenset[int]] = {}

    def reach(node: int) -> frozenset[int]:
        if node not in closures:
            nodes, waiting = {node}, [node]
            while waiting:
                for to in nfa.skips[waiting.pop()]:
                    if to not in nodes:
                        nodes.add(to)
                        waiting.append(to)
            work.spend(len(nodes))
            closures[node] = frozenset(own for own in nodes if nfa.arcs[own] or own == end)
        return closures[node]

    order = [reach(start)]
    numbers = {order[0]: 0}
    rows = []
    for nodes in order:  # which grows meanwhile
        parts: list[tuple[int, frozenset[int]]] = []
        for node in nodes:
            for byte_set, to in nfa.arcs[node]:
                work.spend(1 + len(parts) // 4)
                _part(parts, byte_set, reach(to))
        row: dict[int, int] = {}
        for byte_set, reached in parts:
            if reached not in numbers:
                work.spend(4 + len(reached))
                numbers[reached] = len(order)
                order.append(reached)
            row[numbers[reached]] = row.get(numbers[reached], 0) | byte_set
        rows.append([(byte_set, to) for to, byte_set in row.items()])
    return Dfa(rows, [end in nodes for nodes in order])


def _part(parts: list[tuple[int, frozenset[int]]], byte_set: int, reached: frozenset[int]) -> None:
    """Add an arc to parts, whose sets of bytes have none in common."""
    for place in range(len(parts)):
        own, nodes = parts[place]
        if not (both := own & byte_set):
            continue
        if not reached <= nodes:
            if both != own:
                parts.append((own ^ both, nodes))
            parts[place] = (both, nodes | reached)
        byte_set ^= both
        if not byte_set:
            return
    parts.append((byte_set, reached))


def join(first: Dfa, second: Dfa, work: Work, without: bool = False) -> Dfa:
    """Make the automaton of texts that both read; or, with `without`, that the first one alone
    does."""
    order: list[tuple[int, int]] = [(0, 0)]
    numbers = {order[0]: 0}
    rows = []
    for x, y in order:  # which grows meanwhile
        row: dict[tuple[int, int], int] = {}
        others = second.arcs[y] if y >= 0 else []
        for byte_set, to in first.arcs[x]:
            work.spend(1 + len(others) // 4)
            rest = byte_set
            for own, other in others:
                if both := byte_set & own:
                    row[to, other] = row.get((to, other), 0) | both
                    rest ^= both
            if without and rest:
                row[to, -1] = row.get((to, -1), 0) | rest
        for pair in row:
            if pair not in numbers:
                work.spend(4)
                numbers[pair] = len(order)
                order.append(pair)
        rows.append([(byte_set, numbers[pair]) for pair, byte_set in row.items()])
    ends = [first.accepting[x] and (y >= 0 and second.accepting[y]) != without for x, y in order]
    return Dfa(rows, ends)
