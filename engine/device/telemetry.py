"""MAX's telemetry and crash reports, turned off: no process of ours reports to anybody, as
`tests/conformance/test_no_connections.py` sees."""

from __future__ import annotations

import os

SWITCHES = ("MODULAR_TELEMETRY_ENABLED", "MODULAR_CRASH_REPORTING_ENABLED")
"""Variables of the environment that MAX's library reads when its first session begins."""


def turn_off_telemetry() -> None:
    """Call this before the first MAX session of a process: there the library would look up a host
    by name and send it what was run. Whoever wants reports is overruled."""
    for name in SWITCHES:
        os.environ[name] = "0"
