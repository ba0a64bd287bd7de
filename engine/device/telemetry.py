"""MAX's telemetry and crash reports, turned off: no process of ours reports to anybody.

Knows no MAX. What it does is seen by `tests/conformance/test_no_connections.py`, which lets no
process of a server make an internet socket.
"""

from __future__ import annotations

import os

SWITCHES = ("MODULAR_TELEMETRY_ENABLED", "MODULAR_CRASH_REPORTING_ENABLED")
"""Variables of the environment that MAX's library reads when its first session begins."""


def turn_off_telemetry() -> None:
    """Call this before the first MAX session of a process; whoever wants reports is overruled.

    Left alone, the library looks up a host by name at its first session and sends it what was run.
    """
    for name in SWITCHES:
        os.environ[name] = "0"
