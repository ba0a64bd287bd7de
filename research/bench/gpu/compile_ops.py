"""`python -m research.bench.gpu.compile_ops`: the graphs of `research.bench.engine.ops`, for a GPU
that is not here.

Takes the settings of `engine.device.precompile`.
"""

from __future__ import annotations

import logging
import sys

from max.engine import InferenceSession
from max.graph import DeviceRef

from research.bench.engine.ops import Variant, build_ops, load_ops
from srm.engine.config import AUTO_DTYPES
from srm.engine.device.graph_cache import GraphCache
from srm.engine.device.linear import graph_dtype
from srm.engine.device.precompile import PrecompileConfig, leave, open_target
from srm.engine.device.products import choose_product, choose_variants
from srm.settings import load


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = load(PrecompileConfig, argv, prog="python -m research.bench.gpu.compile_ops")
    model, device = config.shape(), open_target(config)
    dtype = graph_dtype(AUTO_DTYPES[config.device] if config.dtype == "auto" else config.dtype)
    by = choose_product(config.product, model, dtype, device)
    variants = choose_variants(config.variants, by, model, dtype)
    variant = Variant(model, dtype, by, True, variants)
    ops = build_ops(variant, DeviceRef.from_device(device))
    cache = GraphCache(InferenceSession(devices=[device]), device, config.output)
    load_ops(cache, ops, variant)
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
