"""`srm loadtest`: one run, a sweep, offline throughput; reports of what was saved.

What is shown meanwhile goes to standard error; standard output has the outcome as plain text.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from engine.errors import ConfigError, SRMError
from engine.settings import build, load, read_settings
from loadtest import outcome
from loadtest.compare import compare
from loadtest.offline_command import offline
from loadtest.recording import load as load_recording
from loadtest.reports import write_reports
from loadtest.scenario import SCENARIOS, Scenario, read
from loadtest.steer import check, exit_code, record, say, summed_up
from loadtest.sweep_command import saved_runs, sweep

USAGE = """usage: srm loadtest COMMAND [SCENARIO.toml] [options]

  run       load a server as the scenario says
  sweep     the same under growing load, until the server is full
  offline   one request for very many samples, or a file of requests as a batch
  report    make the reports of a folder again: `srm loadtest report runs/loadtest`
  compare   what differs between two reports: `srm loadtest compare A B`

`srm loadtest COMMAND --help` explains each but the last.
"""


class ReportConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm loadtest report`."""

    folder: Path = Path("runs/loadtest")
    """What a run or a sweep wrote."""
    window: tuple[float, ...] = ()
    """The part of the run to measure: from, to, in seconds since its start. Empty: between warm-up
    and cool-down."""
    objectives: tuple[str, ...] = ()
    """In the place of the scenario's, if there are any."""
    fail_if: tuple[str, ...] = ()
    """In the place of the scenario's, if there are any."""
    output: Path = Path()
    """Where reports are written. Empty: into the folder itself."""
