"""`srm loadtest`: one run, a sweep, offline throughput; reports of saved runs.

Progress goes to standard error; standard output has the outcome as plain text.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec

from srm.errors import ConfigError, SRMError
from srm.loadtest.commands import run_command
from srm.loadtest.commands.offline import offline
from srm.loadtest.commands.sweep import (
    SAVED,
    STEPS,
    read_saved,
    report_sweep,
    show_step,
    sweep,
    swept,
)
from srm.loadtest.recording import Recording, load
from srm.loadtest.report import compare_report
from srm.loadtest.report.compare import compare
from srm.loadtest.report.report_files import MeasuredRun, write_reports
from srm.loadtest.scenario import command_of, read
from srm.settings import Command, build, read_settings

USAGE = """usage: srm loadtest COMMAND [options]

  run       load a server as a scenario says: `srm loadtest run [SCENARIO.toml]`
  sweep     the same under growing load, until the server is full
  offline   one request for very many samples, or a file of requests as a batch
  report    make the reports of a folder again: `srm loadtest report FOLDER`
  compare   what differs between two reports: `srm loadtest compare A B`

example:
  srm loadtest run --concurrency 8 --url http://127.0.0.1:8000

`srm loadtest COMMAND --help` explains each.
"""
COMPARE_USAGE = """usage: srm loadtest compare A B [OUTPUT]

Print what differs between the reports in the folders A and B, steps of sweeps by name, and whether
it is more than chance. With OUTPUT, write compare.md and compare.html into that folder as well.

example:
  srm loadtest compare runs/before runs/after
"""


RUN = command_of(
    "run",
    "Load any OpenAI-compatible server as a scenario says, and write a report.",
    "--arrivals poisson --rate 20 --url http://127.0.0.1:8000",
)


class ReportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm loadtest report`."""

    folder: Path = Path("runs/loadtest")
    """Folder that a run or a sweep wrote."""
    window: tuple[float, ...] = ()
    """Window to measure, as from,to in seconds since the start; empty: as the scenario says."""
    objectives: tuple[str, ...] = ()
    """Objectives in place of those of the scenario; empty: those of the scenario."""
    fail_if: tuple[str, ...] = ()
    """Conditions in place of those of the scenario; empty: those of the scenario."""
    output: Path | None = None
    """Folder that reports are written to; None: `folder`."""

    def __post_init__(self) -> None:
        if self.window and (len(self.window) != 2 or not 0 <= self.window[0] < self.window[1]):
            raise ValueError(f"window must be two numbers, the first less, got {self.window}")


def main(argv: list[str]) -> int:
    """Run one command and return its exit code. Raises SRMError."""
    try:
        return _command(argv)
    except KeyboardInterrupt:  # before or after a run, which ends in order by itself
        run_command.say("interrupted")
        return run_command.INTERRUPTED


def _command(argv: list[str]) -> int:
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if not {"--help", "-h", "help"} & {name, *rest}:
        _need_packages()
    if name in (measure := {"run": _run, "sweep": sweep, "offline": offline}):
        return measure[name](rest, " ".join(["srm loadtest", *argv]))
    if name in (show := {"report": _report, "compare": _compare}):
        return show[name](rest)
    if name in {"--help", "-h", "help"}:
        sys.stdout.write(USAGE)
        return 0
    raise ConfigError(f"srm loadtest knows run, sweep, offline, report and compare, got {name!r}")


def _need_packages() -> None:
    if missing := [name for name in ("hdrh", "matplotlib") if find_spec(name) is None]:
        raise ConfigError(
            f"load tests need {' and '.join(missing)}: `make load-setup` in a source tree, or "
            "pip install matplotlib hdrhistogram setuptools"
        )


def _run(argv: list[str], command: str) -> int:
    scenario = read(argv, RUN)
    run_command.check(scenario)
    scenario, command = run_command.seeded(scenario, command)
    run = run_command.summed_up(run_command.record(scenario, command, scenario.output))
    _report_to(scenario.output, run)
    is_interrupted = run.recording.about.stopped_by == "interrupt"
    return run_command.INTERRUPTED if is_interrupted else run_command.exit_code([run])


def _report_to(folder: Path, run: MeasuredRun) -> None:
    write_reports(folder, [run])
    sys.stdout.write(run_command.run_outcome(run) + run_command.where(folder))


def _report(argv: list[str]) -> int:
    command = Command(
        "srm loadtest report",
        "Make the reports of a saved run or sweep again.",
        "srm loadtest report runs/loadtest --window 10,40",
        positional="folder",
        variables={"output"},
    )
    config = build(ReportConfig, read_settings((ReportConfig,), argv, command))
    output = config.output or config.folder
    window = (config.window[0], config.window[1]) if config.window else None
    if not (config.folder / SAVED).exists():
        run = run_command.summed_up(_recording(config, config.folder), window=window)
        _report_to(output, run)
        return run_command.exit_code([run])
    saved = read_saved(config.folder)
    runs = [
        run_command.summed_up(_recording(config, config.folder / STEPS / folder), name, window)
        for name, folder in zip(saved.names, saved.folders, strict=True)
    ]
    for run in runs:
        show_step(run)
    return report_sweep(output, runs, swept(saved.config, runs))


def _recording(config: ReportConfig, folder: Path) -> Recording:
    """Load the recording, with the objectives and conditions that the settings ask for."""
    recording = load(folder)
    scenario = recording.about.scenario
    recording.about.scenario = msgspec.structs.replace(
        scenario,
        objectives=config.objectives or scenario.objectives,
        fail_if=config.fail_if or scenario.fail_if,
    )
    run_command.check(recording.about.scenario)
    return recording


def _compare(argv: list[str]) -> int:
    if argv[:1] and argv[0] in {"--help", "-h"}:
        sys.stdout.write(COMPARE_USAGE)
        return 0
    if len(argv) not in {2, 3} or any(argument.startswith("-") for argument in argv):
        got = " ".join(argv) or "nothing"
        raise ConfigError(f"compare takes folders of reports, A B [OUTPUT]; got {got}")
    first, second, *output = map(Path, argv)
    comparison = compare(first, second)
    sys.stdout.write(compare_report.text(comparison))
    for folder in output:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "compare.md").write_text(compare_report.markdown(comparison))
        (folder / "compare.html").write_text(compare_report.html(comparison))
        sys.stdout.write(f"report: {folder / 'compare.html'}\n")
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except SRMError as error:
        run_command.say(f"srm loadtest: {error.message}")
        raise SystemExit(error.exit_code) from None
