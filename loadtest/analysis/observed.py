"""A recording with what all measures of it share, and single values with their times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from srm.loadtest.analysis.chunks import Chunks, chunks
from srm.loadtest.analysis.measures import first_tokens, is_whole, token_gaps, within
from srm.loadtest.analysis.window import Window
from srm.loadtest.recording import Recording, Times


class Values(NamedTuple):
    """Values of one measure in the window, each with its time and number of tokens or replies."""

    time: Times
    value: Times
    weight: Times


@dataclass(frozen=True, eq=False)
class Observed:
    """A recording, the window of it that is measured, its chunks, and arrays derived of these."""

    recording: Recording
    window: Window
    chunks: Chunks
    first: Times
    """[requests] When the first token was read; NaN: never."""
    last: Times
    """[requests] When the last token was read; NaN: never."""

    def replies(self, ends: Times) -> Values:
        """Return times from planned to `ends`, of the whole replies planned in the window."""
        requests = self.recording.requests
        keep = within(requests["planned"], self.window) & is_whole(requests) & ~np.isnan(ends)
        planned = requests["planned"][keep]
        return Values(planned, ends[keep] - planned, np.ones(len(planned)))

    def ttft(self) -> Values:
        return self.replies(self.first)

    def e2e(self) -> Values:
        return self.replies(self.recording.requests["ended"])

    def itl(self) -> Values:
        """Return the ITLs, by the time at which their tokens were read."""
        times, _, tokens, itl = token_gaps(self.chunks, self.window)
        return Values(times, itl, tokens.astype(np.float64))


def observe(recording: Recording, window: Window) -> Observed:
    """Derive what measures share. Raises ConfigError if the recording's rows are inconsistent."""
    parts, requests = chunks(recording), recording.requests
    last = np.full(len(requests), np.nan)
    np.fmax.at(last, parts.row, parts.time)
    return Observed(recording, window, parts, first_tokens(requests, parts), last)
