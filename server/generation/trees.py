"""Trees of samples on the engine's side of a server, and beam search as one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

import numpy as np
from msgspec.structs import replace

from srm.engine.client.client import EngineClient
from srm.engine.config import ModelConfig
from srm.engine.messages import REASONS, Output, Request, SamplingParams
from srm.engine.steps.tokens import Tokens
from srm.engine.tree_search import Tree, TreeNode, TreeSearch
from srm.errors import EngineUnavailable, InvalidRequest, Overloaded
from srm.server.generation.read_ahead import read_ahead
from srm.tasks import task_group

_AT_ONCE = 1_024
"""Most nodes that an engine is asked to expand at once."""
_SEARCHES = 16
"""Most prompts of a request whose beams are searched at once."""
_TOGETHER = 128
"""Nodes whose children are read before other tasks get their turn."""

Check = Callable[[], None]
Charge = Callable[[int], None]
"""Is called with the tokens of each round that were sampled, waited for or not."""
Expanded = list[tuple[TreeNode, list[Output]]]
"""Nodes, each with the Outputs that its children are made of."""


async def grow(
    client: EngineClient, search: TreeSearch, charge: Charge
) -> AsyncGenerator[list[TreeNode], None]:
    """Yield new nodes in order, some at a time, until the tree is complete; their reader adds
    them to the search before it asks for more. Its request's id is unique. Raises what the engine
    refuses; one that becomes overloaded meanwhile is waited for."""
    search.tree.check_fits(client.require_status())
    with _stand_in(client, search.asked) as check:
        for nodes in iter(search.next_round, []):
            expanding = _expand(client, search, nodes, check, charge)
            # What comes is read while the next ones are expanded.
            async with aclosing(read_ahead(expanding, _chain)) as arriving:
                async for expanded in arriving:
                    for begin in range(0, len(expanded), _TOGETHER):
                        some = expanded[begin : begin + _TOGETHER]
                        yield [child for node, own in some for child in search.children(node, own)]
                        await asyncio.sleep(0)


@contextmanager
def _stand_in(client: EngineClient, asked: Request) -> Iterator[Check]:
    """Have an engine hold a request that never starts, so that between rounds too there is what is
    ended by name or by a change of weights, and times out. Durable ones never are."""
    if asked.durable:
        yield lambda: None
        return
    stand_in = replace(asked, id=f"{asked.id}-search", params=SamplingParams(), first_wave=0)
    with client.open([stand_in]) as stream:

        def check() -> None:
            stream.check()
            if stream.take_outputs():
                raise EngineUnavailable("what ran was ended, and the search with it")

        yield check
        stream.cut(0, 0)  # no request that was left


async def _expand(
    client: EngineClient, search: TreeSearch, nodes: list[TreeNode], check: Check, charge: Charge
) -> AsyncGenerator[Expanded, None]:
    """Yield the nodes in order, expanded. Raises what `check` does."""
    most = client.require_status().max_waiting // 2 // search.tree.branching
    size, begin, tries = max(1, min(_AT_ONCE, most)), 0, 0
    while begin < len(nodes):
        check()
        some = nodes[begin : begin + size]
        requests = []
        for place, node in enumerate(some):
            # Behind a `-` a fork by name would look for the number of a prompt.
            id = f"{search.asked.id}.{node.number + 1}.{tries}"
            requests.append(search.request(node, id))
            if not place % _TOGETHER:
                await asyncio.sleep(0)
        try:
            outputs = await _answer(client, search, requests, charge)
        except Overloaded as error:
            if nodes == [search.prompt]:  # nothing would be lost
                raise
            tries += 1  # the engine may still know those that were given up
            await asyncio.sleep(error.retry_after_s or 1)
            continue
        yield list(zip(some, outputs, strict=True))
        begin += size


async def _answer(
    client: EngineClient, search: TreeSearch, requests: list[Request], charge: Charge
) -> list[list[Output]]:
    """Return the Outputs of each request. Raises what the engine refuses."""
    outputs: list[list[Output]] = [[] for _ in requests]
    stream = client.open(requests)
    try:
        with stream:
            while stream.unfinished:
                await stream.wait()
                for place, output in stream.take_outputs():
                    outputs[place].append(output)
            search.first_version = search.first_version or stream.first_version
            search.version = stream.version
    finally:
        read = sum(len(output.token_ids) // 4 for own in outputs for output in own)
        stream.when_counted(lambda left: charge(read + left))
    return outputs


def _chain(parts: list[Expanded]) -> Expanded:
    return [pair for part in parts for pair in part]


class BeamSearch:
    """The likeliest texts that beams find of each prompt of a request."""

    def __init__(self, n: int, max_tokens: int, length_penalty: float, model: ModelConfig) -> None:
        """`n` beams of each prompt, of at most `max_tokens`."""
        self._n, self._length_penalty, self._model = n, length_penalty, model
        self._beams = Tree(candidates="likeliest", branching=2 * n, width=n, depth=max_tokens)
        self.searches: list[TreeSearch] = []
        """Those that have begun."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far."""
        return sum(search.num_tokens for search in self.searches)

    async def run(self, client: EngineClient, requests: list[Request], charge: Charge) -> Tokens:
        """Return the texts as samples of the requests, one a prompt; they may be fewer than n.
        Raises as `grow`."""
        if 2 * self._n > (most := client.require_status().max_logprobs):
            raise InvalidRequest(
                f"n must be at most {most // 2}, half of max_logprobs, with use_beam_search; got "
                f"{self._n}",
                "n",
            )
        turns = asyncio.Semaphore(_SEARCHES)
        async with task_group() as group:
            tasks = [
                group.create_task(self._search(client, own, turns, charge)) for own in requests
            ]
        rows = [
            (place * self._n + sample, node)
            for place, task in enumerate(tasks)
            for sample, node in enumerate(task.result())
        ]
        reasons = ["stop" if node.ends == "stop" else "length" for _, node in rows]
        return Tokens(
            owners=np.array([owner for owner, _ in rows], np.int64),
            offsets=np.cumsum([0, *(node.num_tokens for _, node in rows)], dtype=np.int64),
            token_ids=np.concatenate([node.path for _, node in rows]),
            reasons=np.array([REASONS.index(reason) for reason in reasons], np.uint8),
            logprobs=np.concatenate([node.path_logprobs for _, node in rows]),
        )

    async def _search(
        self, client: EngineClient, request: Request, turns: asyncio.Semaphore, charge: Charge
    ) -> list[TreeNode]:
        async with turns:
            search = TreeSearch(self._beams, self._model, request, repr, only_leaves=True)
            self.searches.append(search)
            async with aclosing(grow(client, search, charge)) as growing:
                async for nodes in growing:
                    search.add(nodes)
            return search.best(self._n, self._length_penalty)
