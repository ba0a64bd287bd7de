"""Trees of samples: which nodes are expanded, and what becomes of their children.

A node is some tokens that follow its parent's; its children are samples of what may follow it, or
the likeliest next tokens. They come in rounds: the best nodes that have no children yet are
expanded together. So a tree depends on its parameters and seed, and on no timing. Beam search is a
tree of likeliest tokens of which each round expands the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from srm.engine.config import ModelConfig
from srm.engine.messages import Output, Request, Spelled, Status
from srm.engine.random_streams import sample_seeds
from srm.errors import EngineUnavailable, InvalidRequest, StepFailed

MAX_NODES = 2**17
"""Most nodes of a tree."""
Ends = Literal["stop", "split", "length"]
"""Why a node ends: at the end of the text, at a token where nodes end, or at its length."""
I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
Decode = Callable[[I32], str]


class Tree(
    msgspec.Struct, metaclass=Spelled, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How a tree grows. It has at most 131,072 nodes."""

    branching: Annotated[int, Meta(ge=1, le=1_024)] = 2
    """Children of each expanded node."""
    candidates: Literal["samples", "likeliest"] = "samples"
    """Kind of the children: samples, or the likeliest next tokens."""
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

    def check_fits(self, status: Status) -> None:
        """Raise InvalidRequest if a node may have more children than an engine makes at once."""
        limit = "max_logprobs" if self.candidates == "likeliest" else "max_waiting"
        if self.branching > (most := getattr(status, limit)):
            allowed = f"at most {limit} = {most} with candidates = {self.candidates}"
            raise _refusal("branching", allowed, self.branching)

    def _most_nodes(self) -> int:
        """Most nodes that the tree may have, counted until they are more than MAX_NODES."""
        most, level = 0, 1
        for _ in range(min(self.depth, MAX_NODES) if self.search == "levels" else 0):
            level = (level if self.width is None else min(level, self.width)) * self.branching
            most += level
            if most > MAX_NODES:
                break
        if self.budget is None or self.width is None:
            return most
        # A round that begins within the budget is completed; a child that is sampled is a token.
        each = self.branching if self.candidates == "likeliest" else 1
        by_budget = self.budget * each + self.width * self.branching
        return by_budget if self.search == "best_first" else min(most, by_budget)


@dataclass(slots=True, eq=False)
class TreeNode:
    """A node of a tree: some tokens that follow its parent's."""

    number: int
    """Place among all nodes, in the order in which they came; -1 of the prompt."""
    parent: TreeNode | None = field(repr=False)
    """None of those that follow the prompt."""
    depth: int
    """Nodes from the prompt to this one."""
    token_ids: I32
    """i32[tokens] its own, at most `node_tokens`."""
    logprobs: F32
    """f32[tokens] theirs."""
    logprob: float
    """Sum over all tokens from the prompt on."""
    num_tokens: int
    """How many these are."""
    ends: Ends
    is_leaf: bool
    """Whether nothing may follow: it ends the text, or the tree or the context is as deep."""
    score: float
    """Nodes with the highest are expanded first; by default `logprob`."""
    seed: int = field(repr=False)
    """Its children are samples of this seed."""
    decode: Decode = field(repr=False)
    tie: float = field(default=0.0, repr=False)
    """It orders nodes of equal scores, the highest first."""

    @property
    def path(self) -> I32:
        """All tokens from the prompt on."""
        return np.concatenate([node.token_ids for node in self._line()])

    @property
    def path_logprobs(self) -> F32:
        """Log-probabilities of these."""
        return np.concatenate([node.logprobs for node in self._line()])

    @property
    def mean_logprob(self) -> float:
        return self.logprob / self.num_tokens

    @property
    def text(self) -> str:
        """Text from the prompt on. Raises InvalidRequest where there is no tokenizer."""
        return self.decode(self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        """Have some node above pickled before the parent, since pickle nests some hundreds."""
        above = self.parent
        for _ in range((self.depth & -self.depth) - 1):
            above = above and above.parent
        return _unpickle, (above, *(getattr(self, own.name) for own in fields(self)))

    def _line(self) -> list[TreeNode]:
        """The nodes from the prompt to this one."""
        line, node = [self], self.parent
        while node is not None:
            line.append(node)
            node = node.parent
        return line[::-1]


def _unpickle(_: TreeNode | None, *own: Any) -> TreeNode:
    return TreeNode(*own)


class TreeSearch:
    """A tree that grows. Its owner expands the nodes of `next_round`, scores their children, and
    adds them."""

    def __init__(
        self,
        tree: Tree,
        model: ModelConfig,
        asked: Request,
        decode: Decode,
        only_leaves: bool = False,
    ) -> None:
        """`asked` says prompt, who asks, and how to sample; n and max_tokens are the tree's to say.
        Nodes end at its stop tokens. `only_leaves` keeps no others, of which there may then be any
        number. Raises InvalidRequest."""
        if not only_leaves:
            tree.check()
        self.tree, self.asked = tree, asked
        self._model, self._decode, self._only_leaves = model, decode, only_leaves
        self._num_left = model.n_ctx - len(asked.prompt_token_ids) // 4 + 1  # the last is not fed
        none = np.empty(0, np.int32), np.empty(0, np.float32)
        self.prompt = TreeNode(
            *(-1, None, 0, *none, 0.0, 0, "split", False, 0.0, asked.params.seed, decode)
        )
        """The prompt as a node."""
        self.nodes: list[TreeNode] = []
        self.num_tokens = 0
        """Tokens computed so far."""
        self.first_version = self.version = 0
        """Versions of the weights that made the first and the last nodes; 0 where nobody says."""
        self._num_made = 0  # nodes
        self._open = [(0.0, 0.0, -1, self.prompt)]  # a heap, the best first

    def next_round(self) -> list[TreeNode]:
        """Return the nodes to expand now, the best first; none: the tree is complete."""
        if self.tree.budget is not None and self.num_tokens >= self.tree.budget:
            return []
        if self.tree.width is None:
            best, self._open = sorted(self._open), []
        else:
            count = min(len(self._open), self.tree.width)
            best = [heapq.heappop(self._open) for _ in range(count)]
        if self.tree.search == "levels":
            self._open.clear()
        return [node for *_, node in best]

    def request(self, node: TreeNode, id: str) -> Request:
        """Return the request that makes a node's children."""
        is_sampled = self.tree.candidates == "samples"
        params = msgspec.structs.replace(
            self.asked.params,
            n=self.tree.branching if is_sampled else 1,
            max_tokens=min(self.tree.node_tokens, self._num_left - node.num_tokens),
            logprobs=0 if is_sampled else self.tree.branching,
            seed=node.seed,
        )
        # What follows the prompt's children begins from the end of its parent, not from a state.
        own: dict[str, Any] = {}
        if node is not self.prompt:
            own = {"state": b"", "state_length": 0, "state_of": ""}
            own["prompt_token_ids"] = self.asked.prompt_token_ids + node.path.tobytes()
        emit: Any = "final" if is_sampled else "delta"
        return msgspec.structs.replace(
            self.asked, id=id, params=params, emit=emit, keeps_ends=True, **own
        )

    def children(self, node: TreeNode, outputs: Iterable[Output]) -> list[TreeNode]:
        """Return a node's children, not added yet and with their log-probability as score, of the
        Outputs of its request. Raises StepFailed where one failed, and EngineUnavailable where one
        was ended."""
        columns: list[tuple[I32, F32]] = []
        for output in sorted(outputs, key=lambda output: output.index):
            if output.finish_reason == "error":
                raise StepFailed(output.error or "a sample failed")
            if output.finish_reason == "abort":
                raise EngineUnavailable("what ran was ended, and the search with it")
            self.num_tokens += len(output.token_ids) // 4
            ids, scores = output.token_ids, output.logprobs
            if self.tree.candidates == "likeliest":
                ids, scores = output.top_ids, output.top_logprobs
            own = np.frombuffer(ids, np.int32), np.frombuffer(scores, np.float32)
            if self.tree.candidates == "likeliest":
                may_be = (own[0] >= 0) & np.isfinite(own[1])
                columns += [(own[0][[at]], own[1][[at]]) for at in np.flatnonzero(may_be)]
            else:
                columns.append(own)
        seeds = sample_seeds(node.seed, np.arange(len(columns))).tolist()
        return [self._child(node, *own, seed) for own, seed in zip(columns, seeds, strict=True)]

    def add(self, children: Iterable[TreeNode]) -> None:
        """Add children of nodes of this round, in the order in which they were made."""
        for child in children:
            if child.is_leaf or not self._only_leaves:
                self.nodes.append(child)
            if not child.is_leaf:
                heapq.heappush(self._open, (-child.score, -child.tie, child.number, child))

    def best(self, count: int, length_penalty: float) -> list[TreeNode]:
        """Return the best leaves: the highest log-probability over tokens ** `length_penalty` comes
        first."""
        leaves = (node for node in self.nodes if node.is_leaf)
        return heapq.nlargest(
            count, leaves, key=lambda node: node.logprob / node.num_tokens**length_penalty
        )

    def _child(self, node: TreeNode, token_ids: I32, logprobs: F32, seed: int) -> TreeNode:
        num_tokens, depth, last = node.num_tokens + len(token_ids), node.depth + 1, token_ids[-1]
        ends: Ends = "length"
        if last in self._model.end_ids and not self.asked.params.ignore_eos:
            ends = "stop"
        elif last in self.asked.params.stop_token_ids:
            ends = "split"
        logprob = node.logprob + float(logprobs.sum(dtype=np.float64))
        is_leaf = ends == "stop" or depth == self.tree.depth or num_tokens >= self._num_left
        self._num_made += 1
        return TreeNode(
            number=self._num_made - 1,
            parent=None if node is self.prompt else node,
            depth=depth,
            token_ids=token_ids,
            logprobs=logprobs,
            logprob=logprob,
            num_tokens=num_tokens,
            ends=ends,
            is_leaf=is_leaf,
            score=logprob,
            seed=seed,
            decode=self._decode,
        )


def _refusal(name: str, allowed: str, value: object) -> InvalidRequest:
    got = "and is missing" if value is None else f"got {value}"
    return InvalidRequest(f"tree.{name} must be {allowed}, {got}", "tree")
