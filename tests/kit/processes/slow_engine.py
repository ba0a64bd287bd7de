"""`python -m tests.kit.processes.slow_engine`: numpy_engine, slow enough to be caught in the
middle, and saying what it does."""

from __future__ import annotations

import sys
import time

from srm import logs
from tests.kit.engines.numpy_runner import NumpyLaunched, NumpyRunner
from tests.kit.processes.numpy_engine import main


class SlowRunner(NumpyRunner):
    def run_until(self, launched: NumpyLaunched) -> None:
        time.sleep(0.01)
        super().run_until(launched)


if __name__ == "__main__":
    logs.configure("info", "text")
    raise SystemExit(main(sys.argv[1:], SlowRunner))
