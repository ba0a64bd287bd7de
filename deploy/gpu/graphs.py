"""`python -m deploy.gpu.graphs`: lists and compiles every compiled graph of the kit.

Each is compiled in a process of its own, which reports its progress; graphs that exist already, of
this code or made of the same, are kept. A failure does not stop the others; the exit status counts
the failures.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from pathlib import Path

log = logging.getLogger(__name__)

STEP, OPS = "srm.engine.device.precompile", "research.bench.gpu.compile_ops"
GRAPHS = {
    "d 1,024": f"{STEP} --d-model 1024 --dtype bfloat16",
    "d 512": f"{STEP} --d-model 512 --dtype bfloat16",
    "ops of d 1,024": f"{OPS} --d-model 1024 --dtype bfloat16",
    "ops of d 512": f"{OPS} --d-model 512 --dtype bfloat16",
    "every op in float32, for the tests": "tests.kit.ptx.compile_for_gpu",
    "demo": f"{STEP} --model models/demo",
    "countdown": f"{STEP} --model models/countdown",
    "countdown, on tensor cores": f"{STEP} --model models/countdown --product own",
    "d 1,024, float8": f"{STEP} --d-model 1024 --dtype float8",
    "d 512, float8": f"{STEP} --d-model 512 --dtype float8",
    "ops of d 1,024, float8": f"{OPS} --d-model 1024 --dtype float8",
    "ops of d 512, float8": f"{OPS} --d-model 512 --dtype float8",
}
"""By description: the module that compiles the graphs, with its own settings. Models have 8 layers,
as the lists measure them."""


def _steps(*variants: str) -> dict[str, str]:
    """Return the step graphs of both widths and these variants, of which "" is today's."""
    return {
        f"d {width:,}, {names or 'today'}": (
            f"{STEP} --d-model {width} --dtype bfloat16" + f" --variants {names}" * bool(names)
        )
        for width in (512, 1024)
        for names in variants
    }


_PRODUCTS = "--dtype bfloat16 --only up,down,proj_in,proj_out,head"
OF_CALLS = {
    "5": {
        f"products of d {width:,}, {names or 'today'}": (
            f"{OPS} --d-model {width} {_PRODUCTS} --variants={names}"
        )
        for width in (512, 1024)
        for names in ("", "tanh", "ahead", "stores", "clusters", "tanh,ahead,stores")
    },
    "6": _steps("", "mixed")
    | {"d 512, rejection": f"{STEP} --d-model 512 --dtype bfloat16 --variants rejection"},
    "8": _steps("", "pdl"),
    "9": {
        f"{what} of d {width:,}, {names or 'float8'}": (
            f"{module} --d-model {width} --dtype float8" + f" --variants {names}" * bool(names)
        )
        for width in (512, 1024)
        for names in ("", "int8")
        for what, module in (("steps", STEP), ("ops", OPS))
    },
}
"""The same for calls that need other graphs, and are packed alone."""


def main(argv: list[str]) -> int:
    """Compile all graphs and return how many failed."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m deploy.gpu.graphs", allow_abbrev=False)
    parser.add_argument("--output", required=True, type=Path, help="folder for the graphs")
    parser.add_argument("--call", choices=OF_CALLS, help="graphs of this call alone")
    parser.add_argument("--only", action="append", help="one of them; repeatable")
    given = parser.parse_args(argv)
    graphs = OF_CALLS[given.call] if given.call else GRAPHS
    if unknown := {*(given.only or ())} - graphs.keys():
        parser.error(f"there is no {', '.join(unknown)}, but {', '.join(graphs)}")
    missing, failed = _missing(given.output, given.call), 0
    log.info(
        "%d of %d models and sets of ops have their graphs, a file each; slots have another",
        *(len(graphs) - len(missing), len(graphs)),
    )
    wanted = [name for name in given.only or graphs if name in missing]
    for number, name in enumerate(wanted, 1):
        log.info("%d of %d: %s", number, len(wanted), name)
        started = time.monotonic()
        command = [sys.executable, "-m", *graphs[name].split(), "--output", str(given.output)]
        done = subprocess.run(command, check=False).returncode
        failed += done != 0
        log.info("%s: exit %d after %.0f s", name, done, time.monotonic() - started)
    return failed


def _missing(folder: Path, call: str | None) -> set[str]:
    """Return the names of graphs that a folder has not, of this code."""
    command = [sys.executable, "-m", "tests.kit.ptx.kept_graphs", str(folder)]
    command += [call] if call else []
    return {
        *subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
