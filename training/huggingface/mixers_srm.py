"""The token mixers of `modeling_srm.py`, which goes beside a checkpoint together with this file.

Every variant is built of recurrent units, which run over whole rows and from a state alike.
`training/mixers.py` has the same function with the projections as plain parameters; here they are
modules, so that LoRA finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

CHUNK = 256
"""Tokens that one matrix spans in the parallel form."""
DECAY_RANGE = (0.9, 1.0)
"""Range of λ: one outside it is used as the nearer end."""


@dataclass
class Places:
    """Positions of the columns of packed rows."""

    first: Tensor | None  # i64[rows]: position of each row's first column; None: 0
    lengths: Tensor | None  # i64[rows]; None: as long as the input

    def scalars(self, values: Tensor, length: int) -> Tensor:
        """Return values [H, n_ctx] at the positions of the columns, [rows or 1, length, H, 1]."""
        if self.first is None:
            return values[None, :, :length].mT.unsqueeze(-1)
        columns = self.first[:, None] + torch.arange(length, device=values.device)
        at_columns = values[:, columns.clamp(max=values.shape[1] - 1)]  # beyond: padding of a row
        return at_columns.permute(1, 2, 0).unsqueeze(-1)


class Units:
    """Runs the recurrent units of one mixer over packed rows, after the states that they had.

        y_t = α_out,t · Σ_{s≤t} decay^(t-s) · α_in,s · x_s + γ_t · x_t + β_t

    with one scalar per head and position; x is [rows, length, H, e]. Sums are at least of float32,
    under autocast too, and decay is never raised to a negative power.
    """

    def __init__(self, places: Places, states: Tensor | None) -> None:
        self._places = places
        self._states = None if states is None else iter(states)
        self._ends: list[Tensor] = []

    def run(
        self,
        x: Tensor,
        decay: Tensor,
        alpha_in: Tensor | None = None,
        alpha_out: Tensor | None = None,
        beta: Tensor | None = None,
        gamma: Tensor | None = None,
    ) -> Tensor:
        """α that are None are 1; decay is f64[H]."""
        inputs = x if alpha_in is None else self.scale(x, alpha_in)
        y = decayed_sums(inputs, decay)
        if self._states is not None:
            y = self._go_on(y, decay, next(self._states))
        if alpha_out is not None:
            y = self.scale(y, alpha_out)
        if gamma is not None:
            y = y + self.scale(x, gamma)
        return y if beta is None else y + self._places.scalars(beta, x.shape[1])

    def scale(self, x: Tensor, scalars: Tensor) -> Tensor:
        return x * self._places.scalars(scalars, x.shape[1])

    def ends(self) -> Tensor | None:
        """Return the states [units, rows, d] after the rows' last tokens, once all have run."""
        return torch.stack(self._ends) if self._ends else None

    def _go_on(self, sums: Tensor, decay: Tensor, before: Tensor) -> Tensor:
        """Add the state before to the sums, and note the one after them."""
        start = before.view(len(before), 1, *sums.shape[2:]).to(sums.dtype)
        gaps = torch.arange(1, sums.shape[1] + 1, dtype=decay.dtype, device=decay.device)
        exact = (decay ** gaps[:, None]).unsqueeze(-1)
        rounded = exact.to(sums.dtype)
        # The rounding error of decay would add up over the steps; added first, it is not lost.
        sums = sums + (exact - rounded).to(sums.dtype) * start + rounded * start
        end = sums[:, -1]
        if (lengths := self._places.lengths) is not None:
            rows = torch.arange(len(lengths), device=lengths.device)
            end = sums[rows, (lengths - 1).clamp(min=0)]
            end = torch.where(lengths[:, None, None] > 0, end, start[:, 0])
        self._ends.append(end.flatten(1).to(before.dtype))
        return sums


def decayed_sums(x: Tensor, decay: Tensor) -> Tensor:
    """Return Σ_{s≤t} decay^(t-s) · x_s for each t of x [batch, length, H, e]; decay is f64[H].

    One matrix spans CHUNK tokens, and the sum is carried from one chunk to the next.
    """
    batch, length, *heads = x.shape
    if length <= CHUNK:
        return torch.einsum("hts,bshe->bthe", _powers(decay, length).to(x.dtype), x)
    x = F.pad(x, (0, 0, 0, 0, 0, -length % CHUNK)).view(batch, -1, CHUNK, *heads)
    within = torch.einsum("hts,bcshe->bcthe", _powers(decay, CHUNK).to(x.dtype), x)
    carried = F.pad(decayed_sums(within[:, :-1, -1], decay**CHUNK), (0, 0, 0, 0, 1, 0))
    gaps = torch.arange(1, CHUNK + 1, dtype=decay.dtype, device=decay.device)
    falling = (decay ** gaps[:, None]).unsqueeze(-1).to(x.dtype)
    return (within + falling * carried.unsqueeze(2)).flatten(1, 2)[:, :length]


def _powers(decay: Tensor, length: int) -> Tensor:
    """Return decay ** (t - s) as [H, t, s]; 0 for s > t, where no power is taken."""
    gaps = torch.arange(length - 1, -1, -1, dtype=decay.dtype, device=decay.device)
    falling = F.pad(decay[:, None] ** gaps, (0, length - 1))
    return falling.unfold(-1, length, 1).flip(-2)


class SRMScalars(nn.Module):
    """α, β, λ and δ of one head, or of a mixer's all, by their names in a checkpoint."""

    initial_decay = 1.0

    def add_scalars(self, config: PreTrainedConfig, head: int = 0) -> None:
        mixer, n_ctx = config.mixer, config.n_ctx
        if mixer == "expanded":
            for stage in ("0", "2"):
                part = nn.Module()
                part.weight = nn.Parameter(torch.empty(1, n_ctx))
                part.bias = nn.Parameter(torch.empty(1, n_ctx))
                self.add_module(stage, part)
            return
        several = {"parallel": config.num_heads, "combined": 2, "kernel": config.kernel_size}
        rows = several.get(mixer, 1)
        self.weight = nn.Parameter(torch.empty(rows, n_ctx))
        self.bias = nn.Parameter(torch.empty((rows, n_ctx) if mixer == "parallel" else n_ctx))
        if config.decay:
            is_pair = mixer in {"combined", "parallel", "kernel"}
            self.decay_value = nn.Parameter(torch.empty((2, 1) if is_pair else 1))
            low, high = DECAY_RANGE  # training begins with heads that forget soon or never
            half = max(1, config.num_heads // 2)
            self.initial_decay = high - (high - low) * (head % half) / half
        if mixer == "diagonal":
            self.diag_weight = nn.Parameter(torch.empty(1))


class SRMTokenMixer(SRMScalars):
    """The mixer that the configuration names. Heads are slices of the channels in order."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config = config
        width, heads = config.d_model, config.num_heads
        if config.is_headless:
            self.add_scalars(config)
        else:
            count = 1 if config.mixer == "parallel" else heads
            holders = [SRMScalars() for _ in range(count)]
            for head, holder in enumerate(holders):
                holder.add_scalars(config, head)
            is_single = config.mixer == "parallel"
            self.mixer_heads = holders[0] if is_single else nn.ModuleList(holders)
        if config.use_projections:
            if config.mixer == "parallel":
                self.in_proj = nn.Linear(width, width)
            else:
                self.proj_head = nn.ModuleList(
                    nn.Linear(width, width // heads) for _ in range(heads)
                )
            self.out_proj = nn.Linear(width, width)

    def forward(
        self, x: Tensor, places: Places, states: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Mix x [rows, length, d] after states [units, rows, d]; return the states after it too."""
        config = self.config
        projected = x
        if config.use_projections:
            each = [self.in_proj] if config.mixer == "parallel" else self.proj_head
            projected = torch.cat([project(x) for project in each], dim=-1)
        units = Units(places, states)
        with torch.autocast(x.device.type, enabled=False):
            wide = projected.to(torch.promote_types(projected.dtype, torch.float32))
            heads = wide.reshape(*wide.shape[:-1], config.num_heads, -1)
            mixed = self._mix(heads, units).flatten(-2).to(projected.dtype)
        return self.out_proj(mixed) if config.use_projections else mixed, units.ends()

    def _mix(self, x: Tensor, units: Units) -> Tensor:
        match self.config.mixer:
            case "row":
                return units.run(x, self._decay(), alpha_in=self._alpha(), beta=self._beta())
            case "column" | "column_heads":
                return units.run(x, self._decay(), alpha_out=self._alpha(), beta=self._beta())
            case "mixed" | "parallel" | "diagonal":
                return self._mix_halves(x, units)
            case "combined":
                row, decay = self._alpha(row=0), self._decay(entry=0)
                if self.config.decay and self.config.combined_row_quirk:
                    row, decay = row / self.config.decay_constant, self._decay(0, constant=1)
                y = units.run(x, decay, alpha_in=row, beta=self._beta())
                return y + units.run(x, self._decay(entry=1), alpha_out=self._alpha(row=1))
            case "kernel":
                return self._taps(units.run(x, self._decay()), units)
        for stage in ("0", "2"):  # expanded
            alpha, beta = self._alpha(stage=stage), self._beta(stage)
            x = units.run(x if stage == "0" else F.silu(x), self._decay(), None, alpha, beta)
        return x

    def _mix_halves(self, x: Tensor, units: Units) -> Tensor:
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
        y = units.scale(torch.ones_like(sums), self._beta())
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
            holders = [self.mixer_heads] if is_single else list(self.mixer_heads.children())
        return torch.stack([getattr(each.get_submodule(stage), name) for each in holders])
