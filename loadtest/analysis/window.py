"""Which part of a run is measured, and what its load is called."""

from __future__ import annotations

import math

from engine.errors import ConfigError
from loadtest.recording import Recording
from loadtest.scenario import Scenario

Window = tuple[float, float]
"""[start, end) in seconds since the start of the run."""


def default_window(recording: Recording) -> Window:
    """From the end of warm-up until `cooldown_s` before arrivals end.

    Arrivals end after `duration_s`. Where something else ended them: in an open loop a mean
    interval after the last one; in a closed loop, whose requests are then an amount of work, and
    where there is only one time to go by, with the run.
    """
    about = recording.about
    scenario, planned = about.scenario, recording.requests["planned"]
    end = math.nextafter(about.seconds, math.inf)  # what ends with the run is in it
    if about.stopped_by == "duration":
        end = scenario.duration_s
    elif scenario.open_loop and len(planned) and planned.max() > planned.min():
        interval = (planned.max() - planned.min()) / (len(planned) - 1)
        end = min(end, float(planned.max() + interval))
    return checked_window((scenario.warmup_s, end - scenario.cooldown_s))


def checked_window(window: Window) -> Window:
    if not 0 <= window[0] < window[1] < math.inf:
        raise ConfigError(
            f"nothing is measured from {window[0]} s to {window[1]} s of the run:"
            " warm-up and cool-down leave nothing of it"
        )
    return window


def load_name(scenario: Scenario) -> str:
    """Such as `poisson 40/s` or `concurrent 16`."""
    loads = {
        "synchronous": "synchronous",
        "concurrent": f"concurrent {scenario.concurrency}",
        "constant": f"constant {scenario.rate:g}/s",
        "poisson": f"poisson {scenario.rate:g}/s",
        "ramp": f"ramp {scenario.rate:g} to {scenario.rate_end:g}/s",
        "trace": f"trace {scenario.trace.name if scenario.trace else ''}",
    }
    return loads[scenario.arrivals]
