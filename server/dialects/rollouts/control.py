"""What trainers have engines do between rollouts: pause, resume, end requests, change weights.

The two dialects have routes of their own for each (`vllm.py`, `sglang.py`); here is what they do.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterable

from srm.engine.client.client import EngineClient
from srm.engine.messages import DropPrefixes, EndRequests, Pause, Resume, Running, Status
from srm.server.generation.engine_request import of_current_request

ChangeWeights = Callable[[str, Running, str], Awaitable[int]]
"""Has the engines go on with the weights of a folder, as the operator's route does: path, what
running sequences do, what the trainer calls them. Returns their version."""


class TrainerControl:
    """The engines of one server, for their trainer."""

    def __init__(self, client: EngineClient, change: ChangeWeights, lease_s: float) -> None:
        """`lease_s`: seconds after which a pause that nobody ends or renews is over."""
        self.client = client
        self.change = change
        self._lease_s = lease_s

    async def status(self) -> Status:
        """The engines' status, whichever process has just changed it. Raises EngineUnavailable
        while none answers."""
        return await self.client.refresh()

    def label(self, status: Status) -> str:
        """What the trainer calls the weights in use, else their number."""
        return self.client.label(status.weights_version)

    async def pause(self, refeeds: bool = False, waits: bool = False) -> None:
        """Have all sequences stand still; returns when no step is under way. `refeeds`: weights
        that are changed meanwhile are fed again what runs; `waits`: what runs ends first, and
        nothing else begins."""
        await self.client.control(Pause(_id(), self._lease_s, refeeds, waits))

    async def resume(self) -> None:
        """Have them go on; nothing if they do."""
        await self.client.control(Resume(_id()))

    async def end(self, names: Iterable[str] | None = None) -> int:
        """End the asking key's requests of these `request_id`s, or everybody's but those of
        batches, each with its tokens so far; returns how many."""
        wanted = None if names is None else frozenset(names)
        share = of_current_request().share
        done = await self.client.control(EndRequests(_id(), wanted, share))
        return int(done.detail["requests"])

    async def drop_prefixes(self) -> None:
        """Forget the kept states of prompts."""
        await self.client.control(DropPrefixes(_id()))


def _id() -> str:
    return uuid.uuid4().hex
