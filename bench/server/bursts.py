"""The bursts of `srm bench text` and `srm bench server`: requests of any size, all at once.

They work with any OpenAI-style server that knows `ignore_eos`; without it, completions may end
early.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from bench.server.served import completion


class BurstSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes of the bursts."""

    streams: int = 1_024
    """Requests of one completion each, sent at once."""
    requests: int = 10
    """Requests for many completions, sent at once."""
    n: int = 1_000
    """Completions of each of these."""
    max_tokens: int = 400
    """Tokens of each completion."""
    repetitions: int = 3
    """Bursts of each kind; the median is reported, the record has them all."""

    def __post_init__(self) -> None:
        for name in BurstSizes.__struct_fields__:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


class Burst(NamedTuple):
    """A kind of burst."""

    name: str
    is_stream: bool
    is_many: bool
    """Whether a request asks for n completions, or for one."""
    fields: dict[str, Any]
    """Members of its requests' bodies besides the common ones."""

    def shape(self, sizes: BurstSizes) -> tuple[int, int]:
        """Return the number of requests, and of completions of each."""
        return (sizes.requests, sizes.n) if self.is_many else (sizes.streams, 1)

    def bodies(self, sizes: BurstSizes, max_tokens: int) -> Iterator[dict[str, Any]]:
        """Yield the bodies of its requests, whose prompts are one token each."""
        requests, n = self.shape(sizes)
        for index in range(requests):
            body = completion(2 + index % 64, n, max_tokens, index, self.is_stream)
            yield body | self.fields


PLAIN = (
    Burst("streams", True, False, {}),
    Burst("streams of many", True, True, {}),
    Burst("whole", False, False, {}),
    Burst("whole of many", False, True, {}),
)
