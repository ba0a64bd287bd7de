"""`python -m tests.kit.ptx.compile_for_gpu`: every op compiled for a GPU, on a machine without one.

Takes the settings of `engine.device.precompile`, which compiles the step graph of one model; here
is every op in float32.
"""

from __future__ import annotations

import logging
import sys

from max.engine import InferenceSession

from srm.engine.device.precompile import PrecompileConfig, leave, open_target
from srm.settings import load
from tests.kernels.harness import compile_ops


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = load(PrecompileConfig, argv, prog="python -m tests.kit.ptx.compile_for_gpu")
    device = open_target(config)
    compile_ops(InferenceSession(devices=[device]), device, config.output)
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
