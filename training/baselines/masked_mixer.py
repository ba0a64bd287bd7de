"""A masked mixer: each head weighs every earlier token by a number of its own, learned.

Heads have a lower-triangular matrix each, length² numbers (Badger 2024,
https://arxiv.org/abs/2409.01482). The structured mixer is the same with matrices of the form
α_t · decay^(t-s), which is what makes it recurrent; all else is built alike here.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn

from srm.training.huggingface.mixers_srm import Linear, residual_gain
from srm.training.model import BlockModel


class MaskedMixerShape(msgspec.Struct, frozen=True):
    """Sizes; num_heads divides d_model."""

    d_model: int
    num_layers: int
    num_heads: int
    n_ctx: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.d_model % self.num_heads:
            raise ValueError(f"num_heads = {self.num_heads} must divide d_model = {self.d_model}")


class MaskedMixer(nn.Module):
    """y_t = Σ_{s≤t} W_h[t, s] · x_s + β_h,t on slices of the projected channels, then out."""

    def __init__(self, shape: MaskedMixerShape) -> None:
        super().__init__()
        heads, n = shape.num_heads, shape.n_ctx
        self.heads = heads
        self.in_proj = Linear(shape.d_model, shape.d_model)
        self.out_proj = Linear(shape.d_model, shape.d_model, gain=residual_gain(shape))
        self.weight = nn.Parameter(torch.full((heads, n, n), n**-0.5))
        self.bias = nn.Parameter(torch.zeros(heads, n))

    def forward(self, x: Tensor) -> Tensor:
        """Mix x [batch, length, d] to [batch, length, d], length ≤ n_ctx."""
        length = x.shape[1]
        heads = self.in_proj(x).unflatten(-1, (self.heads, -1))
        weight = self.weight[:, :length, :length].tril()
        y = torch.einsum("hts,bshe->bthe", weight, heads)
        y = y + self.bias[:, :length].T.unsqueeze(-1)
        mixed: Tensor = self.out_proj(y.flatten(-2))
        return mixed


class MaskedMixerBlock(nn.Module):
    """u = x + MLP(LN(x)), then u + mix(LN(u)), as a block of the structured mixer."""

    def __init__(self, shape: MaskedMixerShape) -> None:
        super().__init__()
        width = shape.d_model
        self.channel_norm = nn.LayerNorm(width)
        self.channel_mixing_layer = nn.Sequential(
            Linear(width, 4 * width),
            nn.SiLU(),
            Linear(4 * width, width, gain=residual_gain(shape)),
        )
        self.token_norm = nn.LayerNorm(width)
        self.token_mixing_layer = MaskedMixer(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.channel_mixing_layer(self.channel_norm(x))
        mixed: Tensor = self.token_mixing_layer(self.token_norm(x))
        return x + mixed


class MaskedMixerModel(BlockModel):
    """Blocks without a final norm, of at most n_ctx tokens."""

    def __init__(self, shape: MaskedMixerShape) -> None:
        blocks = (MaskedMixerBlock(shape) for _ in range(shape.num_layers))
        super().__init__(shape, (shape.vocab_size, shape.d_model), blocks)
