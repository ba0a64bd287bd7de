"""Blocks and token mixers in torch, which training and `modeling_srm.py` share.

Every variant of a mixer is built of the units of `units_srm.py`. These two files import torch and
each other alone, since they go beside a checkpoint too. Tensors are named as in every checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .units_srm import Places, Unit, Units

DECAY_RANGE = (0.9, 1.0)
"""Range of λ: one outside it is used as the nearer end."""


class Linear(nn.Linear):
    """A linear layer whose weights begin at a deviation of `gain` / sqrt(inputs), biases at 0."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True, gain: float = 1.0) -> None:
        self.gain = gain
        super().__init__(inputs, outputs, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.gain * self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Projection(Linear):
    """A projection of a mixer, a class of its own so that LoRA finds it."""


def residual_gain(config: Any) -> float:
    """Return the gain of layers that add to the residual stream, two a block: their sum stays as
    large as what one adds (Radford et al. 2019, section 2.3)."""
    return float((2 * config.num_layers) ** -0.5)


class Scalars(nn.Module):
    """α, β, λ and δ of one head, or of a mixer's all."""

    initial_decay = 1.0
    initial_weight = 1.0
    weight: nn.Parameter
    bias: nn.Parameter

    def add_scalars(self, config: Any, head: int = 0) -> None:
        """Make them, with first values of ours. Decays differ by head: some heads forget within
        words, one never does. α is one number at all positions: with it a head sums n_ctx
        independent tokens to the deviation of one. As published α is drawn at random, and a model
        first has to learn that positions are alike."""
        mixer, n_ctx = config.mixer, config.n_ctx
        if mixer == "expanded":
            for stage in ("0", "2"):
                part = Scalars()
                part.initial_weight = n_ctx**-0.5
                part.weight = nn.Parameter(torch.full((1, n_ctx), part.initial_weight))
                part.bias = nn.Parameter(torch.zeros(1, n_ctx))
                self.add_module(stage, part)
            return
        low, high = DECAY_RANGE
        half = max(1, config.num_heads // 2)
        if config.decay:
            self.initial_decay = high - (high - low) * (head % half) / max(1, half - 1)
        square = self.initial_decay ** (2 / config.decay_constant)
        squares = n_ctx if square == 1 else (1 - square**n_ctx) / (1 - square)
        # Both of a combined mixer sum the same; those of a kernel have channels of their own.
        sums = {"combined": 4, "kernel": config.kernel_size}.get(mixer, 1)
        self.initial_weight = (sums * squares) ** -0.5
        several = {"parallel": config.num_heads, "combined": 2, "kernel": config.kernel_size}
        rows = several.get(mixer, 1)
        self.weight = nn.Parameter(torch.full((rows, n_ctx), self.initial_weight))
        self.bias = nn.Parameter(torch.zeros((rows, n_ctx) if mixer == "parallel" else n_ctx))
        if config.decay:
            # Combined: row, column. Parallel and kernel: only the second of the two is ever read.
            is_pair = mixer in {"combined", "parallel", "kernel"}
            self.decay_value = nn.Parameter(
                torch.full((2, 1) if is_pair else (1,), self.initial_decay)
            )
        if mixer == "diagonal":
            self.diag_weight = nn.Parameter(torch.randn(1))


class TokenMixer(Scalars):
    """The mixer that the configuration names, of a ModelConfig or an SRMConfig.

    Heads are slices of the channels in order, of the projected input where there are projections.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        width, heads, is_single = config.d_model, config.num_heads, config.mixer == "parallel"
        if config.is_headless:
            self.add_scalars(config)
        else:
            parts = [Scalars() for _ in range(1 if is_single else heads)]
            for head, part in enumerate(parts):
                part.add_scalars(config, head)
            self.mixer_heads = parts[0] if is_single else nn.ModuleList(parts)
        if config.use_projections:
            if is_single:
                self.in_proj = Projection(width, width)
            else:
                self.proj_head = nn.ModuleList(
                    Projection(width, width // heads) for _ in range(heads)
                )
            self.out_proj = Projection(width, width, gain=residual_gain(config))

    def forward(
        self,
        x: Tensor,
        places: Places,
        states: Tensor | None = None,
        placed: list[Unit] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix x [rows, length, d] after states [units, rows, d]; return the states after it too.

        `placed` are the mixer's units at these places; None: it places them."""
        config, units = self.config, Units(places, states, placed)
        if config.use_projections:
            x = self._project(x, self.in_projections())
        heads = x.view(*x.shape[:-1], config.num_heads, -1)
        y = self.mix(heads, units).flatten(-2)
        return self._project(y, [self.out_proj]) if config.use_projections else y, units.ends()

    def in_projections(self) -> list[Any]:
        """Return the projections that, one behind the other, give the heads their inputs."""
        return [self.in_proj] if self.config.mixer == "parallel" else [*self.proj_head]

    def holders(self) -> list[nn.Module]:
        """Return the modules that hold the scalars: one a head, or one that stands for all."""
        if self.config.is_headless:
            return [self]
        is_single = self.config.mixer == "parallel"
        return [self.mixer_heads] if is_single else [*self.mixer_heads.children()]

    def mix(self, x: Tensor, units: Units) -> Tensor:
        """Mix projected x [rows, length, H, e]."""
        if units.placed is None:
            units.place(stacked_units([self]), x)
        y = units.run(x)
        if self.config.mixer == "combined":
            return y + units.run(x)
        return units.run(F.silu(y)) if self.config.mixer == "expanded" else y

    def _project(self, x: Tensor, projections: Sequence[Any]) -> Tensor:
        """Return what they make of x, one behind the other, by one product."""
        if len(projections) == 1:
            return F.linear(x, projections[0].weight, projections[0].bias)
        weight = torch.cat([projection.weight for projection in projections])
        bias = torch.cat([projection.bias for projection in projections])
        return F.linear(x, weight, bias)


def stacked_units(mixers: Sequence[TokenMixer]) -> list[Unit]:
    """Return the units of mixers of one configuration, their scalars stacked: [mixers, H, …]."""
    scalars = _Stacked(mixers)
    config, alpha = scalars.config, scalars.alpha
    mixer, half = config.mixer, config.num_heads // 2
    if mixer == "expanded":
        return [
            Unit(scalars.decay(), None, alpha(stage), scalars.beta(stage)) for stage in ("0", "2")
        ]
    decay, weight, beta = scalars.decay(), alpha(), scalars.beta()
    if mixer in {"column", "column_heads", "kernel"}:
        return [Unit(decay, None, weight, beta)]
    row, first = weight[0], decay
    if mixer in {"row", "combined"}:
        first = scalars.decay(entry=0)
        if config.decay and config.combined_row_quirk:
            row, first = row / config.decay_constant, scalars.decay(entry=0, constant=1)
        of_row = Unit(first, row, (), beta)
        return [of_row, Unit(decay, None, weight[1:])] if mixer == "combined" else [of_row]
    # The first half of the heads are column heads, the other half row heads.
    ones, gamma = torch.ones_like(row[:, :half]), None
    if mixer == "diagonal":  # δ instead of α weighs the newest token
        gamma = scalars.stacked("diag_weight", "", config.num_heads, 1) - row
    alpha_in = torch.cat([ones, row[:, half:]], 1)
    alpha_out = torch.cat([row[:, :half], ones], 1)
    return [Unit(decay, alpha_in, (alpha_out,), beta, gamma)]


class _Stacked:
    """Stacks the scalars of mixers of one configuration over mixers and heads."""

    def __init__(self, mixers: Sequence[TokenMixer]) -> None:
        self.config, self._mixers = mixers[0].config, mixers

    def alpha(self, stage: str = "") -> tuple[Tensor, ...]:
        """Return the rows of α, each [mixers, H, n]; of two units, or a kernel, there are some."""
        shape = self.config.num_heads, -1, self.config.n_ctx
        return self.stacked("weight", stage, *shape).unbind(2)

    def beta(self, stage: str = "") -> Tensor:
        return self.stacked("bias", stage, self.config.num_heads, self.config.n_ctx)

    def decay(self, entry: int = -1, constant: int | None = None) -> Tensor:
        """Return the clipped λ ** (1 / c), f64[mixers, H]; of two λ one."""
        shape = len(self._mixers), self.config.num_heads
        if not self.config.decay:
            device = next(self._mixers[0].parameters()).device
            return torch.ones(shape, dtype=torch.float64, device=device)
        holders = len(self._mixers[0].holders())
        raw = self.stacked("decay_value", "", holders, -1)[..., entry]
        return raw.clamp(*DECAY_RANGE).double().expand(shape) ** (
            1 / (constant or self.config.decay_constant)
        )

    def stacked(self, name: str, stage: str, *shape: int) -> Tensor:
        """Stack the scalars of that name, [mixers, *shape]."""
        named = [
            getattr(holder.get_submodule(stage), name)
            for mixer in self._mixers
            for holder in mixer.holders()
        ]
        return torch.stack(named).reshape(len(self._mixers), *shape)


class Block(nn.Module):
    """u = x + MLP(LN(x)), then u + mix(LN(u)): channels first, tokens second."""

    make_mixer: type[TokenMixer] = TokenMixer

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.d_model
        self.channel_norm = nn.LayerNorm(width)
        self.channel_mixing_layer = nn.Sequential(
            Linear(width, 4 * width),
            nn.SiLU(),
            Linear(4 * width, width, gain=residual_gain(config)),
        )
        self.token_norm = nn.LayerNorm(width)
        self.token_mixing_layer = self.make_mixer(config)

    def forward(
        self,
        x: Tensor,
        places: Places,
        states: Tensor | None = None,
        placed: list[Unit] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map x [rows, length, d] after states [units, rows, d]; return the states after it too.
        `placed` are the units of the token mixer."""
        x = x + self.channel_mixing_layer(self.channel_norm(x))
        mixed, ends = self.token_mixing_layer(self.token_norm(x), places, states, placed)
        return x + mixed, ends
