"""Every variant of the model, for tests: configs to draw, and what a mixer means, sum by sum.

`mixed_tokens` is written after the formulas of the published code, with a matrix per head, and
shares nothing with `training/huggingface/mixers_srm.py` nor with the engine.
"""

from __future__ import annotations

from typing import get_args

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from srm.engine.config import Mixer, ModelConfig

F64 = npt.NDArray[np.float64]

EVEN_HEADS = {"mixed", "parallel", "diagonal"}
HEADLESS = {"row", "column", "kernel"}
ALWAYS_PROJECTED = {"column_heads", "combined", "diagonal"}
NEVER_DECAYED = {"column_heads", "row", "column", "expanded"}


@st.composite
def configs(draw: st.DrawFn, max_n_ctx: int = 40) -> ModelConfig:
    """A small model of any variant."""
    mixer: Mixer = draw(st.sampled_from(get_args(Mixer)))
    heads = 1 if mixer in HEADLESS else draw(st.integers(1, 4))
    heads += heads % 2 if mixer in EVEN_HEADS else 0
    is_headless = mixer in HEADLESS or (mixer == "expanded" and heads == 1)
    decay = mixer not in NEVER_DECAYED and draw(st.booleans())
    return ModelConfig(
        d_model=heads * draw(st.integers(2, 5)),
        num_layers=draw(st.integers(1, 3)),
        num_heads=heads,
        n_ctx=draw(st.integers(1, max_n_ctx)),
        vocab_size=draw(st.integers(2, 20)),
        use_projections=not is_headless and (mixer in ALWAYS_PROJECTED or draw(st.booleans())),
        decay=decay,
        decay_constant=draw(st.integers(1, 4)),  # means nothing without decay
        mixer=mixer,
        kernel_size=draw(st.integers(2, 4)) if mixer == "kernel" else 1,
        combined_row_quirk=mixer == "combined" and draw(st.booleans()),
    )


def mixed_tokens(config: ModelConfig, tensors: dict[str, F64], x: F64) -> F64:
    """A layer's token mixer on x [length, d]; tensors by name below `token_mixing_layer.`."""
    heads, width = config.num_heads, config.head_dim
    outputs = []
    for h in range(heads):
        slice_ = slice(h * width, (h + 1) * width)
        if not config.use_projections:
            inputs = x[:, slice_]
        elif config.mixer == "parallel":
            inputs = (x @ tensors["in_proj.weight"].T + tensors["in_proj.bias"])[:, slice_]
        else:
            inputs = x @ tensors[f"proj_head.{h}.weight"].T + tensors[f"proj_head.{h}.bias"]
        outputs.append(_head(config, tensors, h, inputs))
    mixed = np.concatenate(outputs, axis=1)
    if config.use_projections:
        mixed = mixed @ tensors["out_proj.weight"].T + tensors["out_proj.bias"]
    return mixed


def _head(config: ModelConfig, tensors: dict[str, F64], h: int, x: F64) -> F64:
    """Head h on its inputs [length, e]."""
    length, is_column = len(x), h < config.num_heads // 2
    prefix = "" if config.is_headless else f"mixer_heads.{h}."
    if config.mixer == "expanded":
        for stage in (0, 2):
            alpha, beta = (tensors[f"{prefix}{stage}.{name}"][0] for name in ("weight", "bias"))
            y: F64 = _column(alpha, 1.0, length) @ x + beta[:length, None]
            x = y * (1 + np.tanh(y / 2)) / 2  # SiLU, without an overflow
        return y
    if config.mixer == "parallel":
        alpha = tensors["mixer_heads.weight"][h : h + 1]
        beta = tensors["mixer_heads.bias"][h, :length, None]
        decays = tensors["mixer_heads.decay_value"].ravel() if config.decay else np.ones(2)
    else:
        alpha, beta = tensors[prefix + "weight"], tensors[prefix + "bias"][:length, None]
        decays = tensors[prefix + "decay_value"].ravel() if config.decay else np.ones(2)
    clipped = decays.clip(0.9, 1.0)
    first_decay, last_decay = clipped[[0, -1]] ** (1 / config.decay_constant)
    match config.mixer:
        case "column" | "column_heads":
            return _column(alpha[0], 1.0, length) @ x + beta
        case "row":
            return _row(alpha[0], 1.0, length) @ x + beta
        case "mixed" | "parallel":
            kind = _column if is_column else _row
            return kind(alpha[0], last_decay, length) @ x + beta
        case "diagonal":
            matrix = (_column if is_column else _row)(alpha[0], last_decay, length)
            np.fill_diagonal(matrix, tensors[prefix + "diag_weight"][0])
            return matrix @ x + beta
        case "combined":
            row = _row(alpha[0], first_decay, length)
            if config.combined_row_quirk and config.decay:
                row = _row(alpha[0], clipped[0], length) / config.decay_constant
            return (row + _column(alpha[1], last_decay, length)) @ x + beta
        case "kernel":
            size, width = config.kernel_size, config.d_model
            padded = np.pad(x, ((0, 0), (size - 1, size - 1)))
            mixed = np.tile(beta, width)
            for i in range(size):
                mixed += _column(alpha[i], last_decay, length) @ padded[:, i : i + width]
            return mixed
    raise AssertionError(config.mixer)


def _column(alpha: F64, decay: float, length: int) -> F64:
    """[t, s]: the weight of the target times the decay over the gap."""
    return alpha[:length, None] * _powers(decay, length)


def _row(alpha: F64, decay: float, length: int) -> F64:
    return alpha[None, :length] * _powers(decay, length)


def _powers(decay: float, length: int) -> F64:
    gap = np.arange(length)[:, None] - np.arange(length)
    return np.where(gap >= 0, decay ** np.maximum(gap, 0), 0.0)
