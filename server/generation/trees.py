"""Trees of samples on the engine's side of a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from srm.engine.client.client import EngineClient
from srm.engine.messages import Output
from srm.engine.tree_search import TreeNode, TreeSearch
from srm.errors import InvalidRequest, Overloaded
from srm.server.generation.read_ahead import read_ahead

_AT_ONCE = 1_024
"""Most nodes that an engine is asked to expand at once."""
_TOGETHER = 128
"""Nodes whose children are read before other tasks get their turn."""

Expanded = list[tuple[TreeNode, list[Output]]]
"""Nodes, each with the Outputs that its children are made of."""


async def grow(
    client: EngineClient, search: TreeSearch, id: str
) -> AsyncGenerator[list[TreeNode], None]:
    """Yield new nodes in order, some at a time, until the tree is complete; whoever reads them adds
    them to the search before it asks for more. `id` is unique. Raises what the engine refuses; one
    that becomes overloaded meanwhile is waited for."""
    most, branching = client.require_status().max_logprobs, search.tree.branching
    if search.tree.candidates == "likeliest" and branching > most:
        message = f"tree.branching may be max_logprobs = {most} of likeliest tokens"
        raise InvalidRequest(f"{message}, got {branching}", "tree")
    level = 0
    while nodes := search.next_round():
        expanding = _expand(client, search, nodes, f"{id}-{level}", is_first=not level)
        # What comes is read while the next ones are expanded.
        async with aclosing(read_ahead(expanding, _chain)) as arriving:
            async for expanded in arriving:
                for begin in range(0, len(expanded), _TOGETHER):
                    some = expanded[begin : begin + _TOGETHER]
                    yield [child for node, own in some for child in search.children(node, own)]
                    await asyncio.sleep(0)
        level += 1


async def _expand(
    client: EngineClient, search: TreeSearch, nodes: list[TreeNode], id: str, is_first: bool
) -> AsyncGenerator[Expanded, None]:
    """Yield the nodes in order, expanded."""
    most = client.require_status().max_waiting // 2 // search.tree.branching
    size, begin, tries = max(1, min(_AT_ONCE, most)), 0, 0
    while begin < len(nodes):
        some = nodes[begin : begin + size]
        outputs: list[list[Output]] = [[] for _ in some]
        requests = []
        for place, node in enumerate(some):
            requests.append(search.request(node, f"{id}-{begin + place}-{tries}"))
            if not place % _TOGETHER:
                await asyncio.sleep(0)
        try:
            with client.open(requests) as stream:
                while stream.unfinished:
                    await stream.wait()
                    for place, output in stream.take_outputs():
                        outputs[place].append(output)
        except Overloaded as error:
            if is_first:  # nothing would be lost
                raise
            tries += 1  # the engine may still know those that were given up
            await asyncio.sleep(error.retry_after_s or 1)
            continue
        yield list(zip(some, outputs, strict=True))
        begin += size


def _chain(parts: list[Expanded]) -> Expanded:
    return [pair for part in parts for pair in part]
