"""Trees of samples on the engine's side of a server, and beam search as one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from srm.engine.client.client import EngineClient
from srm.engine.messages import Output
from srm.engine.tree_search import TreeNode, TreeSearch
from srm.errors import InvalidRequest, Overloaded

_AT_ONCE = 16_384
"""Most samples that an engine is asked for at once."""


async def grow(
    client: EngineClient, search: TreeSearch, id: str
) -> AsyncGenerator[list[TreeNode], None]:
    """Yield new nodes in order, some at a time, until the tree is complete; whoever reads them adds
    them to the search before it asks for more. `id` is unique. Raises what the engine refuses; one
    that becomes overloaded meanwhile is waited for."""
    status = client.require_status()
    most = status.max_logprobs
    if search.tree.candidates == "likeliest" and search.tree.branching > most:
        message = f"tree.branching may be max_logprobs = {most} of likeliest tokens"
        raise InvalidRequest(f"{message}, got {search.tree.branching}", "tree")
    at_once = max(1, min(_AT_ONCE, status.max_waiting // 2) // search.tree.branching)
    count = 0
    while left := search.next_round():
        while left:
            part, left = left[:at_once], left[at_once:]
            requests = [search.request(node, f"{id}-{count + i}") for i, node in enumerate(part)]
            try:
                with client.open(requests) as stream:
                    outputs: list[list[Output]] = [[] for _ in part]
                    while stream.unfinished:
                        await stream.wait()
                        for place, output in stream.take_outputs():
                            outputs[place].append(output)
            except Overloaded as error:
                if not count:
                    raise
                left = part + left
                await asyncio.sleep(error.retry_after_s or 1)
                continue
            finally:
                count += len(part)  # ids of what was given up may still be known
            made: list[TreeNode] = []
            for node, own in zip(part, outputs, strict=True):
                made += search.children(node, own)
            yield made
