"""Trees of the server: what ends them, besides themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from srm.engine.client.client import EngineClient
from srm.engine.messages import Request, SamplingParams
from srm.engine.tree_search import Tree, TreeSearch
from srm.errors import InvalidRequest, TimedOut
from srm.server.generation.trees import grow
from tests.kit.engines.numpy_runner import TINY


async def begin(tree: Tree, **status: Any) -> None:
    known = {"max_logprobs": 20, "max_waiting": 100, "request_timeout_s": 0.0, **status}
    client = cast(EngineClient, SimpleNamespace(require_status=lambda: SimpleNamespace(**known)))
    search = TreeSearch(tree, TINY, Request("", bytes(4), SamplingParams()), repr)
    await anext(grow(client, search, ""))


async def test_no_round_begins_after_the_limit_of_a_request() -> None:
    with pytest.raises(TimedOut, match="it took longer than 1e-12 s"):
        await begin(Tree(), request_timeout_s=1e-12)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Tree(branching=101, depth=1), "tree.branching may be max_waiting = 100 of samples"),
        (Tree(branching=21, depth=1, candidates="likeliest"), "may be max_logprobs = 20 of likel"),
    ],
)
async def test_more_children_than_an_engine_takes_are_refused(tree: Tree, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await begin(tree)
