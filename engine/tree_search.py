"""Trees of samples: which nodes are expanded, and what becomes of their children.

A node is some tokens that follow its parent's; its children are samples of what may follow it, or
the likeliest next tokens. They come in rounds: the best nodes that have no children yet are
expanded together. So a tree depends on its parameters and seed, and on no timing. Beam search is a
tree of likeliest tokens of which each round expands the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from srm.engine.config import ModelConfig
from srm.engine.messages import Output, Request, Spelled
from srm.engine.random_streams import sample_seeds
from srm.errors import InvalidRequest, SRMError

MAX_NODES = 2**17
"""Most nodes of a tree."""
Ends = Literal["stop", "split", "length"]
"""Why a node ends: at the end of the text, at a token where nodes end, or at its length."""


class Tree(
    msgspec.Struct, metaclass=Spelled, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How a tree grows. It has at most 131,072 nodes."""

    branching: Annotated[int, Meta(ge=1, le=1_024)] = 2
    """Children of each expanded node."""
    candidates: Literal["samples", "likeliest"] = "samples"
    """What these are: samples, or the likeliest next tokens."""
    node_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 1
    """Most tokens of a node; 1 of likeliest tokens."""
    depth: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 4
    """Most nodes on a path from the prompt to a leaf."""
    width: Annotated[int, Meta(ge=1, le=MAX_NODES)] | None = None
    """Most nodes that a round expands, the best ones; by default all."""
    search: Literal["levels", "best_first"] = "levels"
    """Which nodes a round may expand: those of the last level, or all without children."""
    budget: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    """No round begins once so many tokens have been computed."""

    def check(self) -> None:
        """Raise InvalidRequest for fields that do not go together, and for too large a tree."""
        if self.candidates == "likeliest" and self.node_tokens != 1:
            raise _refusal("node_tokens", "1 with candidates = likeliest", self.node_tokens)
        if self.search == "best_first" and (self.width is None or self.budget is None):
            missing = "width" if self.width is None else "budget"
            raise _refusal(missing, "given with search = best_first", None)
        if self.budget is not None and self.width is None:
            raise _refusal("width", "given with a budget", None)
        if self._most_nodes() > MAX_NODES:
            raise InvalidRequest(
                f"tree could have more than {MAX_NODES} nodes: lower branching, depth, width or "
                "budget",
                "tree",
            )

    def _most_nodes(self) -> int:
        """Most nodes that the tree may have, counted until they are more than MAX_NODES."""
        if self.search == "best_first":
            assert self.width is not None and self.budget is not None
            expanded = self.budget + self.width if self.candidates == "likeliest" else self.budget
            return min(MAX_NODES + 1, (expanded + self.width) * self.branching)
        most, level = 0, 1
        for _ in range(min(self.depth, MAX_NODES)):
            level = (level if self.width is None else min(level, self.width)) * self.branching
            most += level
            if most > MAX_NODES:
                break
        return most


@dataclass(slots=True, eq=False)
class Node:
    """A node; without parent it is the prompt."""

    number: int
    """Place among all nodes, in the order in which they came; -1 of the prompt."""
    parent: Node | None
    index: int
    """Place among its siblings."""
    depth: int
    token_ids: bytes
    """Its own, int32 little-endian."""
    logprobs: bytes
    """Theirs, float32 little-endian."""
    logprob: float
    """Sum over all tokens from the prompt on."""
    num_tokens: int
    """How many these are."""
    ends: Ends
    seed: int
    """Its children are samples of this seed."""
    is_leaf: bool = False
    """Whether nothing may follow."""
    text: str = ""
    """Text from the prompt on, for whoever wants it."""
    score: float = 0.0
    """Nodes with the highest are expanded first."""
    tie: float = 0.0
    """Of those with equal scores, nodes with the highest of these."""

    @property
    def path(self) -> bytes:
        """All tokens from the prompt on."""
        return b"".join(node.token_ids for node in self._line())

    @property
    def path_logprobs(self) -> bytes:
        """Log-probabilities of these."""
        return b"".join(node.logprobs for node in self._line())

    def _line(self) -> list[Node]:
        """The nodes from the prompt to this one."""
        line, node = [self], self.parent
        while node is not None:
            line.append(node)
            node = node.parent
        return line[::-1]

    @property
    def mean_logprob(self) -> float:
        return self.logprob / self.num_tokens if self.num_tokens else 0.0


@dataclass(slots=True, eq=False)
class TreeSearch:
    """A tree that grows. Whoever owns it expands what `next_round` returns, gives new nodes text
    and score, and then adds them."""

    tree: Tree
    model: ModelConfig
    asked: Request
    """Prompt, who asks, and how to sample; n and max_tokens are the tree's to say. Nodes end at its
    stop tokens."""
    root: Node = field(init=False)
    """The prompt."""
    only_leaves: bool = False
    """Keep no others, of which there may then be any number."""
    nodes: list[Node] = field(default_factory=list)
    num_tokens: int = 0
    """Tokens computed so far."""
    _open: list[tuple[float, float, int, Node]] = field(
        default_factory=list
    )  # a heap, the best first
    _num_made: int = 0  # nodes

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if not self.only_leaves:
            self.tree.check()
        self.root = Node(-1, None, 0, 0, b"", b"", 0.0, 0, "split", self.asked.params.seed)
        self._open.append((0.0, 0.0, -1, self.root))

    @property
    def _num_left(self) -> int:
        """Most tokens that may follow the prompt: the last one is not fed."""
        return self.model.n_ctx - len(self.asked.prompt_token_ids) // 4 + 1

    def next_round(self) -> list[Node]:
        """Return the nodes to expand now, the best first; none: the tree is complete."""
        if self.tree.budget is not None and self.num_tokens >= self.tree.budget:
            return []
        count = min(len(self._open), self.tree.width or len(self._open))
        best = [heapq.heappop(self._open)[-1] for _ in range(count)]
        if self.tree.search == "levels":
            self._open.clear()
        return best

    def request(self, node: Node, id: str) -> Request:
        """Return the request that makes a node's children."""
        is_sampled = self.tree.candidates == "samples"
        params = msgspec.structs.replace(
            self.asked.params,
            n=self.tree.branching if is_sampled else 1,
            max_tokens=min(self.tree.node_tokens, self._num_left - node.num_tokens),
            logprobs=0 if is_sampled else self.tree.branching,
            seed=node.seed,
        )
        # What follows begins from the end of its parent.
        begun = {} if node.parent is None else {"state": b"", "state_length": 0, "state_of": ""}
        return msgspec.structs.replace(
            self.asked,
            id=id,
            prompt_token_ids=self.asked.prompt_token_ids + node.path,
            params=params,
            emit="final" if is_sampled else "delta",
            keeps_ends=True,
            **begun,
        )

    def children(self, node: Node, outputs: Iterable[Output]) -> list[Node]:
        """Return a node's children, not added yet and with their log-probability as score, of the
        Outputs of its request. Raises SRMError where one failed."""
        outputs = sorted(outputs, key=lambda output: output.index)
        for output in outputs:
            if output.finish_reason == "error":
                raise SRMError(output.error or "a sample failed")
        if self.tree.candidates == "samples":
            columns = [(output.token_ids, output.logprobs) for output in outputs]
        else:
            (output,) = outputs
            ids, scores = (
                np.frombuffer(own, "<i4") for own in (output.top_ids, output.top_logprobs)
            )
            may_be = (ids >= 0) & np.isfinite(scores.view("<f4"))
            columns = [
                (i.tobytes(), s.tobytes()) for i, s in zip(ids[may_be], scores[may_be], strict=True)
            ]
        seeds = sample_seeds(node.seed, np.arange(len(columns), dtype=np.int64)).tolist()
        self.num_tokens += sum(len(output.token_ids) // 4 for output in outputs)
        return [
            self._child(node, index, *column, seeds[index]) for index, column in enumerate(columns)
        ]

    def add(self, children: Iterable[Node]) -> None:
        """Add children of nodes of this round, in the order in which they were made."""
        for child in children:
            if child.is_leaf or not self.only_leaves:
                self.nodes.append(child)
            if not child.is_leaf:
                heapq.heappush(self._open, (-child.score, -child.tie, child.number, child))

    def best(self, count: int, length_penalty: float) -> list[Node]:
        """Return the best leaves: the highest log-probability over tokens ** `length_penalty` comes
        first."""
        leaves = (node for node in self.nodes if node.is_leaf)
        return heapq.nlargest(
            count, leaves, key=lambda node: node.logprob / node.num_tokens**length_penalty
        )

    def _child(self, node: Node, index: int, token_ids: bytes, logprobs: bytes, seed: int) -> Node:
        num_tokens, depth = node.num_tokens + len(token_ids) // 4, node.depth + 1
        last = int.from_bytes(token_ids[-4:], "little")
        ends: Ends = "length"
        if last in self.model.end_ids and not self.asked.params.ignore_eos:
            ends = "stop"
        elif last in self.asked.params.stop_token_ids:
            ends = "split"
        logprob = node.logprob + float(np.frombuffer(logprobs, "<f4").sum(dtype=np.float64))
        is_leaf = ends == "stop" or depth == self.tree.depth or num_tokens >= self._num_left
        place = self._num_made, node, index, depth
        self._num_made += 1
        return Node(
            *place, token_ids, logprobs, logprob, num_tokens, ends, seed, is_leaf, score=logprob
        )


def _refusal(name: str, allowed: str, value: object) -> InvalidRequest:
    return InvalidRequest(f"tree.{name} must be {allowed}, got {value}", "tree")
