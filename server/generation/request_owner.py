"""For whom a generation runs, and how the engine is to rank it. Knows no HTTP and no engine."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from server.http.request_log import CURRENT


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """Who sent a request and how it is scheduled, which its body does not say."""

    share: str = ""
    """Name of the party that gets slots in turn: see `engine.messages.Request.share`."""
    weight: float = 1.0
    """Relative size of its part of the slots."""
    priority: int = 0
    """Priority as the engine has it, higher is first; added to the request's own."""
    durable: bool = False
    """Whether it is sent again until it is answered; its seeds are then made from its id."""
    created_unix: int | None = None
    """Creation time in the reply, in Unix seconds; None: now."""

    def seed(self, id: str, prompt: int) -> int | None:
        """Return a prompt's seed, 0 … 2**64 - 1, where the request has none; None: any will do."""
        if not self.durable:
            return None
        return int.from_bytes(blake2b(f"{id}-{prompt}".encode(), digest_size=8).digest(), "little")


def of_current_request() -> RequestOwner:
    """The sender of the HTTP request being answered: its API key, if keys are asked for."""
    entry = CURRENT.get(None)
    account = entry and entry.account
    return RequestOwner(share=account.name) if account else RequestOwner()
