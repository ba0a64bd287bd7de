"""Trees of samples of the Python API."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from srm.engine.messages import Output, Request, SamplingParams
from srm.engine.process.engine import Engine as SteppedEngine
from srm.engine.python.request_output import Decode
from srm.engine.steps.batch import F32, I32
from srm.engine.tree_search import Ends, Node, TreeSearch
from srm.errors import InvalidRequest, Overloaded, show_value

_HONOURED = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos"),
    *("logit_bias", "allowed_token_ids"),
)
"""Fields of SamplingParams that a tree's nodes are sampled by."""


@dataclass(frozen=True, slots=True, eq=False)
class TreeNode:
    """A node of a tree: some tokens that follow its parent's."""

    number: int
    """Place in the list of all nodes."""
    parent: int | None
    """Number of its parent; None of those that follow the prompt."""
    depth: int
    """Nodes from the prompt to this one, at least 1."""
    token_ids: I32
    """i32[tokens] its own, at most `node_tokens`."""
    logprobs: F32
    """f32[tokens] theirs."""
    logprob: float
    """Sum over all tokens from the prompt on."""
    ends: Ends
    """stop: at the end of the text; split: at one of `stop_token_ids`; length."""
    is_leaf: bool
    """Whether nothing may follow: it ends the text, or the tree or the context is as deep."""
    score: float
    path: I32 = field(repr=False)
    """i32 all tokens from the prompt on."""
    _decode: Decode = field(repr=False)

    @property
    def text(self) -> str:
        """Text from the prompt on. Raises InvalidRequest where there is no tokenizer."""
        return self._decode(self.path)


Score = Callable[[TreeNode], float]


def check_params(params: SamplingParams) -> SamplingParams:
    """Return the parameters of a tree. Raises InvalidRequest for what its nodes do not honour."""
    plain = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if name not in _HONOURED and value != getattr(plain, name):
            raise InvalidRequest(
                f"params.{name} is not honoured in a tree: got {show_value(value)}", name
            )
    return replace(params, max_tokens=1)


def grow(
    search: TreeSearch,
    steps: SteppedEngine,
    step: Callable[[], list[Output]],
    decode: Decode,
    score: Score | None,
) -> list[TreeNode]:
    """Grow a tree on an engine that has no other work; return its nodes. Raises RequestError, and
    SRMError where a sample fails."""
    grown: list[TreeNode] = []
    while expanded := search.next_round():
        outputs: list[list[Output]] = [[] for _ in expanded]
        waiting = list(enumerate(expanded))[::-1]
        while waiting or steps.has_work:
            while waiting and _add(steps, search.request(waiting[-1][1], str(waiting[-1][0]))):
                waiting.pop()
            for output in step():
                outputs[int(output.id)].append(output)
        for node, own in zip(expanded, outputs, strict=True):
            children = search.children(node, own)
            for child in children:
                shown = _shown(child, decode)
                if score is not None:
                    child.score = _checked(score(shown))
                    shown = dataclasses.replace(shown, score=child.score)
                grown.append(shown)
            search.add(children)
    return grown


def _add(steps: SteppedEngine, request: Request) -> bool:
    """Add a request if there is room."""
    try:
        steps.add(request)
    except Overloaded:
        return False
    return True


def _shown(node: Node, decode: Decode) -> TreeNode:
    assert node.parent is not None
    return TreeNode(
        number=node.number,
        parent=None if node.parent.parent is None else node.parent.number,
        depth=node.depth,
        token_ids=np.frombuffer(node.token_ids, np.int32),
        logprobs=np.frombuffer(node.logprobs, np.float32),
        logprob=node.logprob,
        ends=node.ends,
        is_leaf=node.is_leaf,
        score=node.score,
        path=np.frombuffer(node.path, np.int32),
        _decode=decode,
    )


def _checked(score: float) -> float:
    try:
        if math.isfinite(number := float(score)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidRequest(
        f"score must return a finite number, got {show_value(score)}", "score"
    ) from None
