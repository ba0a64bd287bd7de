"""Write a checkpoint of random weights: any size and mixer, to test and measure; no meaning.

Weights are scaled so that activations stay of order one through all blocks, as in a trained model;
the mixer's α and decay vary from head to head, and some decays lie outside the range they are
clipped to.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from srm.engine.config import ModelConfig
from srm.engine.steps.batch import F32
from srm.engine.weights.tensors import is_scalar, tensor_shapes


def write_random_model(folder: Path, config: ModelConfig, seed: int = 0) -> None:
    """Write `config.json` and float32 `model.safetensors`, the same for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    save_file(random_tensors(config, seed), folder / "model.safetensors")


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, F32]:
    """Make the tensors of such a model, under their names in a checkpoint."""
    rng = np.random.default_rng(seed)
    return {name: _values(name, shape, rng) for name, shape in tensor_shapes(config).items()}


def _values(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> F32:
    if name.endswith("decay_value"):
        return rng.uniform(0.88, 1.02, shape).astype(np.float32)
    normal = rng.standard_normal(shape, np.float32)
    if name.endswith("diag_weight") or name == "input_layer.weight":
        return normal
    if name.endswith("norm.weight"):
        return np.float32(1) + np.float32(0.1) * normal
    if name.endswith("bias"):
        return np.float32(0.02) * normal
    if name.endswith(("out_proj.weight", "channel_mixing_layer.2.weight")):
        gain = 0.5  # these are added to the residual
    elif is_scalar(name):
        gain = 2**0.5
    else:
        gain = 1.0
    return np.float32(gain / shape[-1] ** 0.5) * normal
