"""`srm loadtest sweep`: one scenario under growing load, to find where the server is full.

Each step is a run of its own, with its recording; `loadtest/analysis/knee.py` chooses the next
load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from loadtest.analysis.knee import Point, Search, grows_still, knee, largest_good, next_load
from loadtest.analysis.window import load_name
from loadtest.report.report_files import Run
from loadtest.scenario import Scenario
from loadtest.summary import Summary


class SweepConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm loadtest sweep`, beside those of a scenario."""

    sweep: Literal["concurrency", "rate"] = "concurrency"
    """What grows from step to step, whatever the scenario says of it: requests under way (a closed
    loop) or requests a second (an open one, poisson unless `arrivals` is constant)."""
    loads: tuple[float, ...] = ()
    """These and no others. Empty: doubled until the server is full, then what lies between."""
    first_load: float = 1.0
    """The load to begin with, where there are no `loads`."""
    max_load: float = 1024.0
    """The load that is not passed, where there are no `loads`."""
    settle_s: float = 2.0
    """Seconds that each step runs before its `warmup_s` and `duration_s` begin."""
    resolution: float = 0.2
    """How near the two loads must be between which the server gets full, as a part of the lower."""
    repeats: int = 3
    """How often the loads that decide are measured. The median counts."""
    knee_share: float = 0.9
    """The knee is the smallest load that brings this share of the most throughput."""
    good_share: float = 0.99
    """With objectives: the share of requests that must meet them."""

    def __post_init__(self) -> None:
        for name in ("first_load", "max_load", "resolution"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("knee_share", "good_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1, got {getattr(self, name)}")
        if not 0 <= self.settle_s < math.inf:
            raise ValueError(f"settle_s must be at least 0, got {self.settle_s}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {self.repeats}")
        if self.first_load > self.max_load:
            raise ValueError(f"first_load must be at most max_load, got {self.first_load}")
        if self.loads:
            self._check_loads("loads", self.loads)
        else:
            self._check_loads("first_load", (self.first_load,))
            self._check_loads("max_load", (self.max_load,))

    def _check_loads(self, name: str, loads: tuple[float, ...]) -> None:
        is_whole = self.sweep == "concurrency"
        for load in loads:
            if not 0 < load < math.inf or (is_whole and not load.is_integer()):
                allowed = "whole numbers of at least 1" if is_whole else "above 0"
                raise ValueError(f"{name} must be {allowed} for a {self.sweep}, got {load}")

    def search(self, scenario: Scenario) -> Search:
        """Return the search for the knee, or with objectives for the largest good load."""
        return Search(
            loads=tuple(sorted(set(self.loads))),
            first=self.first_load,
            most=self.max_load,
            whole=self.sweep == "concurrency",
            resolution=self.resolution,
            repeats=self.repeats,
            by_objectives=bool(scenario.objectives),
            knee_share=self.knee_share,
            good_share=self.good_share,
        )

    def step(self, scenario: Scenario, load: float) -> Scenario:
        """Return the scenario under this load."""
        times = {
            "warmup_s": scenario.warmup_s + self.settle_s,
            "duration_s": scenario.duration_s and scenario.duration_s + self.settle_s,
        }
        if self.sweep == "concurrency":
            changed = {"arrivals": "concurrent", "concurrency": int(load)}
        else:
            is_constant = scenario.arrivals == "constant"
            changed = {"arrivals": "constant" if is_constant else "poisson", "rate": load}
        without = {"rate_end": 0.0, "trace": None}
        return msgspec.structs.replace(scenario, **times, **changed, **without)


class Swept(msgspec.Struct, frozen=True):
    """The result of a sweep, saved as sweep.json."""

    config: SweepConfig
    objectives: tuple[str, ...]
    points: list[Point]
    """One per step, in the order in which they ran."""
    knee: float | None
    """The load at the knee; None: nothing was answered."""
    knee_may_lie_beyond: bool
    """Whether throughput still grew at the largest load."""
    largest_good: float | None
    """The largest load up to which the objectives held; None: no objectives, or never."""

    def sentences(self) -> list[str]:
        """Describe the result for people."""
        unit = "requests under way" if self.config.sweep == "concurrency" else "requests a second"
        if self.knee is None:
            return ["Nothing was answered, so there is no knee."]
        share = f"{self.config.knee_share:.0%} of the most throughput"
        said = [f"Knee: {self.knee:g} {unit}, the smallest load that brings {share}."]
        if self.knee_may_lie_beyond:
            said.append("Throughput still grew at the largest load: the knee may lie beyond.")
        if self.objectives:
            objectives = ", ".join(self.objectives)
            wanted = f"at least {self.config.good_share:.0%} of requests meet {objectives}"
            good = self.largest_good
            none = f"At no load {wanted}."
            said.append(none if good is None else f"Up to {good:g} {unit} {wanted}.")
        return said


def swept(config: SweepConfig, scenario: Scenario, runs: list[Run]) -> Swept:
    """Return the result of these steps, at least one."""
    points = [point(run.summary, load_of(run.recording.about.scenario)) for run in runs]
    good = largest_good(points, config.good_share) if scenario.objectives else None
    return Swept(
        config=config,
        objectives=scenario.objectives,
        points=points,
        knee=knee(points, config.knee_share),
        knee_may_lie_beyond=grows_still(points),
        largest_good=good,
    )


def steps(
    config: SweepConfig, scenario: Scenario, measure: Callable[[Scenario, str], Run | None]
) -> Iterator[Run]:
    """Run one step after the other and yield each when it is over.

    `measure` gets a step's scenario and name, and returns None to end the sweep.
    """
    search, points = config.search(scenario), list[Point]()
    while (load := next_load(points, search)) is not None:
        step = config.step(scenario, load)
        run = measure(step, step_name(step, sum(one.load == load for one in points)))
        if run is None:
            return
        points.append(point(run.summary, load))
        yield run


def step_name(scenario: Scenario, before: int) -> str:
    """Return a name such as `concurrent 16`, or `concurrent 16 #2` if that was measured before."""
    return load_name(scenario) + (f" #{before + 1}" if before else "")


def load_of(scenario: Scenario) -> float:
    """Return the load of one step."""
    return scenario.rate if scenario.open_loop else float(scenario.concurrency)


def point(summary: Summary, load: float) -> Point:
    """Return the numbers of a summary that decide the search."""
    return Point(load, summary.output_tokens_per_s or summary.completed_per_s, summary.good_share)
