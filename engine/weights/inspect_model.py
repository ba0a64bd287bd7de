"""`srm inspect`: what a model folder holds and what serving it takes, without running it."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from engine.config import ModelConfig
from engine.weights.checkpoint import read_model
from engine.weights.tensors import DECAY_RANGE

GB = 10**9
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
        # A slot keeps the last token besides the state.
        "slots": f"{GB // (state + FLOAT32):,} per GB (10^9 bytes)",
        "work": f"{config.flops_per_token:,} FLOP a token",
        "tokenizer": "yes" if (folder / "tokenizer.json").exists() else "no: token ids only",
        "fingerprint": files.fingerprint,
    }


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


def main(argv: list[str]) -> int:
    made = argparse.ArgumentParser(
        prog="srm inspect", description="Say what a model is and what serving it takes."
    )
    made.add_argument("model", type=Path, metavar="MODEL", help="a model folder")
    folder: Path = made.parse_args(argv).model
    for name, value in inspect_model(folder).items():
        sys.stdout.write(f"{name:<12} {value}\n")
    return 0
