"""`srm loadtest offline`: runs the request or the batch, prints and writes its outcome."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from engine.settings import build, read_settings
from loadtest.client.target import PATHS, api_key, base_url, resolve
from loadtest.commands import outcome
from loadtest.commands.offline import Offline, OfflineConfig, of_recording
from loadtest.commands.offline_batch import run_batch
from loadtest.commands.run_command import INTERRUPTED, check, exit_code, record, say, summed_up
from loadtest.report.report_files import write_reports
from loadtest.scenario import SCENARIOS, Scenario
from loadtest.workload.batch_file import BatchClient


def offline(argv: list[str], command: str) -> int:
    """Measure, print and report; return the exit code."""
    settings = (Scenario, OfflineConfig)
    given = read_settings(settings, argv, prog="srm loadtest offline", presets=SCENARIOS)
    scenario, config = build(Scenario, given), build(OfflineConfig, given)
    check(scenario)
    if config.kind == "batch":
        return _batch(scenario, config, command)
    recording = record(config.one_request(scenario), command, scenario.output)
    found = of_recording(config, recording)
    _write(scenario.output, found)
    if recording.about.stopped_by == "interrupt":
        return INTERRUPTED
    run = summed_up(recording, f"{config.samples:,} samples, {config.form}")
    write_reports(scenario.output, [run])
    sys.stdout.write(outcome.where(scenario.output))
    return exit_code([run])


def _batch(scenario: Scenario, config: OfflineConfig, command: str) -> int:
    target = asyncio.run(resolve(scenario))
    scenario = msgspec.structs.replace(scenario, served_model_name=target.model)
    with BatchClient(base_url(scenario), api_key(scenario)) as client:
        try:
            found = run_batch(scenario, config.lines, PATHS[scenario.api], client, command, say)
        except KeyboardInterrupt:
            say("interrupted: the batch was cancelled, nothing is reported")
            return INTERRUPTED
    _write(scenario.output, found)
    return int(found.failed > 0)


def _write(folder: Path, found: Offline) -> None:
    table = outcome.of_offline(found)
    sys.stdout.write(table)
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(found), indent=1)
    (folder / "offline.json").write_bytes(content + b"\n")
    heading = f"# Offline throughput\n\n`{found.command}` on {found.machine}.\n\n"
    (folder / "offline.md").write_text(heading + table)
    say(f"{folder / 'offline.md'}")
