"""The decode step of a model in plain PyTorch: the baseline that the engine is measured against.

Optimized for speed: every matrix is whole and every scalar laid out per channel beforehand, states
change in place, and a token is drawn by one argmax over logits with Gumbel noise, which took less
time than `torch.multinomial` wherever it was tried. All sequences are at one position. Supports
only models whose layers have one unit without γ and taps.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from srm.engine.steps.batch import F32
from srm.engine.weights.weights import LayerWeights, Weights


class Recurrence(nn.Module):
    """Holds matrices and activations in `dtype`; states and the mixer's scalars in float32."""

    embedding: Tensor
    head: Tensor

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = weights.config
        self.register_buffer("embedding", torch.from_numpy(weights.embedding).to(dtype))
        self.register_buffer("head", _turned(weights.head, dtype))
        self.layers = nn.ModuleList(_Layer(layer, dtype) for layer in weights.layers)

    def forward(self, tokens: Tensor, state: Tensor, position: Tensor) -> Tensor:
        """Feed i64[batch] at `position` i64[1]; return the next tokens, sampled at temperature 1.

        state f32[layers, batch, d], zeros before position 0, is updated in place.
        """
        logits = self.logits(tokens, state, position).float()
        noise = -torch.log(-torch.log(torch.rand_like(logits)))
        return (logits + noise).argmax(-1)

    def logits(self, tokens: Tensor, state: Tensor, position: Tensor) -> Tensor:
        """Return the logits [batch, V] of the same step."""
        x = self.embedding[tokens]
        for layer, layer_state in zip(self.layers, state, strict=True):
            x = layer(x, layer_state, position)
        return F.linear(x, self.head)

    def empty_state(self, batch: int) -> Tensor:
        """Return the state before the first token."""
        shape = (self.config.num_layers, batch, self.config.d_model)
        return torch.zeros(shape, device=self.embedding.device)


class _Layer(nn.Module):
    alpha_in: Tensor  # [n, d], as the next two
    alpha_out: Tensor
    beta: Tensor
    decay: Tensor  # [d]

    def __init__(self, weights: LayerWeights, dtype: torch.dtype) -> None:
        super().__init__()
        (unit,) = weights.units
        assert unit.gamma is None and unit.taps is None, "not a plain unit"
        width = len(weights.channel_norm_weight)
        self.channel_norm, self.token_norm = (
            _frozen(nn.LayerNorm(width, device="meta"), weights, name, dtype)
            for name in ("channel_norm", "token_norm")
        )
        self.up, self.down = (_linear(weights, name, dtype) for name in ("up", "down"))
        self.proj_in, self.proj_out = (
            nn.Identity() if weights.proj_in_weight is None else _linear(weights, name, dtype)
            for name in ("proj_in", "proj_out")
        )
        for name in ("alpha_in", "alpha_out", "beta"):
            self.register_buffer(name, _per_channel(getattr(unit, name).T, width))
        self.register_buffer("decay", _per_channel(unit.decay[0], width))

    def forward(self, x: Tensor, state: Tensor, position: Tensor) -> Tensor:
        x = x + self.down(F.silu(self.up(self.channel_norm(x))))
        y = self.proj_in(self.token_norm(x))
        s = self.alpha_in.index_select(0, position) * y + self.decay * state
        state.copy_(s)
        y = self.alpha_out.index_select(0, position) * s
        y = y + self.beta.index_select(0, position)
        mixed: Tensor = self.proj_out(y.to(x.dtype))
        return x + mixed


def _linear(weights: LayerWeights, name: str, dtype: torch.dtype) -> nn.Module:
    inputs, outputs = getattr(weights, f"{name}_weight").shape
    return _frozen(nn.Linear(inputs, outputs, device="meta"), weights, name, dtype)


def _frozen(module: nn.Module, weights: LayerWeights, name: str, dtype: torch.dtype) -> nn.Module:
    """Give a module the layer's weight and bias of that name."""
    for part in ("weight", "bias"):
        values = _turned(getattr(weights, f"{name}_{part}"), dtype)
        setattr(module, part, nn.Parameter(values, requires_grad=False))
    return module


def _turned(matrix: F32, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(matrix.T).contiguous().to(dtype)


def _per_channel(scalars: F32, width: int) -> Tensor:
    """Repeat the scalars of a head for each of its channels: […, H] -> [..., d]."""
    return torch.from_numpy(np.repeat(scalars, width // scalars.shape[-1], axis=-1))
