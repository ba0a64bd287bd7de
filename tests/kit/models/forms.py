"""Models of every variant, compiled as one module, each in MAX and in torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from max.dtype import DType

from srm.engine.config import ModelConfig
from srm.engine.steps.batch import F32, I32
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import Weights, fold
from srm.training.model import SRM
from tests.kit.engines.logits_model import LogitsGraphs, LogitsModel
from tests.kit.engines.numpy_runner import SMALL

F64 = npt.NDArray[np.float64]

TOLERANCE = 1e-5
"""Of float32 logits and states, relative to the largest."""


def config(**fields: Any) -> ModelConfig:
    return msgspec.structs.replace(SMALL, **fields)


def headless(**fields: Any) -> ModelConfig:
    return config(num_heads=1, use_projections=False, **fields)


CONFIGS = {
    "mixed": config(),
    "mixed_undecayed": config(decay=False, decay_constant=3),
    "mixed_unprojected": config(use_projections=False),
    "mixed_narrow": config(d_model=6, num_heads=2, n_ctx=65, vocab_size=5),
    "tiny_alphas": config(),
    "parallel": config(mixer="parallel"),
    "parallel_unprojected": config(mixer="parallel", use_projections=False, decay_constant=2),
    "column_heads": config(mixer="column_heads", decay=False),
    "combined": config(mixer="combined", decay_constant=2),
    "combined_quirk": config(mixer="combined", decay_constant=2, combined_row_quirk=True),
    "combined_undecayed_quirk": config(
        mixer="combined", decay=False, decay_constant=3, combined_row_quirk=True
    ),
    "combined_one_head": config(
        mixer="combined", d_model=17, num_heads=1, n_ctx=70, decay_constant=3
    ),
    "row": headless(mixer="row", decay=False),
    "column": headless(mixer="column", decay=False),
    "kernel": headless(mixer="kernel", kernel_size=4, decay_constant=2),
    "kernel_undecayed": headless(mixer="kernel", kernel_size=7, decay=False, d_model=35),
    "kernel_wider_than_the_model": headless(
        mixer="kernel", kernel_size=9, d_model=7, decay_constant=3
    ),
    "diagonal": config(mixer="diagonal"),
    "diagonal_undecayed": config(mixer="diagonal", decay=False),
    "expanded": headless(mixer="expanded", decay=False),
    "expanded_heads": config(mixer="expanded", decay=False),
    "expanded_unprojected": config(mixer="expanded", decay=False, use_projections=False),
}
LENGTHS = {"mixed_512": config(n_ctx=512), "mixed_1024": config(num_layers=3, n_ctx=1024)}
LONG = {
    "mixed_850": config(n_ctx=850),
    "mixed_2048": config(n_ctx=2048, decay_constant=4),
    "combined_2048": config(n_ctx=2048, decay_constant=4, mixer="combined"),
    "kernel_2048": headless(n_ctx=2048, decay_constant=8, mixer="kernel", kernel_size=4),
    "diagonal_2048": config(n_ctx=2048, mixer="diagonal"),
}
"""For slow tests."""
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


def folded(shapes: Mapping[str, ModelConfig]) -> dict[str, Weights]:
    return {name: fold(shape, tensors(name, shape), name) for name, shape in shapes.items()}


def tensors(name: str, config: ModelConfig) -> dict[str, F32]:
    result, rng = random_tensors(config), np.random.default_rng(0)
    for key, value in result.items():
        # Clipped ones, slow ones, and one that never forgets.
        if name in LENGTHS | LONG and key.endswith("decay_value"):
            value[...] = rng.choice(np.array([0.88, 0.999, 0.9995, 1.0], np.float32), value.shape)
        if name == "tiny_alphas" and "mixer_heads" in key and key.endswith("weight"):
            value[:, [0, 3, 20]], value[:, [1, 10]] = 0, 1e-8
    return result


@cache
def graphs() -> LogitsGraphs:
    """Of CONFIGS, LENGTHS and ROUNDED. Compiled once for all tests that ask."""
    exact = [(shape, DType.float32) for shape in (CONFIGS | LENGTHS).values()]
    return LogitsGraphs([*exact, *((shape, DType.bfloat16) for shape in ROUNDED.values())])


@cache
def all_forms() -> dict[str, Forms]:
    """By name, of CONFIGS and LENGTHS."""
    return _forms(graphs(), CONFIGS | LENGTHS)


@cache
def long_forms() -> dict[str, Forms]:
    """By name, of LONG."""
    return _forms(LogitsGraphs((shape, DType.float32) for shape in LONG.values()), LONG)


def _forms(graphs: LogitsGraphs, shapes: Mapping[str, ModelConfig]) -> dict[str, Forms]:
    forms, in_max = {}, graphs.bind(folded(shapes))
    for name, shape in shapes.items():
        reference = SRM(shape)
        values = tensors(name, shape)
        reference.load_state_dict({k: torch.from_numpy(v) for k, v in values.items()})
        forms[name] = Forms(in_max[name], reference.double())
    return forms


def error(result: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    """max |difference| / max |expected|; NaN where anything is not a number."""
    return float(np.abs(result - expected).max() / np.abs(expected).max())
