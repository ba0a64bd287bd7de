"""The window of a run that is measured, and the name of its load."""

from __future__ import annotations

import math

from srm.errors import ConfigError
from srm.loadtest.recording import Recording
from srm.loadtest.scenario import Scenario

Window = tuple[float, float]
"""[start, end) in seconds since the start of the run."""


def default_window(recording: Recording) -> Window:
    """Return the window from the end of warm-up until `cooldown_s` before arrivals end.

    Arrivals end after `duration_s`. If something else ended them: in an open loop they end a mean
    interval after the last one; in a closed loop, whose requests are then a fixed amount of work,
    and where all planned times are equal, they end with the run.
    """
    about = recording.about
    scenario, planned = about.scenario, recording.requests["planned"]
    end = math.nextafter(about.seconds, math.inf)  # includes events at the end of the run
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
    """Return a name such as `poisson 40/s` or `concurrent 16`."""
    loads = {
        "synchronous": "synchronous",
        "concurrent": f"concurrent {scenario.concurrency}",
        "constant": f"constant {scenario.rate:g}/s",
        "poisson": f"poisson {scenario.rate:g}/s",
        "ramp": f"ramp {scenario.rate:g} to {scenario.rate_end:g}/s",
        "trace": f"trace {scenario.trace.name if scenario.trace else ''}",
    }
    return loads[scenario.arrivals]
