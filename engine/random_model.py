"""Write a checkpoint of random weights: any size to measure, no meaning.

Weights are scaled so that activations stay of order one through all blocks, as in a trained model;
the mixer's α and decay vary from head to head.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save_file

from engine.batch import F32
from engine.config import ModelConfig


def write_random_model(folder: Path, config: ModelConfig, seed: int = 0) -> None:
    """`config.json` and float32 `model.safetensors` in `folder`, the same for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    save_file(_tensors(config, np.random.default_rng(seed)), folder / "model.safetensors")


def _tensors(config: ModelConfig, rng: np.random.Generator) -> dict[str, F32]:
    width, inner = config.d_model, 4 * config.d_model

    def normal(*shape: int, std: float) -> F32:
        return rng.standard_normal(shape, np.float32) * np.float32(std)

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> dict[str, F32]:
        weight = normal(rows, columns, std=gain / columns**0.5)
        return {f"{name}.weight": weight, f"{name}.bias": normal(rows, std=0.02)}

    def norm(name: str) -> dict[str, F32]:
        weight = np.float32(1) + normal(width, std=0.1)
        return {f"{name}.weight": weight, f"{name}.bias": normal(width, std=0.02)}

    tensors = {
        "input_layer.weight": normal(config.vocab_size, width, std=1.0),
        "output_layer.weight": normal(config.vocab_size, width, std=1 / width**0.5),
    }
    for index in range(config.num_layers):
        block = f"mixer_blocks.{index}."
        mixer = block + "token_mixing_layer."
        tensors |= norm(block + "channel_norm") | norm(block + "token_norm")
        tensors |= linear(block + "channel_mixing_layer.0", inner, width)
        tensors |= linear(block + "channel_mixing_layer.2", width, inner, gain=0.5)
        if config.use_projections:
            tensors |= linear(mixer + "out_proj", width, width, gain=0.5)
        for head in range(config.num_heads):
            if config.use_projections:
                tensors |= linear(f"{mixer}proj_head.{head}", config.head_dim, width)
            scalars = f"{mixer}mixer_heads.{head}."
            tensors[scalars + "weight"] = normal(1, config.n_ctx, std=(2 / config.n_ctx) ** 0.5)
            tensors[scalars + "bias"] = normal(config.n_ctx, std=0.02)
            if config.decay:
                tensors[scalars + "decay_value"] = rng.uniform(0.88, 1.02, 1).astype(np.float32)
    return tensors
