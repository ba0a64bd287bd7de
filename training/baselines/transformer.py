"""A Transformer as Llama has it: rotated queries and keys, RMSNorm, gated channel layers.

Position enters through the rotation alone (Su et al. 2021, https://arxiv.org/abs/2104.09864); the
gated layer is SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202).
"""

from __future__ import annotations

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from srm.training.model import BlockModel

ROTATION_BASE = 10_000.0
"""The longest period of a rotation, in units of 2π tokens."""
INITIAL_DEVIATION = 0.02
"""Standard deviation of every initial matrix."""


class TransformerShape(msgspec.Struct, frozen=True):
    """Sizes; num_heads divides d_model into heads of an even width."""

    d_model: int
    num_layers: int
    num_heads: int
    hidden: int
    """Width of the gated layer."""
    vocab_size: int

    def __post_init__(self) -> None:
        if self.d_model % (2 * self.num_heads):
            raise ValueError(
                f"d_model must be a multiple of 2 * num_heads = {2 * self.num_heads}, "
                f"got {self.d_model}"
            )


class Attention(nn.Module):
    """Causal softmax attention with rotated queries and keys."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.heads = shape.num_heads
        self.queries_keys_values = nn.Linear(shape.d_model, 3 * shape.d_model, bias=False)
        self.out = nn.Linear(shape.d_model, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, length, d] to [batch, length, d]."""
        parts = self.queries_keys_values(x).chunk(3, dim=-1)
        queries, keys, values = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts
        )
        y = F.scaled_dot_product_attention(rotated(queries), rotated(keys), values, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


def rotated(x: Tensor, begin: int = 0) -> Tensor:
    """Rotate channel i and e / 2 + i of x [..., length, e] by the position times base^(-2i / e).

    So the product of a rotated query and a rotated key depends on the gap between them alone.
    Positions count from `begin`.
    """
    length, width = x.shape[-2:]
    half = torch.arange(width // 2, dtype=torch.float64, device=x.device)
    speeds = ROTATION_BASE ** (-2 * half / width)
    positions = torch.arange(begin, begin + length, dtype=torch.float64, device=x.device)
    angles = positions[:, None] * speeds
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class TransformerBlock(nn.Module):
    """u = x + attention(norm(x)), then u + gated(norm(u))."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(shape.d_model)
        self.attention = Attention(shape)
        self.channel_norm = nn.RMSNorm(shape.d_model)
        self.gate_up = nn.Linear(shape.d_model, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.token_norm(x))
        gate, up = self.gate_up(self.channel_norm(x)).chunk(2, dim=-1)
        inner: Tensor = self.down(F.silu(gate) * up)
        return x + inner


class Transformer(BlockModel):
    """Blocks, and a norm behind them."""

    def __init__(self, shape: TransformerShape) -> None:
        blocks = (TransformerBlock(shape) for _ in range(shape.num_layers))
        sizes = shape.vocab_size, shape.d_model
        super().__init__(shape, sizes, blocks, nn.RMSNorm(shape.d_model))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
