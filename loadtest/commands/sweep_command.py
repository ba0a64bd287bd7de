"""`srm loadtest sweep`: runs the steps in turn, each with its recording, and writes one report."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from engine.errors import UNDECODABLE, ConfigError, SRMError
from engine.settings import build, read_settings
from loadtest.commands import outcome
from loadtest.commands.run_command import INTERRUPTED, check, exit_code, failed, record, summed_up
from loadtest.commands.sweep import SweepConfig, Swept, load_of, steps, swept
from loadtest.report.report_files import Run, write_reports
from loadtest.scenario import SCENARIOS, Scenario

STEPS = "steps"
"""The subfolder of a sweep's recordings."""
SAVED = "sweep.json"


class Saved(msgspec.Struct, frozen=True):
    """The part of sweep.json from which reports are made again."""

    config: SweepConfig
    names: list[str]
    folders: list[str]
    """One per step."""


def sweep(argv: list[str], command: str) -> int:
    """Measure, print and report; return the exit code. An error keeps the steps before it."""
    settings = (Scenario, SweepConfig)
    given = read_settings(settings, argv, prog="srm loadtest sweep", presets=SCENARIOS)
    scenario, config = build(Scenario, given), build(SweepConfig, given)
    check(scenario)
    runs: list[Run] = []
    folders: list[str] = []
    interrupted = False

    def measure(step: Scenario, name: str) -> Run | None:
        nonlocal interrupted
        folder = f"{len(folders) + 1:03}-{re.sub(r'[^0-9a-z.]+', '-', name)}"
        recording = record(step, command, scenario.output / STEPS / folder, name)
        interrupted = recording.about.stopped_by == "interrupt"
        folders.append(folder)
        return None if interrupted else summed_up(recording, name)

    failure: SRMError | None = None
    try:
        for run in steps(config, scenario, measure):
            runs.append(run)
            show_step(run)
    except SRMError as error:
        failure = error
    except KeyboardInterrupt:  # between two steps
        interrupted = True
    if not runs:
        raise failure or ConfigError("interrupted before the first step was over: no report")
    found = swept(config, scenario, runs)
    names = [run.summary.name for run in runs]
    content = msgspec.to_builtins(found) | {"names": names, "folders": folders[: len(runs)]}
    (scenario.output / SAVED).write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
    code = report_sweep(scenario.output, runs, found)
    if failure is not None:
        raise failure
    return INTERRUPTED if interrupted else code


def show_step(run: Run) -> None:
    """Print a step at once, flushed for readers of a pipe."""
    sys.stdout.write(outcome.of_step(run) + "\n")
    sys.stdout.flush()


def report_sweep(folder: Path, runs: list[Run], found: Swept) -> int:
    """Print the result and write the report; return the exit code.

    Conditions of `fail_if` apply to the knee, since beyond it a server may be arbitrarily slow.
    """
    at_knee = [run for run in runs if load_of(run.recording.about.scenario) == found.knee]
    at_knee = at_knee[-1:]
    sys.stdout.write("".join(f"{sentence}\n" for sentence in found.sentences()))
    for run in at_knee:
        sys.stdout.write("".join(f"FAILED at the knee: {one}\n" for one in failed(run)))
    in_order = sorted(runs, key=lambda run: load_of(run.recording.about.scenario))
    write_reports(folder, in_order, at_knee[0].summary.name if at_knee else None)
    sys.stdout.write(outcome.where(folder))
    return exit_code(at_knee)


def read_saved(folder: Path) -> Saved:
    """Read a sweep's sweep.json. Raises ConfigError for a folder that no sweep wrote."""
    try:
        return msgspec.json.decode((folder / SAVED).read_bytes(), type=Saved)
    except (OSError, *UNDECODABLE) as error:
        raise ConfigError(f"cannot read the sweep in {folder}: {error}") from None
