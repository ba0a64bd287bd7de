"""A masked mixer: each head weighs every earlier token by a number of its own, learned.

Heads have a lower-triangular matrix each, length² numbers (Badger 2024,
https://arxiv.org/abs/2409.01482). The structured mixer is the same with matrices of the form
α_t · decay^(t-s), which is what makes it recurrent; all else is built alike here.
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn

from training.model import LanguageModel


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
        self.in_proj = nn.Linear(shape.d_model, shape.d_model)
        self.out_proj = nn.Linear(shape.d_model, shape.d_model)
        self.weight = nn.Parameter(torch.randn(heads, n, n) * (2 / n) ** 0.5)
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
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )
        self.token_norm = nn.LayerNorm(width)
        self.token_mixing_layer = MaskedMixer(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.channel_mixing_layer(self.channel_norm(x))
        mixed: Tensor = self.token_mixing_layer(self.token_norm(x))
        return x + mixed


class MaskedMixerModel(LanguageModel):
    """ids -> embedding -> blocks -> logits, without a final norm."""

    def __init__(self, shape: MaskedMixerShape) -> None:
        super().__init__()
        self.config = shape
        self.input_layer = nn.Embedding(shape.vocab_size, shape.d_model)
        self.mixer_blocks = nn.ModuleList(MaskedMixerBlock(shape) for _ in range(shape.num_layers))
        self.output_layer = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids int64 [batch, length ≤ n_ctx] to logits [batch, length, vocab]."""
        x = self.input_layer(ids)
        for block in self.mixer_blocks:
            x = block(x)
        logits: Tensor = self.output_layer(x)
        return logits
