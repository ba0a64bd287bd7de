"""`srm loadtest sweep`: one scenario under growing load, to find where the server is full.

Each step is a run of its own, with its recording; `loadtest/commands/knee.py` chooses the next
load. One report is made of all.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from srm.errors import UNDECODABLE, ConfigError, SRMError
from srm.files import open_file
from srm.loadtest.analysis.window import load_name
from srm.loadtest.commands import run_command
from srm.loadtest.commands.knee import (
    Point,
    SweepConfig,
    grows_still,
    knee,
    largest_good,
    next_load,
)
from srm.loadtest.counter_rng import STEP, Draws
from srm.loadtest.report.report_files import MeasuredRun, write_reports
from srm.loadtest.scenario import Scenario, command_of
from srm.settings import build, read_settings

STEPS = "steps"
"""The subfolder of a sweep's recordings."""
SAVED = "sweep.json"


class Saved(msgspec.Struct, frozen=True):
    """The part of sweep.json from which reports are made again."""

    config: SweepConfig
    names: list[str]
    folders: list[str]
    """Folder of each step."""


class Swept(msgspec.Struct, frozen=True):
    """The result of a sweep, saved as sweep.json."""

    config: SweepConfig
    objectives: tuple[str, ...]
    points: list[Point]
    """Measurement of each step, in the order in which they ran."""
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
        name = "Knee so far" if self.knee_may_lie_beyond else "Knee"
        results = [f"{name}: {self.knee:g} {unit}, the smallest load that brings {share}."]
        if self.knee_may_lie_beyond:
            results.append("Throughput still grew at the largest load: the knee may lie beyond.")
        if self.objectives:
            objectives = ", ".join(self.objectives)
            wanted = f"at least {self.config.good_share:.0%} of requests meet {objectives}"
            good = self.largest_good
            upto = "At no load" if good is None else f"Up to {good:g} {unit}"
            results.append(f"{upto} {wanted}.")
        return results


def sweep(argv: list[str], command: str) -> int:
    """Measure, print and report; return the exit code. An error keeps the steps before it."""
    settings = (Scenario, SweepConfig)
    about = "Load a server more and more, until it is full."
    given = read_settings(settings, argv, command_of("sweep", about, "--url http://127.0.0.1:8000"))
    scenario, config = build(Scenario, given), build(SweepConfig, given)
    run_command.check(scenario)
    scenario, command = run_command.seeded(scenario, command)
    runs: list[MeasuredRun] = []
    folders: list[str] = []
    failure: SRMError | None = None
    interrupted, by_objectives = False, bool(scenario.objectives)
    try:
        while (load := next_load(_points(runs), config, by_objectives)) is not None:
            step = step_of(config, scenario, load, len(folders))
            before = sum(load_of(run) == load for run in runs)
            name = load_name(step) + (f" #{before + 1}" if before else "")
            folder = f"{len(folders) + 1:03}-{re.sub(r'[^0-9a-z.]+', '-', name)}"
            recording = run_command.record(step, command, scenario.output / STEPS / folder, name)
            if interrupted := recording.about.stopped_by == "interrupt":
                break
            folders.append(folder)
            runs.append(run_command.summed_up(recording, name))
            show_step(runs[-1])
    except SRMError as error:
        failure = error
    except KeyboardInterrupt:  # between two steps
        interrupted = True
    if not runs:
        raise failure or ConfigError("interrupted before the first step was over: no report")
    outcome = swept(config, runs)
    names = [run.summary.name for run in runs]
    content = msgspec.to_builtins(outcome) | {"names": names, "folders": folders[: len(runs)]}
    (scenario.output / SAVED).write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    code = report_sweep(scenario.output, runs, outcome)
    if failure is not None:
        raise failure
    return run_command.INTERRUPTED if interrupted else code


def step_of(config: SweepConfig, scenario: Scenario, load: float, number: int) -> Scenario:
    """Return the scenario under this load, with a seed of its own for the step of this number.

    If two steps sent the same prompts, the later one would measure the server's prefix cache.
    """
    (seed,) = Draws(scenario.seed or 0).raw(STEP, number, 1)
    times = {
        "warmup_s": scenario.warmup_s + config.settle_s,
        "duration_s": scenario.duration_s and scenario.duration_s + config.settle_s,
    }
    if config.sweep == "concurrency":
        changed = {"arrivals": "concurrent", "concurrency": int(load)}
    else:
        is_constant = scenario.arrivals == "constant"
        changed = {"arrivals": "constant" if is_constant else "poisson", "rate": load}
    without = {"rate_end": 0.0, "trace": None, "seed": int(seed) >> 32}
    return msgspec.structs.replace(scenario, **times, **changed, **without)


def load_of(run: MeasuredRun) -> float:
    """Return the load of one step."""
    scenario = run.recording.about.scenario
    return scenario.rate if scenario.open_loop else float(scenario.concurrency)


def _points(runs: list[MeasuredRun]) -> list[Point]:
    """Return the numbers of the steps that decide the search."""
    return [
        Point(
            load_of(run),
            run.summary.output_tokens_per_s or run.summary.completed_per_s,
            run.summary.good_share,
        )
        for run in runs
    ]


def swept(config: SweepConfig, runs: list[MeasuredRun]) -> Swept:
    """Return the result of these steps, at least one."""
    objectives = runs[0].recording.about.scenario.objectives
    points = _points(runs)
    return Swept(
        config=config,
        objectives=objectives,
        points=points,
        knee=knee(points, config.knee_share),
        knee_may_lie_beyond=grows_still(points),
        largest_good=largest_good(points, config.good_share) if objectives else None,
    )


def show_step(run: MeasuredRun) -> None:
    """Print a step at once, flushed for readers of a pipe."""
    sys.stdout.write(run_command.step_outcome(run) + "\n")
    sys.stdout.flush()


def report_sweep(folder: Path, runs: list[MeasuredRun], outcome: Swept) -> int:
    """Print the result and write the report; return the exit code.

    Conditions of `fail_if` apply to the knee, since beyond it a server may be arbitrarily slow.
    """
    at_knee = [run for run in runs if load_of(run) == outcome.knee][-1:]
    sys.stdout.write("".join(f"{sentence}\n" for sentence in outcome.sentences()))
    for run in at_knee:
        sys.stdout.write(
            "".join(f"warning at the knee: {text}\n" for text in run.warnings)
            + "".join(f"FAILED at the knee: {text}\n" for text in run_command.failed(run))
        )
    write_reports(
        folder,
        sorted(runs, key=load_of),
        at_knee[0].summary.name if at_knee else None,
        knee_may_lie_beyond=outcome.knee_may_lie_beyond,
        outcome=outcome.sentences(),
    )
    sys.stdout.write(run_command.where(folder))
    return run_command.exit_code(at_knee)


def read_saved(folder: Path) -> Saved:
    """Read a sweep's sweep.json. Raises ConfigError for a folder that no sweep wrote."""
    try:
        with open_file(folder / SAVED) as file:
            return msgspec.json.decode(file.read(), type=Saved)
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(f"cannot read the sweep in {folder}: {error}") from None
