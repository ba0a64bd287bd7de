"""Collects facts about one HTTP request while it is answered, for its line in the log.

The entry goes with the request's task and those it starts, so whoever knows something notes it
without being handed anything. Holds no prompt and no text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import quote

from srm.server.http.limits import Account

_MOST_SHOWN = 2_000
"""Most characters of the places that are not enforced."""


@dataclass
class LogEntry:
    """Facts about one request."""

    request_id: str
    account: Account | None = None
    """The account of its API key, if keys are required."""
    status: int = 0
    """HTTP status of the reply; 0 until it has begun."""
    completion_id: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    """Seconds from the completion's start to its first output."""
    not_enforced: str | None = None
    """Places of schemas that are not enforced, as a header has them."""
    goes_on: asyncio.Task[None] | None = None
    """A task that goes on after the reply and holds the request's body; None: there is none."""
    broken_off: int = 0
    """The status of the error that ended a reply already begun; 0 without one."""

    def fields(self) -> dict[str, object]:
        """Return the known facts by name."""
        return {
            name: value
            for name, value in (
                ("request_id", self.request_id),
                ("key", self.account and self.account.name),
                ("completion_id", self.completion_id),
                ("prompt_tokens", self.prompt_tokens if self.completion_id else None),
                ("completion_tokens", self.completion_tokens if self.completion_id else None),
                ("not_enforced", self.not_enforced),
                ("first_token_s", self.first_token_s and round(self.first_token_s, 4)),
            )
            if value is not None
        }


CURRENT: ContextVar[LogEntry] = ContextVar("request")
"""The entry of the request being answered."""


def note_broken_off(status: int) -> None:
    """Note that a reply already begun ends with an error of this status."""
    if (entry := CURRENT.get(None)) is not None:
        entry.broken_off = status


def note_not_enforced(places: Sequence[str]) -> None:
    """Note which places of schemas are not enforced."""
    if places and (entry := CURRENT.get(None)) is not None:
        shown = ", ".join(quote(place, safe="/~$") for place in places)
        entry.not_enforced = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}..."
