"""Fields of a request that say which of its samples it wants, and when there are enough.

Both routes have them. What does not go together is refused here.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from srm.engine.errors import InvalidRequest
from srm.server.schema.validation import Fields

MAX_CHOICES = 1_000_000
"""Most completions of one request: prompts x n."""
MAX_PATTERN_LENGTH = 1_000
"""Most characters of a regular expression."""


class Until(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which samples match, and how many of these are enough."""

    match: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN_LENGTH)]
    """A regular expression in RE2's syntax, looked for anywhere in a completion's text."""
    count: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """So many matching samples of a prompt are enough, at most n; null: all n are drawn."""


class WantedSamples(Fields, frozen=True, kw_only=True):
    """The fields of requests about which samples are wanted."""

    until: (
        Annotated[
            Until,
            Meta(
                description=f"an object with match, a string of 1 to {MAX_PATTERN_LENGTH} "
                "characters, and count, an integer from 1 to n, which may be left out"
            ),
        ]
        | None
    ) = None
    """Mark matching samples; stop when count is reached."""
    returns: Annotated[
        Literal["choices", "unique", "counts"], Meta(description="choices, unique or counts")
    ] = msgspec.field(default="choices", name="return")
    """Return all choices, each distinct text once, or only counts."""
    count_by: Annotated[
        Literal["text", "group"],
        Meta(description="text or group; only with return = unique or counts"),
    ] = "text"
    """Compare texts, or first groups of until.match."""
    stream_whole: Annotated[bool, Meta(description="true or false; only with stream")] = False
    """Send each choice in one event, once finished."""

    @property
    def ends_early(self) -> bool:
        """Whether some of the samples may not be needed."""
        return self.until is not None and self.until.count is not None

    @property
    def says_samples(self) -> bool:
        """Whether the reply says how many samples were drawn."""
        return self.until is not None or self.returns != "choices"

    def check_wanted(self, n: int, is_stream: bool) -> None:
        """Raise InvalidRequest for what makes no sense together."""
        if self.stream_whole and not is_stream:
            raise InvalidRequest("stream_whole is allowed only with stream = true", "stream_whole")
        if self.returns != "choices" and is_stream:
            raise InvalidRequest(
                f'return = "{self.returns}" is known at the end only: leave stream out', "return"
            )
        if self.until is not None and is_stream and not self.stream_whole:
            raise InvalidRequest(
                "until is about whole samples: in a stream it needs stream_whole = true", "until"
            )
        if self.until is not None and self.until.count is not None and self.until.count > n:
            raise InvalidRequest(
                f"until.count = {self.until.count} cannot be reached with n = {n}", "until"
            )
        if self.count_by == "group" and self.until is None:
            raise InvalidRequest(
                'count_by = "group" is about a group of until.match: until is missing', "count_by"
            )
        if self.count_by == "group" and self.returns == "choices":
            raise InvalidRequest(
                'count_by = "group" is allowed only with return = unique or counts', "count_by"
            )

    def refuse_beside(self, names: dict[str, bool], to_what: str) -> None:
        """Raise InvalidRequest naming the first of these fields that is there."""
        for name, is_there in names.items():
            if is_there:
                raise InvalidRequest(f"{name} does not go with {to_what}", name)

    @property
    def show_field(self) -> str:
        """The field that changes the reply, as error messages show it."""
        return "until" if self.until is not None else f'return = "{self.returns}"'
