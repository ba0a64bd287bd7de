"""Goodput: the requests that meet the objectives of their scenario. Knows no windows."""

from __future__ import annotations

import numpy as np

from engine.errors import ConfigError
from loadtest.analysis.chunks import Chunks
from loadtest.analysis.measures import (
    Flags,
    Rows,
    Times,
    first_tokens,
    mean_itl,
    since_planned,
    worst_tpot,
)
from loadtest.objectives import NEED_STREAMS, parse
from loadtest.recording import Recording


def good_requests(recording: Recording, parts: Chunks) -> Flags:
    """[requests] Whether each meets all objectives, regardless of how it ended.

    A request without a first token does not meet an objective of TTFT; one without a second token
    cannot fail those of TPOT and ITL. Raises ConfigError for an objective that needs a stream if
    there is none.
    """
    requests, scenario = recording.requests, recording.about.scenario
    good = np.ones(len(requests), bool)
    for objective in [parse(text) for text in scenario.objectives]:
        if objective.name in NEED_STREAMS and not scenario.stream:
            raise ConfigError(f"objective {objective.text!r} cannot be judged without `stream`")
        times = _per_request(objective.name, requests, parts)
        met = objective.holds(times)
        good &= met | (np.isnan(times) & (objective.name in {"tpot", "itl"}))
    return good


def _per_request(measure: str, requests: Rows, parts: Chunks) -> Times:
    """[requests] The values that an objective compares."""
    if measure == "ttft":
        return since_planned(requests, first_tokens(requests, parts))
    if measure == "tpot":
        return worst_tpot(requests, parts)
    if measure == "itl":
        return mean_itl(requests, parts)
    return since_planned(requests, requests["ended"])
