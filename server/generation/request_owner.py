"""For whom a generation runs, and how the engine is to rank it. Knows no HTTP and no engine."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from server.http.request_log import CURRENT


@dataclass(frozen=True, slots=True)
class RequestOwner:
    """What a request's body does not say of it."""

    share: str = ""
    """Who gets slots in turn with others: see `engine.messages.Request.share`."""
    weight: float = 1.0
    """How large a part of them."""
    priority: int = 0
    """Of the engine's kind, higher is first; added to the request's own."""
    durable: bool = False
    """It is sent again until it is answered, so what is drawn for it is drawn from its id."""
    created_unix: int | None = None
    """When the reply says that it was made; None: now."""

    def seed(self, id: str, prompt: int) -> int | None:
        """Of a prompt whose request gives none, if it must be the same again: 0 … 2**64 - 1."""
        if not self.durable:
            return None
        return int.from_bytes(blake2b(f"{id}-{prompt}".encode(), digest_size=8).digest(), "little")


def of_current_request() -> RequestOwner:
    """The sender of the HTTP request being answered: its API key, if keys are asked for."""
    entry = CURRENT.get(None)
    account = entry and entry.account
    return RequestOwner(share=account.name) if account else RequestOwner()
