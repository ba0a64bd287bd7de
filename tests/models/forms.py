"""Models of every variant, compiled as one module, each in MAX and in torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from max.dtype import DType

from engine.config import ModelConfig
from engine.steps.batch import F32, I32
from engine.weights.random_model import random_tensors
from engine.weights.weights import fold
from tests.engines.logits_model import LogitsModel, compile_logits
from training.model import SRM

F64 = npt.NDArray[np.float64]

TOLERANCE = 1e-5
"""Of float32 logits and states, relative to the largest."""


def config(**fields: Any) -> ModelConfig:
    shape = {"d_model": 48, "num_layers": 2, "num_heads": 4, "n_ctx": 96, "vocab_size": 101}
    return ModelConfig(**{**shape, **fields})


def headless(**fields: Any) -> ModelConfig:
    return config(num_heads=1, use_projections=False, **fields)


CONFIGS = {
    "mixed": config(d_model=64, num_layers=3),
    "mixed_unprojected": config(num_heads=6, use_projections=False),
    "mixed_undecayed": config(num_heads=2, decay=False, decay_constant=3),
    "parallel": config(mixer="parallel"),
    "parallel_unprojected": config(mixer="parallel", use_projections=False, decay_constant=2),
    "column_heads": config(mixer="column_heads", num_heads=3, decay=False),
    "combined": config(mixer="combined", decay_constant=2),
    "combined_quirk": config(mixer="combined", decay_constant=2, combined_row_quirk=True),
    "row": headless(mixer="row", decay=False),
    "column": headless(mixer="column", decay=False),
    "kernel": headless(mixer="kernel", kernel_size=4, decay_constant=2),
    "kernel_undecayed": headless(mixer="kernel", kernel_size=7, decay=False, d_model=35),
    "diagonal": config(mixer="diagonal"),
    "diagonal_undecayed": config(mixer="diagonal", decay=False),
    "expanded": headless(mixer="expanded", decay=False),
    "expanded_heads": config(mixer="expanded", decay=False, num_heads=3),
    "expanded_unprojected": config(mixer="expanded", decay=False, use_projections=False),
    "tiny_alphas": config(),
    "mixed_narrow": config(d_model=6, num_heads=2, n_ctx=65, vocab_size=5),
    "combined_one_head": config(
        mixer="combined", d_model=17, num_heads=1, n_ctx=70, decay_constant=3
    ),
    "combined_undecayed_quirk": config(
        mixer="combined", decay=False, decay_constant=3, combined_row_quirk=True
    ),
    "kernel_wider_than_the_model": headless(
        mixer="kernel", kernel_size=9, d_model=7, n_ctx=64, decay_constant=3
    ),
}
LENGTHS = {
    **{
        f"mixed_{n}": config(n_ctx=n, decay_constant=max(1, n // 512))
        for n in (64, 511, 512, 850, 1023, 1024, 2048)
    },
    "parallel_2048": config(n_ctx=2048, decay_constant=4, mixer="parallel"),
    "combined_2048": config(n_ctx=2048, decay_constant=4, mixer="combined"),
    "kernel_2048": headless(n_ctx=2048, decay_constant=8, mixer="kernel", kernel_size=4),
    "diagonal_2048": config(n_ctx=2048, mixer="diagonal"),
}
_ROUNDED_SHAPE: dict[str, Any] = {"d_model": 64, "num_layers": 3, "n_ctx": 48}
ROUNDED = {
    "rounded_mixed": config(**_ROUNDED_SHAPE),
    "rounded_combined": config(**_ROUNDED_SHAPE, num_heads=2, mixer="combined"),
    "rounded_diagonal": config(**_ROUNDED_SHAPE, mixer="diagonal"),
    "rounded_kernel": headless(
        **_ROUNDED_SHAPE | {"d_model": 35}, mixer="kernel", kernel_size=4, decay=False
    ),
    "rounded_expanded": headless(**_ROUNDED_SHAPE, mixer="expanded", decay=False),
}
"""Those in bfloat16, compiled beside the others because that takes hardly longer."""


@dataclass
class Forms:
    """One model in MAX, float32, and in torch, float64."""

    max: LogitsModel
    torch: SRM

    def expected(self, ids: I32) -> F64:
        """Logits [length, vocab] of torch's parallel form."""
        with torch.no_grad():
            logits: F64 = self.torch(torch.from_numpy(ids)[None].long())[0].numpy()
        return logits

    def random_ids(self, seed: int, *shape: int) -> I32:
        rng = np.random.default_rng(seed)
        return rng.integers(0, self.max.config.vocab_size, shape, dtype=np.int32)


def tensors(name: str, config: ModelConfig) -> dict[str, F32]:
    found, rng = random_tensors(config), np.random.default_rng(0)
    for key, value in found.items():
        if name in LENGTHS and key.endswith("decay_value"):  # clipped, slow ones, never forgetting
            value[...] = rng.choice(np.array([0.88, 0.999, 0.9995, 1.0], np.float32), value.shape)
        if name == "tiny_alphas" and "mixer_heads" in key and key.endswith("weight"):
            value[:, [0, 3, 20]], value[:, [1, 10]] = 0, 1e-8
    return found


@cache
def compiled() -> dict[str, LogitsModel]:
    """By name, of CONFIGS, LENGTHS and ROUNDED. Compiled once for all tests that ask."""
    shapes = CONFIGS | LENGTHS | ROUNDED
    weights = {name: fold(shape, tensors(name, shape), name) for name, shape in shapes.items()}
    return compile_logits(weights, dict.fromkeys(ROUNDED, DType.bfloat16))


@cache
def all_forms() -> dict[str, Forms]:
    """By name, of CONFIGS and LENGTHS."""
    found = {}
    for name, shape in (CONFIGS | LENGTHS).items():
        reference = SRM(shape)
        values = tensors(name, shape)
        reference.load_state_dict({k: torch.from_numpy(v) for k, v in values.items()})
        found[name] = Forms(compiled()[name], reference.double())
    return found


def error(found: F32, expected: F64) -> float:
    """max |difference| / max |expected|; NaN where anything is not a number."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())
