"""RWKV-4: attention without queries, whose weights fall with distance at a learned rate a channel.

From the equations of Peng et al. 2023 (https://arxiv.org/abs/2305.13048, sections 3.1 and 3.2). The
weighted mean is computed over windows that double in length, each with the largest exponent in it
taken out, so no exponent is above 0. It is computed in at least float32.
"""

from __future__ import annotations

import math

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from srm.training.model import BlockModel


class RWKV4Shape(msgspec.Struct, frozen=True):
    """Sizes."""

    d_model: int
    num_layers: int
    vocab_size: int


def weighted_mean(keys: Tensor, values: Tensor, fall: Tensor, bonus: Tensor) -> Tensor:
    """Return Σ_{s<t} e^(k_s - (t-1-s) w) v_s + e^(u + k_t) v_t, over the same sum without v.

    keys, values [batch, length, d]; fall w ≥ 0 and bonus u [d]. Raised to at least float32.
    """
    dtype = torch.promote_types(keys.dtype, torch.float32)
    keys, values = keys.to(dtype), values.to(dtype)
    # A sum is kept as (its value over e^most, most). What is taken out cancels, so it needs no
    # gradient.
    most = keys.detach()
    weights = (keys - most).exp()
    sums = torch.stack([weights * values, weights])
    window = 1
    while window < keys.shape[1]:  # each sum is of the last `window` tokens, then of twice as many
        earlier, earlier_most = _later(sums, window, 0.0), _later(most, window, -math.inf)
        fallen = earlier_most - window * fall
        new_most = torch.maximum(most, fallen).detach()
        sums = sums * (most - new_most).exp() + earlier * (fallen - new_most).exp()
        most, window = new_most, 2 * window
    before, before_most = _later(sums, 1, 0.0), _later(most, 1, -math.inf)
    own = bonus + keys
    new_most = torch.maximum(before_most, own).detach()
    weights = (own - new_most).exp()
    summed = before * (before_most - new_most).exp() + torch.stack([weights * values, weights])
    return summed[0] / summed[1]


def _later(x: Tensor, tokens: int, fill: float) -> Tensor:
    """Return x [..., length, d] moved to later positions, `fill` at the first ones."""
    return F.pad(x, (0, 0, tokens, 0), value=fill)[..., : x.shape[-2], :]


class _Shifts(nn.Module):
    """Mixes each token with the one before it, channel by channel, once for each name."""

    def __init__(self, **shares: Tensor) -> None:
        """`shares` of a token itself, [d]."""
        super().__init__()
        self.shares = nn.ParameterDict(shares)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Return mixtures [batch, length, d] of x by name."""
        before = _later(x, 1, 0.0)
        return {name: before + share * (x - before) for name, share in self.shares.items()}


class TimeMixing(nn.Module):
    """o = W_o (σ(r) · weighted_mean(k, v)), where r, k and v see a token and the one before it."""

    def __init__(self, shape: RWKV4Shape, layer: int) -> None:
        super().__init__()
        d = shape.d_model
        depth, height = _places(shape, layer)
        channel = torch.arange(d) / d
        key = channel**height
        self.shifts = _Shifts(key=key, value=key + 0.3 * depth, receptance=0.5 * key)
        self.key, self.value, self.receptance, self.out = (
            nn.Linear(d, d, bias=False) for _ in range(4)
        )
        # e^-w is from 0.998 to 0: the channels' memories are of other lengths
        place = torch.arange(d) / max(1, d - 1)
        self.log_fall = nn.Parameter(-5 + 8 * place ** (0.7 + 1.3 * depth))
        zigzag = ((torch.arange(d) + 1) % 3 - 1) / 2
        self.bonus = nn.Parameter(math.log(0.3) + zigzag)

    def forward(self, x: Tensor) -> Tensor:
        """Mix x [batch, length, d] to [batch, length, d]."""
        shifted = self.shifts(x)
        keys, values = self.key(shifted["key"]), self.value(shifted["value"])
        gate = torch.sigmoid(self.receptance(shifted["receptance"]))
        mean = weighted_mean(keys, values, self.log_fall.exp(), self.bonus)
        mixed: Tensor = self.out(gate * mean)
        return mixed


class ChannelMixing(nn.Module):
    """o = σ(r) · W_v max(k, 0)², where r and k see a token and the one before it."""

    def __init__(self, shape: RWKV4Shape, layer: int) -> None:
        super().__init__()
        d = shape.d_model
        share = (torch.arange(d) / d) ** _places(shape, layer)[1]
        self.shifts = _Shifts(key=share, receptance=share.clone())
        self.key = nn.Linear(d, 4 * d, bias=False)
        self.value = nn.Linear(4 * d, d, bias=False)
        self.receptance = nn.Linear(d, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [batch, length, d] to [batch, length, d]."""
        shifted = self.shifts(x)
        gate = torch.sigmoid(self.receptance(shifted["receptance"]))
        inner: Tensor = self.value(F.relu(self.key(shifted["key"])).square())
        return gate * inner


def _places(shape: RWKV4Shape, layer: int) -> tuple[float, float]:
    """Return a layer's place from 0, the first, to 1, and from 1, the first, to almost 0."""
    return layer / max(1, shape.num_layers - 1), 1 - layer / shape.num_layers


class RWKV4Block(nn.Module):
    """u = x + time mixing(LN(x)), then u + channel mixing(LN(u))."""

    def __init__(self, shape: RWKV4Shape, layer: int) -> None:
        super().__init__()
        # The first one norms what is embedded: with its small weights it learns fast.
        self.embedded_norm = nn.Identity() if layer else nn.LayerNorm(shape.d_model)
        self.time_norm = nn.LayerNorm(shape.d_model)
        self.time_mixing = TimeMixing(shape, layer)
        self.channel_norm = nn.LayerNorm(shape.d_model)
        self.channel_mixing = ChannelMixing(shape, layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedded_norm(x)
        x = x + self.time_mixing(self.time_norm(x))
        mixed: Tensor = self.channel_mixing(self.channel_norm(x))
        return x + mixed


class RWKV4(BlockModel):
    """Blocks, and a norm behind them.

    As published, weights whose product is added to the residual, and those of keys and gates,
    begin at 0, those embedded within 1e-4.
    """

    def __init__(self, shape: RWKV4Shape) -> None:
        blocks = (RWKV4Block(shape, layer) for layer in range(shape.num_layers))
        sizes = shape.vocab_size, shape.d_model
        super().__init__(shape, sizes, blocks, nn.LayerNorm(shape.d_model))
        nn.init.uniform_(self.input_layer.weight, -1e-4, 1e-4)
        taller = max(1, shape.vocab_size / shape.d_model)
        nn.init.orthogonal_(self.output_layer.weight, 0.5 * math.sqrt(taller))
        for block in self.mixer_blocks:
            assert isinstance(block, RWKV4Block)
            time, channel = block.time_mixing, block.channel_mixing
            for layer in (time.key, time.receptance, time.out, channel.value, channel.receptance):
                nn.init.zeros_(layer.weight)
            nn.init.orthogonal_(time.value.weight)
            nn.init.orthogonal_(channel.key.weight, 2.0)  # √4, for four times the width
