"""`python -m tests.kit.ptx.compile_steps`: step graphs of 8 and of 16 layers compiled for a GPU.

Takes the settings of `engine.device.precompile`, but for the number of layers; bfloat16 unless it
says `--dtype float8`. Both are one module: they have the same kernels, which take the time, so the
second costs next to nothing.
"""

from __future__ import annotations

import logging
import sys

import msgspec
from max.engine import InferenceSession
from max.graph import Module

from srm.engine.config import AUTO_DTYPES
from srm.engine.device.graph_cache import Built, GraphCache
from srm.engine.device.linear import graph_dtype
from srm.engine.device.model import build_step_graph, graph_shape
from srm.engine.device.precompile import PrecompileConfig, leave, open_target
from srm.engine.device.products import choose_product
from srm.settings import load

LAYERS = (8, 16)


def main(argv: list[str]) -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    config = load(PrecompileConfig, argv, prog="python -m tests.kit.ptx.compile_steps")
    shapes = [msgspec.structs.replace(config.shape(), num_layers=count) for count in LAYERS]
    device = open_target(config)
    dtype = graph_dtype(AUTO_DTYPES[config.device] if config.dtype == "auto" else config.dtype)
    product = choose_product(config.product, shapes[0], dtype, device)

    def build() -> Built:
        module = Module()
        for shape in shapes:
            scope = f"layers_{shape.num_layers}."
            graph = build_step_graph(shape, dtype, device, scope, module, product)
        return module, graph.kernel_libraries_paths

    key = tuple(graph_shape(shape, dtype, product) for shape in shapes)
    session = InferenceSession(devices=[device])
    GraphCache(session, device, config.output).load("steps", key, build)
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
