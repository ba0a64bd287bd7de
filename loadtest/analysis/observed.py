"""Details that a report shows beyond the summary: single values and their times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from loadtest.analysis.chunks import Chunks, chunks
from loadtest.analysis.measures import first_tokens, token_gaps, within
from loadtest.analysis.window import Window
from loadtest.recording import ERRORS, Recording

Times = NDArray[np.float64]


class Values(NamedTuple):
    """Values of one measure in the window, each with its time and number of tokens or replies."""

    time: Times
    value: Times
    weight: Times


@dataclass(frozen=True, eq=False)
class Observed:
    """A recording, its chunks, and derived arrays that all parts of a report share."""

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
        whole = requests["error"] == ERRORS.index("none")
        keep = within(requests["planned"], self.window) & whole & ~np.isnan(ends)
        planned = requests["planned"][keep]
        return Values(planned, ends[keep] - planned, np.ones(len(planned)))

    def ttft(self) -> Values:
        return self.replies(self.first)

    def e2e(self) -> Values:
        return self.replies(self.recording.requests["ended"])

    def itl(self) -> Values:
        """Return the ITLs, by the time at which their tokens were read."""
        parts = self.chunks
        later = parts.later[within(parts.time[parts.later], self.window)]
        _, tokens, itl = token_gaps(parts, self.window)
        return Values(parts.time[later], itl, tokens.astype(np.float64))


def observe(recording: Recording, window: Window) -> Observed:
    """Derive what reports share. Raises ConfigError if the recording's rows are inconsistent."""
    parts, requests = chunks(recording), recording.requests
    last = np.full(len(requests), np.nan)
    np.fmax.at(last, parts.row, parts.time)
    return Observed(recording, window, parts, first_tokens(requests, parts), last)
