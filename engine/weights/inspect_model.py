"""`srm inspect`: what a model folder holds and what serving it takes, without running it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from srm.engine.config import BUNDLED_NAMES, FLOAT8_MULTIPLE, EngineConfig, ModelConfig, find_model
from srm.engine.steps.batch import SAMPLING
from srm.engine.weights.checkpoint import read_model
from srm.engine.weights.inspect_constraint import inspect_constraint, read_constraint
from srm.engine.weights.step_bytes import decode_bytes
from srm.engine.weights.tensors import DECAY_RANGE
from srm.errors import ConfigError
from srm.progress import count_seconds
from srm.settings import CommandParser

GB = 10**9
GIB = 2**30
TFLOPS, TB_PER_S = 790.0, 4.3
"""Rates that torch reaches on an H200: bfloat16 matrix products, and a copy within its memory."""
GpuDtype = Literal["bfloat16", "float8"]
FLOAT32 = 4  # bytes of a float32


def inspect_model(folder: Path) -> dict[str, str]:
    """Facts about a model by name. Raises CheckpointError if the folder is not a whole model."""
    files = read_model(folder)
    config, tensors = files.config, files.tensors
    dtypes = Counter(files.dtypes.values())
    decays = [tensors[name].ravel() for name in tensors if name.endswith("decay_value")]
    state = FLOAT32 * config.state_width
    return {
        "variant": _variant(config),
        "layers": str(config.num_layers),
        "d_model": str(config.d_model),
        "context": f"{config.n_ctx:,} tokens",
        "vocabulary": f"{config.vocab_size:,} tokens",
        "parameters": f"{sum(tensor.size for tensor in tensors.values()):,}",
        "stored as": ", ".join(f"{dtype} {count}" for dtype, count in sorted(dtypes.items())),
        "decays": _range(np.concatenate(decays)) if decays else "none",
        "state": f"{state:,} bytes a sequence, in float32",
        "slots": f"{GB // _slot_bytes(config):,} per GB (10^9 bytes)",
        "work": f"{config.flops_per_token:,} FLOP a token",
        "tokenizer": "yes" if (folder / "tokenizer.json").exists() else "no: token ids only",
        "fingerprint": files.fingerprint,
    }


def _slot_bytes(config: ModelConfig) -> int:
    """A slot keeps, besides the state, the last token and how its sequence samples."""
    return FLOAT32 * (config.state_width + 1) + SAMPLING.itemsize


def _variant(config: ModelConfig) -> str:
    parts: list[str] = [config.mixer]
    if not config.is_headless:
        parts.append(f"{config.num_heads} heads")
        parts.append("projections" if config.use_projections else "no projections")
    if config.mixer == "kernel":
        parts.append(f"kernel_size {config.kernel_size}")
    parts.append(f"decay, c = {config.decay_constant}" if config.decay else "no decay")
    if config.combined_row_quirk:
        parts.append("combined_row_quirk")
    return ", ".join(parts)


def _range(decays: np.ndarray) -> str:
    low, high = DECAY_RANGE
    outside = int(((decays < np.float32(low)) | (decays > np.float32(high))).sum())
    clipped = f", {outside} of them used as {low} or {high}" if outside else ""
    return f"{decays.size} from {decays.min():.6g} to {decays.max():.6g}{clipped}"


def on_gpu(
    config: ModelConfig, dtype: GpuDtype, memory_gib: float, tflops: float, tb_per_s: float
) -> dict[str, str]:
    """Count what a GPU with so much memory and these rates holds, and reaches at most.

    One bound is of memory traffic, one of matrix products; a step reaches neither quite. Products
    in float8 count half. Raises ConfigError if the model does not fit, or cannot have the dtype.
    """
    if dtype == "float8" and (misfit := config.misfit(FLOAT8_MULTIPLE)):
        raise ConfigError(f"dtype = float8: {misfit}; use dtype = bfloat16")
    settings = EngineConfig(device="gpu", dtype=dtype)
    slot = _slot_bytes(config)
    rows, _ = settings.step_limits(config)
    moved = decode_bytes(config, settings.compute_dtype, "gpu")
    left = memory_gib * GIB - moved.once - settings.prefix_slots * slot
    slots = int(settings.memory_fraction * left) // slot
    by_memory = tb_per_s * 1e12 / (moved.once / rows + moved.row)
    saved = config.channel_flops_per_token / 2 if dtype == "float8" else 0
    by_products = tflops * 1e12 / (config.flops_per_token - saved)
    if slots < 1:
        raise ConfigError(f"device_memory_gib = {memory_gib:g} does not hold this model")
    return {
        "GPU slots": f"{slots:,} in {memory_gib:g} GiB: {settings.memory_fraction:.0%} of what "
        f"weights and {settings.prefix_slots:,} prefix slots leave",
        "GPU memory": f"{by_memory:,.0f} tok/s at most at {tb_per_s:g} TB/s, "
        f"{moved.row + moved.once // rows:,} bytes a token in steps of {rows:,} rows",
        "GPU products": f"{by_products:,.0f} tok/s at most at {tflops:g} TFLOP/s",
    }


def gpu_memory_gib() -> float:
    """Ask nvidia-smi for the first GPU's memory. Raises ConfigError where it names none."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        return float(output.splitlines()[0]) / 1024
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        raise ConfigError(
            "device_memory_gib must be given where nvidia-smi names no GPU; an H100 has "
            "--device-memory-gib 79, an H200 139"
        ) from None


def main(argv: list[str]) -> int:
    given = inspect_parser().parse_args(argv)
    if given.strict and given.schema is None:
        raise ConfigError("strict needs schema")
    rates = (given.device_memory_gib, given.tflops, given.tb_per_s)
    if given.device == "cpu" and (given.dtype, *rates) != (None,) * 4:
        raise ConfigError("dtype, device_memory_gib, tflops and tb_per_s need device = gpu")
    if any(rate is not None and not 0 < rate < math.inf for rate in rates):
        raise ConfigError("device_memory_gib, tflops and tb_per_s must be above 0")
    given.model = find_model(given.model)
    with count_seconds(f"reading {given.model}"):
        facts = inspect_model(given.model)
        config = read_model(given.model).config
    if given.schema is not None or given.regex is not None:
        constraint = read_constraint(given.schema, given.regex, given.strict)
        facts |= inspect_constraint(given.model, config, constraint)
    if given.device == "gpu":
        memory = given.device_memory_gib or gpu_memory_gib()
        reached = given.tflops or TFLOPS, given.tb_per_s or TB_PER_S
        facts |= on_gpu(config, given.dtype or "bfloat16", memory, *reached)
    for name, value in facts.items():
        sys.stdout.write(f"{name:<12} {value}\n")
    return 0


def inspect_parser() -> CommandParser:
    made = CommandParser(
        prog="srm inspect",
        description="Say what a model is and what serving it takes.",
        epilog="example: srm inspect demo --device gpu --device-memory-gib 79",
        allow_abbrev=False,
    )
    names = f"a model folder, or one of {BUNDLED_NAMES}"
    made.add_argument("model", type=Path, metavar="MODEL", help=names)
    made.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="gpu: count too what one holds and can reach",
    )
    made.add_argument(
        "--dtype", choices=get_args(GpuDtype), help="of the model on the GPU; else bfloat16"
    )
    made.add_argument(
        "--device-memory-gib", type=float, help="of the GPU; else nvidia-smi is asked"
    )
    made.add_argument(
        "--tflops",
        type=float,
        help=f"that it reaches in bfloat16 products; else {TFLOPS:g}, of an H200",
    )
    made.add_argument(
        "--tb-per-s",
        type=float,
        help=f"that its memory reaches; else {TB_PER_S:g}, of an H200 (3.35: an H100's data sheet)",
    )
    asked = made.add_mutually_exclusive_group()
    asked.add_argument(
        "--schema", type=Path, metavar="FILE", help="say how completions are held to a JSON schema"
    )
    asked.add_argument("--regex", help="say how completions are held to a regex")
    made.add_argument(
        "--strict", action="store_true", help="with --schema: objects have no other properties"
    )
    return made
