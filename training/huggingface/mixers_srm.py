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

from .units_srm import Places, Units

DECAY_RANGE = (0.9, 1.0)
"""Range of λ: one outside it is used as the nearer end."""


class Projection(nn.Linear):
    """A projection of a mixer, a module of its own so that LoRA finds it."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(_drawn(*self.weight.shape))
            self.bias.zero_()


class Scalars(nn.Module):
    """α, β, λ and δ of one head, or of a mixer's all."""

    initial_decay = 1.0

    def add_scalars(self, config: Any, head: int = 0) -> None:
        """Draw them as published, except that decays differ by head: some heads forget within
        words, one never does."""
        mixer, n_ctx = config.mixer, config.n_ctx
        if mixer == "expanded":
            for stage in ("0", "2"):
                part = nn.Module()
                part.weight = nn.Parameter(_drawn(1, n_ctx))
                part.bias = nn.Parameter(torch.zeros(1, n_ctx))
                self.add_module(stage, part)
            return
        several = {"parallel": config.num_heads, "combined": 2, "kernel": config.kernel_size}
        rows = several.get(mixer, 1)
        self.weight = nn.Parameter(_drawn(rows, n_ctx))
        self.bias = nn.Parameter(torch.zeros((rows, n_ctx) if mixer == "parallel" else n_ctx))
        if config.decay:
            # Combined: row, column. Parallel and kernel: only the second of the two is ever read.
            is_pair = mixer in {"combined", "parallel", "kernel"}
            low, high = DECAY_RANGE
            half = max(1, config.num_heads // 2)
            self.initial_decay = high - (high - low) * (head % half) / half
            shape = (2, 1) if is_pair else (1,)
            self.decay_value = nn.Parameter(torch.full(shape, self.initial_decay))
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
            self.out_proj = Projection(width, width)

    def forward(
        self, x: Tensor, places: Places, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Mix x [rows, length, d] after states [units, rows, d]; return the states after it too."""
        config, units = self.config, Units(places, states)
        if config.use_projections:
            x = self._project(x, self.in_projections())
        heads = x.view(*x.shape[:-1], config.num_heads, -1)
        y = self.mix(heads, units).flatten(-2)
        return self._project(y, [self.out_proj]) if config.use_projections else y, units.ends()

    def in_projections(self) -> list[Any]:
        """Return the projections that, one behind the other, give the heads their inputs."""
        return [self.in_proj] if self.config.mixer == "parallel" else [*self.proj_head]

    def mix(self, x: Tensor, units: Units) -> Tensor:
        """Mix projected x [rows, length, H, e]."""
        config = self.config
        match config.mixer:
            case "row":
                return self._run_row(x, units)
            case "column" | "column_heads":
                return self._run_column(x, units)
            case "mixed" | "parallel" | "diagonal":
                return self._run_halves(x, units)
            case "combined":
                y = self._run_row(x, units)
                return y + units.run(x, self._decay(entry=1), alpha_out=self._alpha(row=1))
            case "kernel":
                return self._taps(units.run(x, self._decay()), units)
        return self._run_column(F.silu(self._run_column(x, units, "0")), units, "2")  # expanded

    def _run_column(self, x: Tensor, units: Units, stage: str = "") -> Tensor:
        alpha, beta = self._alpha(stage=stage), self._beta(stage)
        return units.run(x, self._decay(), alpha_out=alpha, beta=beta)

    def _run_row(self, x: Tensor, units: Units) -> Tensor:
        alpha, decay = self._alpha(), self._decay(entry=0)
        if self.config.decay and self.config.combined_row_quirk:
            alpha, decay = alpha / self.config.decay_constant, self._decay(entry=0, constant=1)
        return units.run(x, decay, alpha_in=alpha, beta=self._beta())

    def _run_halves(self, x: Tensor, units: Units) -> Tensor:
        """The first half of the heads are column heads, the other half row heads."""
        alpha, half = self._alpha(), self.config.num_heads // 2
        ones, gamma = torch.ones_like(alpha[:half]), None
        if self.config.mixer == "diagonal":  # δ instead of α weighs the newest token
            gamma = self._stacked("diag_weight") - alpha
        alpha_in, alpha_out = torch.cat([ones, alpha[half:]]), torch.cat([alpha[:half], ones])
        return units.run(x, self._decay(), alpha_in, alpha_out, self._beta(), gamma)

    def _taps(self, sums: Tensor, units: Units) -> Tensor:
        """Return channels j = β + Σ_i α_i · sums[j - (k - 1) + i], where sums below 0 are 0."""
        size, width = self.config.kernel_size, self.config.d_model
        padded = F.pad(sums, (size - 1, 0))
        y = units.places.scalars(self._beta()).to(sums.dtype)
        for i in range(size):
            y = y + units.scale(padded[..., i : i + width], self._alpha(row=i))
        return y

    def _alpha(self, row: int = 0, stage: str = "") -> Tensor:
        """Return one row of α, [H, n]; of two units, or of a kernel, there are several."""
        alpha = self._stacked("weight", stage)
        return alpha.reshape(self.config.num_heads, -1, self.config.n_ctx)[:, row]

    def _beta(self, stage: str = "") -> Tensor:
        return self._stacked("bias", stage).reshape(self.config.num_heads, self.config.n_ctx)

    def _decay(self, entry: int = -1, constant: int | None = None) -> Tensor:
        """Return the clipped λ ** (1 / c), f64[H]; with two λ and one unit, of the second λ."""
        heads = self.config.num_heads
        if not self.config.decay:
            return torch.ones(heads, dtype=torch.float64, device=next(self.parameters()).device)
        raw = self._stacked("decay_value")
        decay = raw.reshape(len(raw), -1)[:, entry].clamp(*DECAY_RANGE).double()
        return decay.expand(heads) ** (1 / (constant or self.config.decay_constant))

    def _stacked(self, name: str, stage: str = "") -> Tensor:
        """Stack the scalars of that name over the heads, or over the one that stands for all."""
        holders: list[nn.Module] = [self]
        if not self.config.is_headless:
            is_single = self.config.mixer == "parallel"
            holders = [self.mixer_heads] if is_single else [*self.mixer_heads.children()]
        return torch.stack([getattr(each.get_submodule(stage), name) for each in holders])

    def _project(self, x: Tensor, projections: Sequence[Any]) -> Tensor:
        """Return what they make of x, one behind the other, by one product."""
        weight = torch.cat([projection.weight for projection in projections])
        bias = torch.cat([projection.bias for projection in projections])
        return F.linear(x, weight, bias)


class Block(nn.Module):
    """u = x + MLP(LN(x)), then u + mix(LN(u)): channels first, tokens second."""

    make_mixer: type[TokenMixer] = TokenMixer

    def __init__(self, config: Any) -> None:
        super().__init__()
        width = config.d_model
        self.channel_norm = nn.LayerNorm(width)
        self.channel_mixing_layer = nn.Sequential(
            nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)
        )
        self.token_norm = nn.LayerNorm(width)
        self.token_mixing_layer = self.make_mixer(config)

    def forward(
        self, x: Tensor, places: Places, states: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map x [rows, length, d] after states [units, rows, d]; return the states after it too."""
        x = x + self.channel_mixing_layer(self.channel_norm(x))
        mixed, ends = self.token_mixing_layer(self.token_norm(x), places, states)
        return x + mixed, ends


def _drawn(*shape: int) -> Tensor:
    drawn: Tensor = torch.randn(shape) * (2 / shape[-1]) ** 0.5
    return drawn
