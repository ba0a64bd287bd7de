"""A Transformer as Llama has it: rotated queries and keys, RMSNorm, gated channel layers.

Position enters through the rotation alone (Su et al. 2021, https://arxiv.org/abs/2104.09864); the
gated layer is SwiGLU (Shazeer 2020, https://arxiv.org/abs/2002.05202).
"""

from __future__ import annotations

import time
from functools import cache, lru_cache

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from srm.training.model import BlockModel

ROTATION_BASE = 10_000.0
"""The longest period of a rotation, in units of 2π tokens."""
NORM_EPS = 1e-5
"""What a mean of squares is raised by; torch's own default is 0.008 in bfloat16."""
PROBES = 3
"""Times that each way of computing attention is tried."""


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
        queries, keys = rotated(queries), rotated(keys)
        if queries.device.type == "cpu" and torch.is_grad_enabled():
            width, longest = queries.shape[-1], 2 ** (queries.shape[-2] - 1).bit_length()
            ways = [fastest_attention(self.heads, longest, width, queries.dtype), SDPBackend.MATH]
            with sdpa_kernel(ways, set_priority=True):
                y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        else:
            y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mixed: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return mixed


@cache
def fastest_attention(heads: int, length: int, width: int, dtype: torch.dtype) -> SDPBackend:
    """Return how this processor trains attention on queries [rows, heads, length, width] in the
    least time: torch's fused kernel is made for long rows, and takes longer for short ones. Some
    4,096 tokens are tried, so that a run loses little by it."""
    shape, random = (max(1, 4096 // length), heads, length, width), torch.Generator().manual_seed(0)
    queries, keys, values = (
        torch.randn(shape, generator=random).to(dtype).requires_grad_() for _ in range(3)
    )

    def seconds(backend: SDPBackend) -> float:
        started = time.process_time()
        with sdpa_kernel(backend):
            y = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            torch.autograd.backward(y.sum())
        return time.process_time() - started

    ways = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH
    return min(ways, key=lambda way: min(seconds(way) for _ in range(PROBES)))


@lru_cache(64)
def rotation(
    begin: int, end: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [end - begin, width / 2] of the angles of positions, which are
    computed in float64."""
    with torch.inference_mode(False):  # training takes what a sampler left here
        half = torch.arange(width // 2, dtype=torch.float64, device=device)
        positions = torch.arange(begin, end, dtype=torch.float64, device=device)
        angles = positions[:, None] * ROTATION_BASE ** (-2 * half / width)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotated(x: Tensor, begin: int = 0) -> Tensor:
    """Rotate channel i and e / 2 + i of x [..., length, e] by the position times base^(-2i / e).

    So the product of a rotated query and a rotated key depends on the gap between them alone.
    Positions count from `begin`.
    """
    length, width = x.shape[-2:]
    cos, sin = rotation(begin, begin + length, width, x.dtype, x.device)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class TransformerBlock(nn.Module):
    """u = x + attention(norm(x)), then u + gated(norm(u))."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.token_norm = nn.RMSNorm(shape.d_model, NORM_EPS)
        self.attention = Attention(shape)
        self.channel_norm = nn.RMSNorm(shape.d_model, NORM_EPS)
        self.gate_up = nn.Linear(shape.d_model, 2 * shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.token_norm(x))
        gate, up = self.gate_up(self.channel_norm(x)).chunk(2, dim=-1)
        inner: Tensor = self.down(F.silu(gate) * up)
        return x + inner


class Transformer(BlockModel):
    """Blocks, and a norm behind them.

    Weights begin as those of small models do: embeddings at a deviation of 1, linear layers of 1 /
    sqrt(inputs), and those that add to the residual stream at 1 / sqrt(2 * num_layers) of that, so
    that their sum stays as large (Radford et al. 2019, section 2.3).
    """

    def __init__(self, shape: TransformerShape) -> None:
        blocks = [TransformerBlock(shape) for _ in range(shape.num_layers)]
        sizes = shape.vocab_size, shape.d_model
        super().__init__(shape, sizes, iter(blocks), nn.RMSNorm(shape.d_model, NORM_EPS))
        added = {part for block in blocks for part in (block.attention.out, block.down)}
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)
            elif isinstance(module, nn.Linear):
                residual = (2 * shape.num_layers) ** -0.5 if module in added else 1.0
                nn.init.normal_(module.weight, std=residual * module.in_features**-0.5)
