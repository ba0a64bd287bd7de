"""Fields of a request that say which of its samples it wants, and when there are enough.

Both routes have them. What does not go together is refused here.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from srm.errors import InvalidRequest
from srm.server.schema.validation import Fields
from srm.server.schema.verify import MAX_PATTERN_LENGTH, Rule

MAX_CHOICES = 1_000_000
"""Most completions of one request: prompts x n."""
MAX_BUDGET = 10**12
"""Most tokens of a budget."""


class Until(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which samples match, and how many of these are enough."""

    match: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN_LENGTH)] | None = None
    """A regular expression in RE2's syntax, looked for anywhere in a completion's text."""
    score: float | None = None
    """A score by verify that is at least reached. With match, both are needed."""
    count: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    """So many matching samples of a prompt are enough, at most n; null: all n are drawn."""
    budget: Annotated[int, Meta(ge=1, le=MAX_BUDGET)] | None = None
    """Tokens that the samples of all prompts may have; null: no limit. With count."""


class WantedSamples(Fields, frozen=True, kw_only=True):
    """The fields of requests about which samples are wanted."""

    until: (
        Annotated[
            Until,
            Meta(
                description=f"an object with match, a string of 1 to {MAX_PATTERN_LENGTH} "
                "characters, or score, a number, or both, count, an integer from 1 to n, and with "
                f"it budget, an integer from 1 to {MAX_BUDGET}; these two may be left out"
            ),
        ]
        | None
    ) = None
    """Mark matching samples; stop when count is reached."""
    verify: (
        Annotated[list[Rule], Meta(description="a rule, or a list with one rule for each prompt")]
        | None
    ) = None
    """Give each sample a score."""
    returns: Annotated[
        Literal["choices", "unique", "counts"], Meta(description="choices, unique or counts")
    ] = msgspec.field(default="choices", name="return")
    """Return all choices, each distinct text once, or only counts."""
    count_by: Annotated[
        Literal["text", "group", "score"],
        Meta(description="text, group or score; only with return = unique or counts"),
    ] = "text"
    """Compare texts, first groups of until.match, or scores."""
    stream_whole: Annotated[bool, Meta(description="true or false; only with stream")] = False
    """Send each choice in one event, once finished."""

    @property
    def ends_early(self) -> bool:
        """Whether some of the samples may not be needed."""
        return self.until is not None and self.until.count is not None

    @property
    def says_samples(self) -> bool:
        """Whether the reply says how many samples were drawn."""
        return self.until is not None or self.returns != "choices" or self.verify is not None

    def check_wanted(self, n: int, is_stream: bool) -> None:
        """Raise InvalidRequest for what makes no sense together."""
        if self.stream_whole and not is_stream:
            raise InvalidRequest("stream_whole is allowed only with stream = true", "stream_whole")
        if self.returns != "choices" and is_stream:
            raise InvalidRequest(
                f'return = "{self.returns}" is known at the end only: leave stream out', "return"
            )
        for name in ("until", "verify"):
            if getattr(self, name) is not None and is_stream and not self.stream_whole:
                raise InvalidRequest(
                    f"{name} is about whole samples: in a stream it needs stream_whole = true", name
                )
        if self.until is not None:
            self._check_until(self.until, n)
        self._check_count_by()

    def _check_until(self, until: Until, n: int) -> None:
        if until.match is None and until.score is None:
            raise InvalidRequest("until must have match, score or both", "until")
        if until.score is not None and self.verify is None:
            raise InvalidRequest(
                f"until.score = {until.score:g} is about a score by verify, which is missing",
                "until",
            )
        if until.budget is not None and until.count is None:
            raise InvalidRequest(
                f"until.budget = {until.budget} is divided until count match: count is missing",
                "until",
            )
        if until.count is not None and until.count > n:
            raise InvalidRequest(
                f"until.count = {until.count} cannot be reached with n = {n}", "until"
            )

    def _check_count_by(self) -> None:
        if self.count_by == "group" and (self.until is None or self.until.match is None):
            raise InvalidRequest(
                'count_by = "group" is about a group of until.match: until is missing', "count_by"
            )
        if self.count_by == "score" and self.verify is None:
            raise InvalidRequest(
                'count_by = "score" is about a score by verify, which is missing', "count_by"
            )
        if self.count_by != "text" and self.returns == "choices":
            raise InvalidRequest(
                f'count_by = "{self.count_by}" is allowed only with return = unique or counts',
                "count_by",
            )

    def refuse_beside(self, names: dict[str, bool], to_what: str) -> None:
        """Raise InvalidRequest naming the first of these fields that is there."""
        for name, is_there in names.items():
            if is_there:
                raise InvalidRequest(f"{name} does not go with {to_what}", name)

    @property
    def show_field(self) -> str:
        """The field that changes the reply, as error messages show it."""
        if self.until is not None:
            return "until"
        return f'return = "{self.returns}"' if self.returns != "choices" else "verify"
