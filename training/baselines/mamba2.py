"""Mamba 2: a state of d_state numbers a channel, whose decay and inputs depend on the token.

The scan is the block form of Dao and Gu 2024 (https://arxiv.org/abs/2405.21060, section 6) in plain
torch: a product with a lower-triangular matrix within a chunk, and a recurrence over the states at
the ends of chunks.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from srm.training.model import BlockModel

CHUNK = 64
"""Tokens covered by one lower-triangular matrix."""
EXPANSION = 2
"""Inner channels for each channel of the model."""
TAPS = 4
"""Tokens that the convolution before the scan sees."""
STEP_RANGE = (1e-3, 1e-1)
"""Range of the initial time steps, drawn evenly on a log scale; decay rates lie in 1 … 16."""
INITIAL_DEVIATION = 0.02
"""Standard deviation of the initial embedding and output layer."""


class Mamba2Shape(msgspec.Struct, frozen=True):
    """Sizes; num_heads divides the 2 * d_model inner channels, and num_groups the heads: those of a
    group share B and C."""

    d_model: int
    num_layers: int
    num_heads: int
    num_groups: int
    d_state: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.inner % self.num_heads:
            raise ValueError(f"num_heads = {self.num_heads} must divide 2 * d_model = {self.inner}")
        if self.num_heads % self.num_groups:
            raise ValueError(
                f"num_groups = {self.num_groups} must divide num_heads = {self.num_heads}"
            )

    @property
    def inner(self) -> int:
        """Channels that the scan runs over."""
        return EXPANSION * self.d_model


def scan(x: Tensor, rate: Tensor, b: Tensor, c: Tensor, chunk: int = CHUNK) -> Tensor:
    """Return y_t = c_t · S_t, where S_t = exp(rate_t) S_(t-1) + b_t x_tᵀ and S is 0 at first.

    x [batch, length, H, e]; rate [batch, length, H], at most 0; b, c [batch, length, G, N], each of
    H / G heads that follow each other. Rates are summed, and states carried, in at least float32.
    """
    length, groups = x.shape[1], b.shape[2]
    chunk = min(chunk, length)
    x, rate = (array.reshape(*array.shape[:2], groups, -1, *array.shape[3:]) for array in (x, rate))
    x, rate, b, c = (_in_chunks(array, chunk) for array in (x, rate, b, c))
    summed = rate.to(torch.promote_types(rate.dtype, torch.float32)).cumsum(2)
    gaps = summed.unsqueeze(3) - summed.unsqueeze(2)  # [batch, chunk, t, s, G, H / G]
    is_later = torch.ones(chunk, chunk, dtype=torch.bool, device=x.device).triu(1)
    # Filled before exp, not after: exp of what lies above the diagonal may be infinite.
    decays = gaps.masked_fill(is_later[:, :, None, None], -math.inf).exp().to(x.dtype)
    likeness = torch.einsum("bktgn,bksgn->bktsg", c, b)
    y = torch.einsum("bktsg,bktsgh,bksghe->bktghe", likeness, decays, x)

    until_end = (summed[:, :, -1:] - summed).exp().to(x.dtype)
    made = torch.einsum("bksgn,bksgh,bksghe->bkghne", b, until_end, x)
    over_chunk = summed[:, :, -1].exp()[..., None, None]
    state = torch.zeros_like(made[:, 0], dtype=summed.dtype)
    before = []
    for number in range(x.shape[1]):
        before.append(state)
        state = over_chunk[:, number] * state + made[:, number]
    carried = torch.stack(before, 1).to(x.dtype)
    y = y + torch.einsum("bktgn,bktgh,bkghne->bktghe", c, summed.exp().to(x.dtype), carried)
    return y.flatten(3, 4).flatten(1, 2)[:, :length]


def _in_chunks(x: Tensor, chunk: int) -> Tensor:
    """Return [batch, length, …] as [batch, chunks, chunk, …], zeros at the end of the last one."""
    batch, length, *rest = x.shape
    padding = [0, 0] * len(rest) + [0, -length % chunk]
    return F.pad(x, padding).view(batch, -1, chunk, *rest)


class Mamba2Mixer(nn.Module):
    """Projects in, convolves, scans, gates by SiLU, norms, projects out."""

    def __init__(self, shape: Mamba2Shape) -> None:
        super().__init__()
        heads, inner = shape.num_heads, shape.inner
        self.heads, self.groups = heads, shape.num_groups
        states = shape.num_groups * shape.d_state
        convolved = inner + 2 * states
        self.sizes = (inner, convolved, heads)
        self.states = [inner, states, states]
        self.in_proj = nn.Linear(shape.d_model, sum(self.sizes), bias=False)
        self.taps = nn.Conv1d(convolved, convolved, TAPS, groups=convolved, padding=TAPS - 1)
        low, high = map(math.log, STEP_RANGE)
        steps = torch.empty(heads).uniform_(low, high).exp()
        self.step_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))  # of softplus
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.skip = nn.Parameter(torch.ones(heads))
        self.norm = nn.RMSNorm(inner)
        self.out_proj = nn.Linear(inner, shape.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Mix x [batch, length, d] to [batch, length, d]."""
        length = x.shape[1]
        gate, convolved, steps = self.in_proj(x).split(self.sizes, dim=-1)
        convolved = F.silu(self.taps(convolved.transpose(1, 2))[..., :length].transpose(1, 2))
        values, *states = torch.split(convolved, self.states, dim=-1)
        b, c = (state.reshape(*state.shape[:2], self.groups, -1) for state in states)
        heads = values.view(*values.shape[:2], self.heads, -1)
        steps = F.softplus(steps.float() + self.step_bias)
        y = scan(heads * steps.to(heads.dtype).unsqueeze(-1), -steps * self.log_rate.exp(), b, c)
        y = (y + self.skip.to(y.dtype)[:, None] * heads).flatten(-2)
        gated = (y * F.silu(gate)).to(self.norm.weight.dtype)
        mixed: Tensor = self.out_proj(self.norm(gated))
        return mixed


class Mamba2Block(nn.Module):
    """x + mix(norm(x)); the mixer mixes channels and tokens at once."""

    def __init__(self, shape: Mamba2Shape) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(shape.d_model)
        self.mixer = Mamba2Mixer(shape)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mixer(self.norm(x))
        return x + mixed


class Mamba2(BlockModel):
    """Blocks, and a norm behind them."""

    def __init__(self, shape: Mamba2Shape) -> None:
        blocks = (Mamba2Block(shape) for _ in range(shape.num_layers))
        sizes = shape.vocab_size, shape.d_model
        super().__init__(shape, sizes, blocks, nn.RMSNorm(shape.d_model))
        for module in (self.input_layer, self.output_layer):
            nn.init.normal_(module.weight, std=INITIAL_DEVIATION)
