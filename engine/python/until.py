"""`until` of the Python API: samples are drawn until enough of them are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from msgspec.structs import replace

from srm.engine.early_stop import EarlyStops
from srm.engine.messages import Request, SamplingParams
from srm.engine.process.engine import Engine as SteppedEngine
from srm.engine.python.request_output import Completion
from srm.errors import InvalidRequest, show_value

_NO_INDICES = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Until:
    """When `generate` needs no more samples of a prompt; those not needed are hardly computed.

    The completions of a prompt are its samples 0 … j, j the smallest index up to which `count` are
    right, or all n: the same as without `until`, up to there.
    """

    is_right: Callable[[Completion], bool]
    """Called once with each sample that ends, in whatever order; it must not generate itself."""
    count: int = 1
    """How many samples of a prompt must be right, 1 … n."""
    budget: int | None = None
    """Most tokens of all completions together; those of the last one may pass it. First each prompt
    has a sample, then the next is of the prompt with the fewest tokens for each of its right ones
    and one more, unless `count` are right."""

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if not callable(self.is_right):
            raise _refusal("is_right", "a function of a Completion", self.is_right)
        for name, value in (("count", self.count), ("budget", self.budget)):
            if not (value is None and name == "budget") and not _is_positive(value):
                raise _refusal(name, "a whole number of at least 1", value)


@dataclass(slots=True)
class _Judged:
    completion: Completion
    matched: bool

    @property
    def num_tokens(self) -> int:
        return len(self.completion.token_ids)


class Selection:
    """The completions that a `generate` with `until` returns, and which samples start meanwhile."""

    def __init__(self, until: Until, each: Sequence[SamplingParams]) -> None:
        """`each` are the parameters of all prompts. Raises InvalidRequest, which names a prompt."""
        for number, params in enumerate(each):
            if until.count > params.n:
                allowed = f"at most n = {params.n} of prompt {number}"
                raise _refusal("count", allowed, until.count)
            if params.max_tokens == 0:
                raise InvalidRequest(
                    f"prompt {number}: until needs max_tokens of at least 1, got 0"
                )
        self._is_right = until.is_right
        self._early_stops = EarlyStops[_Judged](
            [params.n for params in each], until.count, until.budget
        )
        self.num_unneeded = 0
        """Samples that are in no reply."""

    def is_over(self, number: int) -> bool:
        """Whether all completions of a prompt are known that may be needed."""
        return self._early_stops.is_over(number)

    def hold_back(self, request: Request) -> Request:
        """Return the request of a prompt, with the samples that may start by now."""
        return replace(request, first_wave=self._early_stops.below[int(request.id)])

    def add(self, completion: Completion) -> list[Completion]:
        """Add one that ended; return those now known to be needed."""
        place = completion.prompt, completion.index
        if not self._early_stops.needs(*place):
            return []
        judged = _Judged(completion, bool(self._is_right(completion)))
        certain = self._early_stops.add_sample(*place, judged.matched, judged)
        return [judged.completion for judged in certain]

    def choose_samples(self, steps: SteppedEngine) -> None:
        """End the samples that are known not to be needed, and let others start."""
        for number, end, before in self._early_stops.unneeded():
            steps.stop(str(number), _NO_INDICES, cut=end)
            self.num_unneeded += before - end
        for number, below in self._early_stops.start_more().items():
            steps.scheduler.start_below(str(number), below)


def _is_positive(value: Any) -> bool:
    try:
        return index(value) >= 1 and not isinstance(value, bool)
    except TypeError:
        return False


def _refusal(name: str, allowed: str, value: Any) -> InvalidRequest:
    return InvalidRequest(f"until.{name} must be {allowed}, got {show_value(value)}", "until")
