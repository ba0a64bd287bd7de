"""What is found out about one HTTP request while it is answered, for its line in the log.

The entry goes with the request's task and those it starts, so whoever knows something notes it
without being handed anything. Holds no prompt and no text.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from engine.client.streams import Stream
from server.http.limits import Account


@dataclass
class Entry:
    """One request."""

    request_id: str
    account: Account | None = None
    """Of its API key, if keys are asked for."""
    completion_id: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_token_s: float | None = None
    """From the completion's start to its first output."""
    stream: Stream | None = None
    """What the engine makes for it."""
    broken_off: int = 0
    """The status that a reply which had begun would have had, had it been known how it ends."""

    def take_over(self, other: Entry) -> None:
        """This request is answered with what was made for another one."""
        self.completion_id = other.completion_id
        self.prompt_tokens, self.completion_tokens = other.prompt_tokens, other.completion_tokens
        self.first_token_s = other.first_token_s

    def fields(self) -> dict[str, object]:
        """What there is to say, by name."""
        return {
            name: value
            for name, value in (
                ("request_id", self.request_id),
                ("key", self.account and self.account.name),
                ("completion_id", self.completion_id),
                ("prompt_tokens", self.prompt_tokens if self.completion_id else None),
                ("completion_tokens", self.completion_tokens if self.completion_id else None),
                ("first_token_s", self.first_token_s and round(self.first_token_s, 4)),
            )
            if value is not None
        }


CURRENT: ContextVar[Entry] = ContextVar("request")
"""The entry of the request being answered."""


def note_stream(stream: Stream) -> None:
    """The engine has been asked for something."""
    if (entry := CURRENT.get(None)) is not None:
        entry.stream = stream


def note_broken_off(status: int) -> None:
    """A reply that had begun ends with an error."""
    if (entry := CURRENT.get(None)) is not None:
        entry.broken_off = status


def note_completion(
    id: str,
    prompt_tokens: int,
    completion_tokens: int,
    discarded_tokens: int,
    first_token_s: float | None,
) -> None:
    """A completion has ended, in whatever way; its tokens are charged to the key."""
    entry = CURRENT.get(None)
    if entry is None:  # nobody asked over HTTP
        return
    entry.completion_id = id
    entry.prompt_tokens += prompt_tokens
    entry.completion_tokens += completion_tokens
    entry.first_token_s = first_token_s
    if entry.account is not None:
        entry.account.charge(prompt_tokens + completion_tokens + discarded_tokens)
