"""`python -m tests.tools.replays_on_fake_driver OPTIONS`: `srm bench replays` on the fake driver.

The card computes nothing, so a step costs what the host spends on it. The record's machine is "the
fake driver".
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.kit.fake_driver.driver import FakeDriver, build
from tests.kit.serving import ROOT


def main() -> int:
    """Run it with these options; return its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        driver = FakeDriver(build(Path(folder)))
        named = Path(folder, "nvidia-smi")
        named.write_text("#!/bin/sh\necho 'the fake driver, whose card computes nothing'\n")
        named.chmod(0o755)
        path = f"{folder}:{os.environ['PATH']}"
        command = [sys.executable, "-m", "srm", "bench", "replays", *sys.argv[1:]]
        environment = os.environ | driver.environment() | {"PATH": path}
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
