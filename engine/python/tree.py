"""Trees of samples of the Python API."""

from __future__ import annotations

import math
from collections.abc import Callable

from msgspec.structs import replace

from srm.engine.messages import Output, Request, SamplingParams
from srm.engine.process.engine import Engine as SteppedEngine
from srm.engine.tree_search import Tree, TreeNode, TreeSearch
from srm.errors import InvalidRequest, Overloaded, show_value

_HONOURED = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos"),
    *("logit_bias", "allowed_token_ids"),
)
"""Fields of SamplingParams that a tree's nodes are sampled by."""


Score = Callable[[TreeNode], float]


def check_params(params: SamplingParams, tree: Tree, score: Score | None) -> SamplingParams:
    """Return the parameters of a tree. Raises InvalidRequest for what its nodes do not honour."""
    if score is not None and not callable(score):
        raise InvalidRequest(
            f"score must be a function of a TreeNode, got {show_value(score)}", "score"
        )
    honoured = set(_HONOURED)
    if tree.candidates == "likeliest":  # of which none are drawn
        honoured -= {"top_k", "top_p", "min_p", "seed", "stop_token_ids"}
    plain = SamplingParams()
    for name in SamplingParams.__struct_fields__:
        value = getattr(params, name)
        if name not in honoured and value != getattr(plain, name):
            raise InvalidRequest(
                f"params.{name} is not honoured in a tree: got {show_value(value)}", name
            )
    return replace(params, max_tokens=1)


def grow(
    search: TreeSearch,
    steps: SteppedEngine,
    step: Callable[[], list[Output]],
    score: Score | None,
) -> list[TreeNode]:
    """Grow a tree on an engine that has no other work; return its nodes. Raises RequestError, and
    StepFailed where a sample fails."""
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
            for child in children if score is not None else ():
                child.score = _checked(score(child))  # type: ignore[misc]  # it is not None
            search.add(children)
    return search.nodes


def _add(steps: SteppedEngine, request: Request) -> bool:
    """Add a request if there is room."""
    try:
        steps.add(request)
    except Overloaded:
        return False
    return True


def _checked(score: float) -> float:
    try:
        if math.isfinite(number := float(score)):
            return number
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidRequest(
        f"score must return a finite number, got {show_value(score)}", "score"
    ) from None
