"""Prefixes: kept states, found by exact tokens; the least recently used is evicted.

The state after some tokens is one row of the device's pool, so a prefix is a slot. Those that begin
alike share a path of a tree, whose edges are compared token by token: a state is only ever found
for the tokens that made it. Keeps: a slot is free or one prefix's; none that is pinned is evicted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from srm.engine.steps.batch import I32

NO_SLOT = -1
NO_TOKENS: I32 = np.empty(0, np.int32)

Order = tuple[int, int, int]  # order of service: the larger comes first


@dataclass(slots=True, eq=False)
class Prefix:
    """Some tokens and the slot of the state after them; without a slot, a fork of the tree."""

    tokens: I32
    slot: int = NO_SLOT
    is_ready: bool = False
    """The slot holds the state, or will when the batches scheduled so far have run."""
    order: Order = (0, 0, 0)  # order of the request that makes the state
    pins: int = 0  # number of users that write the slot or are still to read it
    parent: Prefix | None = None
    """None outside the tree: such a prefix is never found, and freed with its last pin."""
    children: dict[int, Prefix] = field(default_factory=dict)
    """Children by their first token beyond this prefix."""

    @property
    def length(self) -> int:
        return len(self.tokens)


class Found(NamedTuple):
    """Known prefixes of some tokens."""

    ready: Prefix | None = None  # the longest whose state is ready
    coming: Prefix | None = None  # the longest whose state is being made, if longer than `ready`
    shared: int = 0  # most tokens shared with any prefix in the tree

    @property
    def length(self) -> int:
        """Length of the longest state, ready or being made."""
        longest = self.coming or self.ready
        return longest.length if longest else 0


class Prefixes:
    """The slots `slots`, and which prefixes are in them."""

    def __init__(self, slots: range, keep: bool = True) -> None:
        """`keep`: whether a prefix outlives its last pin."""
        self.num_slots = len(slots)
        self.num_hits = 0
        self.num_cached_tokens = 0
        self.num_evictions = 0
        self.keep = keep
        self.free = list(reversed(slots))
        self.idle: dict[Prefix, None] = {}
        """Kept and not pinned, least recently used first."""
        self.roots: dict[str, Prefix] = {"": Prefix(NO_TOKENS)}
        """The roots of the trees of prefixes, by the salt of their requests."""

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self.free)

    @property
    def num_available(self) -> int:
        """Slots that can be taken: free ones and those of prefixes that nobody has pinned."""
        return len(self.free) + len(self.idle)

    @property
    def num_pinned(self) -> int:
        return self.num_slots - self.num_available

    def find(self, tokens: I32, salt: str = "") -> Found:
        """Find the known prefixes of these tokens among requests of this salt."""
        if salt not in self.roots:
            return Found()
        node, shared = self._descend(self.roots[salt], tokens)
        coming = None
        while node.parent is not None and not node.is_ready:
            if coming is None and node.slot != NO_SLOT:
                coming = node
            node = node.parent
        return Found(node if node.is_ready else None, coming, shared)

    def claim(
        self, tokens: I32, order: Order, salt: str = "", only_new: bool = False
    ) -> Prefix | None:
        """Return a pinned prefix whose state the caller is to make; None if all slots are pinned.
        It is kept if `finish`ed, unless there is one of these tokens already; with `only_new` none
        is returned then."""
        if not self.num_available:
            return None
        if not self.free:
            if only_new and self.find(tokens, salt).length == len(tokens):
                return None
            evicted = next(iter(self.idle))
            del self.idle[evicted]
            self.num_evictions += 1
            self._give_up(evicted)
        # Only now, since giving a prefix up changes the tree.
        prefix = self._place(self._root(salt), tokens) if self.keep else Prefix(tokens)
        if prefix.slot != NO_SLOT:
            if only_new:
                return None
            prefix = Prefix(tokens)
        prefix.slot = self.free.pop()
        prefix.order = order
        prefix.pins = 1
        return prefix

    def finish(self, prefix: Prefix) -> None:
        """Mark a prefix ready: all of its tokens are in batches."""
        prefix.is_ready = True

    def count_hit(self, length: int) -> None:
        """Count a prompt that begins from a kept state of `length` tokens."""
        self.num_hits += 1
        self.num_cached_tokens += length

    def pin(self, prefix: Prefix) -> None:
        self.idle.pop(prefix, None)
        prefix.pins += 1

    def release(self, prefix: Prefix) -> None:
        """Take one pin away. The last one was the most recent use, if the prefix is kept."""
        assert prefix.pins > 0, "a prefix was released more often than pinned"
        prefix.pins -= 1
        if prefix.pins:
            return
        if prefix.is_ready and prefix.parent is not None:
            self.idle[prefix] = None
        else:
            self._give_up(prefix)

    def forget(self) -> None:
        """Forget all prefixes, since the weights have changed. Pins stay good."""
        for prefix in self.idle:
            self.free.append(prefix.slot)
        self.idle.clear()
        nodes = [*self.roots.values()]
        self.roots = {"": self.roots[""]}
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            node.children, node.parent = {}, None

    def _give_up(self, prefix: Prefix) -> None:
        self.free.append(prefix.slot)
        prefix.slot, prefix.is_ready = NO_SLOT, False
        self._prune(prefix)

    def _root(self, salt: str) -> Prefix:
        """Return the root of a tree, made if need be; trees without prefixes go."""
        if salt not in self.roots:
            self.roots = {
                name: root for name, root in self.roots.items() if root.children or not name
            }
            self.roots[salt] = Prefix(NO_TOKENS)
        return self.roots[salt]

    def _descend(self, root: Prefix, tokens: I32) -> tuple[Prefix, int]:
        """Return the last node on the tokens' path, and how many tokens the path shares in all."""
        node, begin, count = root, 0, len(tokens)
        while begin < count:
            child = node.children.get(int(tokens[begin]))
            if child is None:
                break
            stop = min(child.length, count)
            edge, own = child.tokens[begin:stop], tokens[begin:stop]
            if edge.tobytes() != own.tobytes():  # faster than to look where at once
                return node, begin + int((edge != own).argmax())
            if stop < child.length:
                return node, stop
            node, begin = child, stop
        return node, begin

    def _place(self, root: Prefix, tokens: I32) -> Prefix:
        """The node of exactly these tokens, made if need be."""
        node, shared = self._descend(root, tokens)
        if shared > node.length:  # on the edge to a child
            child = node.children[int(tokens[node.length])]
            middle = self._hang(node, tokens[:shared])
            middle.children[int(child.tokens[shared])] = child
            child.parent = node = middle
        return node if node.length == len(tokens) else self._hang(node, tokens)

    def _hang(self, parent: Prefix, tokens: I32) -> Prefix:
        node = parent.children[int(tokens[parent.length])] = Prefix(tokens, parent=parent)
        return node

    def _prune(self, node: Prefix) -> None:
        """Remove nodes that have no state and are no fork, from this one upwards."""
        while node.parent is not None and node.slot == NO_SLOT and len(node.children) < 2:
            parent, key = node.parent, int(node.tokens[node.parent.length])
            del parent.children[key]
            for child in node.children.values():
                parent.children[key] = child
                child.parent = parent
            node.parent = None
            node = parent
