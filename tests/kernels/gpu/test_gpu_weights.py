"""An engine can start on a GPU: weights are bound as its graphs declare them. Shown without a GPU.

The graphs are built for a virtual GPU, which a process cannot take back: the test runs this file as
a process of its own, which prints as JSON which graphs were looked at ("compared"), and which
weights are bound in another way than their graph declares ("wrong").
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import pytest
from max.driver import Device
from max.dtype import DType

from srm import engine
from srm.engine.config import Mixer, ModelConfig
from srm.engine.device.model import build_logits_graph, build_step_graph
from srm.engine.device.precompile import PrecompileConfig, leave, open_target
from srm.engine.device.products import FLOAT8, NO_VARIANTS, Product, Variants, choose_product
from srm.engine.device.runner import host_weights
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import fold
from tests.kit.engines import numpy_runner
from tests.kit.kept import keep_compiled
from tests.kit.models import variants

SOURCES = [Path(str(module.__file__)) for module in (numpy_runner, variants)]
"""What decides the report, beside this file and the engine."""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.kernels.gpu.test_gpu_weights"]

    def run() -> bytes:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout

    sources = [Path(__file__), *SOURCES, *Path(engine.__path__[0]).rglob("*.py")]
    document: dict[str, Any] = json.loads(keep_compiled("gpu_weights", sources, (), run))
    return document


def test_weights_are_bound_as_a_gpu_graph_declares_them(report: dict[str, Any]) -> None:
    mixers = {graph.split()[1] for graph in report["compared"]}
    assert mixers == set(get_args(Mixer)) and len(report["compared"]) >= 4 * len(mixers)
    assert not report["wrong"]
    assert "build_step_graph mixed True float8_e4m3fn own" in report["compared"]
    assert "build_step_graph mixed True float8_e4m3fn own int8" in report["compared"]


class _Gpu:
    """A GPU that nothing can be put on; a virtual one leaves on the host what is put on it."""

    is_host = False


BUILDERS = (build_step_graph, build_logits_graph)
OWN: Product = "own"
KINDS: tuple[tuple[DType, Product, Variants], ...] = (
    (DType.float32, "plain", NO_VARIANTS),
    (DType.bfloat16, "plain", NO_VARIANTS),
    (DType.bfloat16, OWN, NO_VARIANTS),
)
FLOAT8_KINDS = [(FLOAT8, OWN, NO_VARIANTS), (FLOAT8, OWN, frozenset({"int8"}))]


FLOAT8_MODELS = [
    ModelConfig(
        d_model=512, num_layers=2, num_heads=2, n_ctx=8, vocab_size=256, use_projections=projected
    )
    for projected in (True, False)
]


def models() -> Iterator[ModelConfig]:
    """One of every mixer, with and without projections where it may be; of widths that our own
    product can be for."""
    wide = msgspec.structs.replace(numpy_runner.TINY, d_model=256, vocab_size=256)
    for mixer in get_args(Mixer):
        for projected in (False, True):
            heads, taps = 1 if mixer in variants.HEADLESS else 2, 3 if mixer == "kernel" else 1
            changes = {"num_heads": heads, "use_projections": projected, "kernel_size": taps}
            changes["decay"] = False  # the same graph as with decay, and allowed for every mixer
            try:
                yield msgspec.structs.replace(wide, mixer=mixer, **changes)
            except ValueError:
                continue  # not one that there can be


def main() -> None:
    device = open_target(PrecompileConfig())
    compared, wrong = [], []
    for model in [*models(), *FLOAT8_MODELS]:
        weights = fold(model, random_tensors(model, 0), "")
        for dtype, product, names in FLOAT8_KINDS if model in FLOAT8_MODELS else KINDS:
            host = host_weights(weights, dtype, cast(Device, _Gpu()), product, names)
            bound = {
                name: (f"{buffer.device.label}:{buffer.device.id}", buffer.dtype, buffer.shape)
                for name, buffer in host.items()
            }
            # The graph that gives logits has the weights of the step's.
            for build in BUILDERS if dtype == DType.float32 else BUILDERS[:1]:
                choose_product(product, model, dtype, device)  # refuses what cannot be
                what = [dtype.name, product, *names]
                how: dict[str, Any] = {"product": product} | ({"variants": names} if names else {})
                graph = " ".join([build.__name__, model.mixer, str(model.use_projections), *what])
                declared = {
                    name: (str(w.value.device), w.value.dtype, tuple(map(int, w.value.shape)))
                    for name, w in build(model, dtype, device, **how)._weights.items()
                }
                compared.append(graph)
                wrong += [
                    f"{graph}: {name} is bound as {bound.get(name)}, not {declared.get(name)}"
                    for name in sorted(bound.keys() | declared.keys())
                    if bound.get(name) != declared.get(name)
                ]
    print(json.dumps({"compared": compared, "wrong": wrong}))


if __name__ == "__main__":
    main()
    leave(0)
