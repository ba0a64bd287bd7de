"""`python -m srm.engine.device.precompile`: compile a step graph ahead, for a GPU also where there
is none and with the graphs that copy slots, and run nothing.

For a GPU the graph, Mojo kernels included, is compiled for a virtual device, so a broken GPU path
fails where there is no GPU, and an image can ship the result in its `cache_dir`.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Literal, NoReturn

import msgspec
from max import driver
from max.engine import InferenceSession

from srm.engine.config import (
    AUTO_DTYPES,
    Mixer,
    ModelConfig,
    ProductSetting,
    check_max_logprobs,
)
from srm.engine.device.graph_cache import GraphCache, cache_path
from srm.engine.device.linear import graph_dtype
from srm.engine.device.model import graph_shape
from srm.engine.device.processor import level
from srm.engine.device.products import VariantName, choose_product, choose_variants
from srm.engine.device.telemetry import turn_off_telemetry
from srm.engine.messages import MAX_LOGPROBS
from srm.engine.weights.checkpoint import read_model
from srm.logs import configure_command
from srm.settings import load


class PrecompileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `python -m srm.engine.device.precompile`: the model shape and the device to
    compile for."""

    model: Path | None = None
    """Checkpoint whose shape is compiled; None: the shape given by the settings."""
    d_model: int = 1024
    """Width of the model; num_heads must divide it."""
    num_layers: int = 8
    """Number of blocks of the model."""
    mixer: Mixer = "mixed"
    """Token mixer of the model."""
    num_heads: int = 4
    """Number of heads, which the token mixer must allow; 1 for a model without heads."""
    use_projections: bool = True
    """Whether linear projections stand before and after the heads; never without heads."""
    kernel_size: int = 1
    """Number of neighbouring channels that the mixer "kernel" mixes."""
    n_ctx: int = 512
    """Context of the model, in tokens."""
    vocab_size: int = 8192
    """Entries of the model's vocabulary."""
    max_logprobs: int = MAX_LOGPROBS
    """Most alternatives to a token, as the engine's setting says."""
    device: Literal["gpu", "cpu"] = "gpu"
    """Device to compile for: a GPU, which need not be here, or processors."""
    dtype: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    """Dtype of weights and activations; auto: float32 on a processor, bfloat16 on a GPU."""
    product: ProductSetting = "auto"
    """Matrix product of a GPU, same as the engine's setting of this name."""
    variants: tuple[VariantName, ...] = ()
    """Kernels that benchmarks compare with today's."""
    gpu_arch: str = "sm_90a"
    """Architecture of the GPU, as the CUDA toolchain names it; sm_90a is H100 and H200."""
    host_cpu: str = ""
    """Processor's name in LLVM; empty: this machine's level, or x86-64-v3 beside a GPU."""
    output: Path = Path("build/graphs")
    """Folder that the compiled graph is written to."""

    def __post_init__(self) -> None:
        check_max_logprobs(self.max_logprobs)
        self.shape()

    def shape(self) -> ModelConfig:
        """The shape. Raises ValueError for an impossible one, CheckpointError for a bad model."""
        if self.model is not None:
            return read_model(self.model).config
        return ModelConfig(
            d_model=self.d_model,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            n_ctx=self.n_ctx,
            vocab_size=self.vocab_size,
            use_projections=self.use_projections,
            decay=False,  # the same graph as with decay, and allowed for every mixer
            mixer=self.mixer,
            kernel_size=self.kernel_size,
        )


def virtual_gpu(config: PrecompileConfig) -> driver.Device:
    """Make a GPU to compile for and not to run on; from now on the only one of this process."""
    driver.set_virtual_device_api("cuda")
    driver.set_virtual_device_target_arch(config.gpu_arch)
    driver.set_virtual_device_count(1)
    return driver.Accelerator()


def open_target(config: PrecompileConfig) -> driver.Device:
    """Return the device to compile for."""
    turn_off_telemetry()
    if host_cpu := config.host_cpu or ("x86-64-v3" if config.device == "gpu" else level()):
        driver.set_virtual_cpu_target(host_cpu)
    return virtual_gpu(config) if config.device == "gpu" else driver.CPU()


def precompile(config: PrecompileConfig) -> Path:
    """Compile into `config.output`, unless it is there already; returns the file."""
    shape, device = config.shape(), open_target(config)
    dtype = graph_dtype(AUTO_DTYPES[config.device] if config.dtype == "auto" else config.dtype)
    product = choose_product(config.product, shape, dtype, device)
    cache = GraphCache(InferenceSession(devices=[device]), device, config.output)
    if config.device == "gpu":
        cache.slots()
    most = shape.vocab_size if config.max_logprobs == -1 else config.max_logprobs
    variants = choose_variants(config.variants, product, shape, dtype)
    cache.step(shape, dtype, product, most, variants)
    kind = graph_shape(shape, dtype, product, most, variants)
    return cache_path("step", kind, device, config.output)


def leave(status: int) -> NoReturn:
    """End the process at once: MAX 26.7 may abort while it takes a virtual GPU's compiler down."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(status)


def main(argv: list[str]) -> int:
    configure_command()
    path = precompile(load(PrecompileConfig, argv, prog="python -m srm.engine.device.precompile"))
    logging.info("%s: %.1f MB", path, path.stat().st_size / 1e6)
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
