"""The least bytes of a decode step, counted and not measured: those that no cache can be expected
to keep.

They are every matrix once, and for each row the embedding, the state read and written, and the
logits written and read; activations between ops are left out, and biases, norms and the mixer's
scalars, which are less than a hundredth.
"""

from __future__ import annotations

from typing import NamedTuple

from srm.engine.config import Dtype, ModelConfig

SIZES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float8": 2}
"""Bytes of a value; those of channel mixers take FLOAT8 in float8."""
FLOAT8 = 1
STATE = 4
"""Bytes of a state's value, whatever the dtype; also of an int32."""


class StepBytes(NamedTuple):
    """Bytes of a step of the model: a constant part, and a part for each row."""

    once: int
    row: int


def logit_size(dtype: Dtype, device: str) -> int:
    """Return the bytes of a logit: float32 on a CPU, the activations' dtype on a GPU."""
    return SIZES[dtype] if device == "gpu" else STATE


def decode_bytes(model: ModelConfig, dtype: Dtype, device: str) -> StepBytes:
    """Count a decode step's bytes; each weight is one multiply-add of every token."""
    logits = 2 * logit_size(dtype, device) * model.vocab_size
    row = SIZES[dtype] * model.d_model + 2 * STATE * model.state_width + logits
    narrow = model.channel_flops_per_token if dtype == "float8" else 0
    wide = model.flops_per_token - narrow
    return StepBytes((SIZES[dtype] * wide + FLOAT8 * narrow) // 2, row)
