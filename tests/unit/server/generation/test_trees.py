"""Trees of the server: what ends them, besides themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from srm.engine.client.client import EngineClient
from srm.engine.messages import Request, SamplingParams
from srm.engine.tree_search import Tree, TreeSearch
from srm.errors import InvalidRequest
from srm.server.generation.trees import grow
from tests.kit.engines.numpy_runner import TINY


async def begin(tree: Tree) -> None:
    known = SimpleNamespace(max_logprobs=20, max_waiting=100)
    client = cast(EngineClient, SimpleNamespace(require_status=lambda: known))
    search = TreeSearch(tree, TINY, Request("", bytes(4), SamplingParams()), repr)
    await anext(grow(client, search, list[int]().append))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (Tree(branching=101, depth=1), "tree.branching must be at most max_waiting = 100 with"),
        (
            Tree(branching=21, depth=1, candidates="likeliest"),
            "at most max_logprobs = 20 with",
        ),
    ],
)
async def test_more_children_than_an_engine_takes_are_refused(tree: Tree, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await begin(tree)
