"""The Structured Recurrent Mixer in torch: one set of parameters, two forms. The oracle.

`forward()` works in parallel over the sequence (paper eq. 1-4: a lower-triangular matrix per head);
`step()` is the same function as a recurrence over a state of plain sums, so nothing is ever divided
by a weight. Column heads keep q = λq + x and give α·q + β; row heads keep r = λr + αx and give
r + β, where λ = clip(decay, 0.9, 1) ** (1 / c), c the decay constant. Parameter names are those of
the published checkpoints (blbadger/mrm), so files move between the two without renaming.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.config import ModelConfig

DECAY_RANGE = (0.9, 1.0)


class MixerHead(nn.Module):
    """The per-position scalars of one head: weight α [1, n_ctx], bias β [n_ctx], decay [1]."""

    def __init__(self, n_ctx: int, decay: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, n_ctx) * (2 / n_ctx) ** 0.5)
        self.bias = nn.Parameter(torch.zeros(n_ctx))
        if decay is not None:
            self.decay_value = nn.Parameter(torch.tensor([decay]))


class TokenMixer(nn.Module):
    """Mixed heads: the first half are column heads, the second half row heads.

    Without projections head h sees channels [h·e, (h+1)·e) and there is no output projection.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.d_model, config.num_heads
        self.mixer_heads = nn.ModuleList(
            MixerHead(config.n_ctx, _initial_decay(h, config)) for h in range(heads)
        )
        if config.use_projections:
            self.proj_head = nn.ModuleList(nn.Linear(width, config.head_dim) for _ in range(heads))
            self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, d] -> [batch, length, d], length ≤ n_ctx."""
        batch, length, width = x.shape
        heads, head_dim = self.config.num_heads, self.config.head_dim
        x = self._project_in(x).view(batch, length, heads, head_dim)
        mixed = torch.einsum("hts,bshe->bthe", self.mixing_matrix(length).to(x.dtype), x)
        mixed = mixed + self.scalars()[1][:, :length].T[None, :, :, None].to(x.dtype)
        return self._project_out(mixed.reshape(batch, length, width))

    def step(self, x: Tensor, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """x [batch, d], state [batch, d] -> output [batch, d], new state [batch, d]."""
        alpha, beta, decay = self.scalars()
        batch, width = x.shape
        heads, half = self.config.num_heads, self.config.num_heads // 2
        x = self._project_in(x).view(batch, heads, -1)
        a = alpha[:, position].view(1, heads, 1)
        is_column = (torch.arange(heads) < half).view(1, heads, 1)
        kept = (decay ** (1 / self.config.decay_constant)).view(1, heads, 1)
        s = torch.where(is_column, x, a * x) + kept * state.view(x.shape)
        y = torch.where(is_column, a * s, s) + beta[:, position].view(1, heads, 1)
        return self._project_out(y.reshape(batch, width)), s.reshape(batch, width)

    def scalars(self) -> tuple[Tensor, Tensor, Tensor]:
        """α [heads, n_ctx], β [heads, n_ctx] and the clipped decay [heads]."""
        alpha = torch.cat([head.weight for head in self._heads()])
        beta = torch.stack([head.bias for head in self._heads()])
        if not self.config.decay:
            return alpha, beta, torch.ones(len(alpha), dtype=alpha.dtype)
        decay = torch.cat([head.decay_value for head in self._heads()]).clamp(*DECAY_RANGE)
        return alpha, beta, decay

    def mixing_matrix(self, length: int) -> Tensor:
        """[heads, length, length]: what target t takes of source s, zero for s > t."""
        alpha, _, decay = self.scalars()
        at = torch.arange(length)
        gap = (at[:, None] - at[None, :]).clamp(min=0)  # never raise the decay to a negative power
        powers = (decay[:, None, None] ** (gap / self.config.decay_constant)).tril()
        half = self.config.num_heads // 2
        column = alpha[:half, :length, None] * powers[:half]
        row = alpha[half:, None, :length] * powers[half:]
        return torch.cat([column, row])

    def _heads(self) -> list[MixerHead]:
        return [head for head in self.mixer_heads if isinstance(head, MixerHead)]

    def _project_in(self, x: Tensor) -> Tensor:
        if not self.config.use_projections:
            return x
        projections = [p for p in self.proj_head if isinstance(p, nn.Linear)]
        weight = torch.cat([p.weight for p in projections])
        bias = torch.cat([p.bias for p in projections])
        return F.linear(x, weight, bias)

    def _project_out(self, x: Tensor) -> Tensor:
        return (
            F.linear(x, self.out_proj.weight, self.out_proj.bias)
            if self.config.use_projections
            else x
        )


class Block(nn.Module):
    """u = x + MLP(LN(x)), then u + mix(LN(u)): channels first, tokens second."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.d_model
        self.channel_norm = nn.LayerNorm(width)
        self.channel_mixing_layer = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )
        self.token_norm = nn.LayerNorm(width)
        self.token_mixing_layer = TokenMixer(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.channel_mixing_layer(self.channel_norm(x))
        mixed: Tensor = self.token_mixing_layer(self.token_norm(x))
        return x + mixed

    def step(self, x: Tensor, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        x = x + self.channel_mixing_layer(self.channel_norm(x))
        mixed, state = self.token_mixing_layer.step(self.token_norm(x), state, position)
        return x + mixed, state


class SRM(nn.Module):
    """ids -> embedding -> blocks -> logits. No final norm, tied weights or position encoding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.input_layer = nn.Embedding(config.vocab_size, config.d_model)
        self.mixer_blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.output_layer = nn.Linear(config.d_model, config.vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        """ids int64 [batch, length ≤ n_ctx] -> logits [batch, length, vocab]."""
        x = self.input_layer(ids)
        for block in self.mixer_blocks:
            x = block(x)
        return F.linear(x, self.output_layer.weight)

    def step(self, ids: Tensor, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Feed one token per sequence: ids int64 [batch], all at `position` 0 … n_ctx - 1.

        state [layers, batch, d], zeros before position 0. Returns logits [batch, vocab] and the
        new state.
        """
        x = self.input_layer(ids)
        states = []
        for block, layer_state in zip(self.mixer_blocks, state, strict=True):
            assert isinstance(block, Block)
            x, new_state = block.step(x, layer_state, position)
            states.append(new_state)
        return self.output_layer(x), torch.stack(states)

    def empty_state(self, batch: int) -> Tensor:
        """State before the first token: zeros [layers, batch, d], in the parameters' dtype."""
        config, dtype = self.config, self.output_layer.weight.dtype
        return torch.zeros(config.num_layers, batch, config.d_model, dtype=dtype)


def _initial_decay(head: int, config: ModelConfig) -> float | None:
    """Spread each half's heads over the allowed range: some forget within words, one never does."""
    if not config.decay:
        return None
    half = config.num_heads // 2
    low, high = DECAY_RANGE
    return high - (high - low) * (head % half) / half
