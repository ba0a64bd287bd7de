"""`python -m deploy.gpu.graphs`: lists and compiles every compiled graph of the kit.

Each is compiled in a process of its own, which reports its progress; graphs that exist already are
kept. A failure does not stop the others; the exit status counts the failures.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from pathlib import Path

log = logging.getLogger(__name__)

STEP, OPS = "engine.device.precompile", "bench.gpu.compile_ops"
GRAPHS = {
    "d 1,024": f"{STEP} --d-model 1024",
    "d 512": f"{STEP} --d-model 512",
    "ops of d 1,024": f"{OPS} --d-model 1024",
    "ops of d 512": f"{OPS} --d-model 512",
    "d 1,024, MAX's products": f"{STEP} --d-model 1024 --product max",
    "d 512, MAX's products": f"{STEP} --d-model 512 --product max",
    "ops of d 1,024, MAX's products": f"{OPS} --d-model 1024 --product max",
    "ops of d 512, MAX's products": f"{OPS} --d-model 512 --product max",
    "every op in float32, for the tests": "tests.kernels.compile_for_gpu",
}
"""By description: the module that compiles the graphs, with its own settings: models of 8 layers in
bfloat16, as `deploy.gpu.calls` measures them."""


def main(argv: list[str]) -> int:
    """Compile all graphs and return how many failed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu.graphs", allow_abbrev=False)
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="what for")
    parser.add_argument("--output", required=True, type=Path, help="folder for the graphs")
    parser.add_argument("--only", choices=GRAPHS, action="append", help="one of them; repeatable")
    given = parser.parse_args(argv)
    wanted, failed = given.only or list(GRAPHS), 0
    for number, name in enumerate(wanted, 1):
        log.info("%d of %d: %s", number, len(wanted), name)
        settings = ["--device", given.device, "--dtype", "bfloat16", "--output", str(given.output)]
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", *GRAPHS[name].split(), *settings], check=False
        ).returncode
        failed += done != 0
        log.info("%s: exit %d after %.0f s", name, done, time.monotonic() - started)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
