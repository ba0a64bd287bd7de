"""`python -m bench.gpu.compile_ops`: the graphs of `bench.gpu.ops`, for a GPU that is not here.

Takes the settings of `engine.device.precompile`.
"""

from __future__ import annotations

import logging
import sys

from max.engine import InferenceSession
from max.graph import DeviceRef

from bench.engine.ops import build_ops, load_ops
from engine.config import AUTO_DTYPES
from engine.device.linear import graph_dtype
from engine.device.precompile import PrecompileConfig, leave, open_target
from engine.device.products import choose_product
from engine.settings import load


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = load(PrecompileConfig, argv, prog="python -m bench.gpu.compile_ops")
    model, device = config.shape(), open_target(config)
    dtype = graph_dtype(AUTO_DTYPES[config.device] if config.dtype == "auto" else config.dtype)
    by = choose_product(config.product, model, dtype, device)
    ops = build_ops(model, dtype, DeviceRef.from_device(device), by, bound=True)
    session = InferenceSession(devices=[device])
    load_ops(session, ops, model, dtype, device, config.output, by, bound=True)
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
