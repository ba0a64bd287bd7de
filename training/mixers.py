"""Token mixers in torch: every variant once, in two forms.

All are built from one kind of unit, a decaying sum with weights on its inputs and outputs,

    y_t = α_out,t · Σ_{s≤t} decay^(t-s) · α_in,s · x_s + γ_t · x_t + β_t

with one scalar per head and position each. A form knows how to run a unit: `Parallel` over whole
sequences as a lower-triangular matrix per head, `Recurrent` over one token and a state of plain
sums. Nothing is ever divided by a weight, and decay is never raised to a negative power.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from engine.config import ModelConfig
from engine.weights.tensors import DECAY_RANGE, mixer_shapes, projection_prefixes, scalar_prefixes


@dataclass(frozen=True)
class TorchMixerUnit:
    """One unit: H = heads, n = n_ctx. A column unit has α_in = 1, a row unit α_out = 1."""

    alpha_in: Tensor  # [H, n]
    alpha_out: Tensor  # [H, n]
    decay: Tensor  # f64[H]: λ ** (1 / c)
    beta: Tensor | None = None  # [H, n]
    gamma: Tensor | None = None  # [H, n]


class Form(Protocol):
    """A way to run units; x ends in [H, e]."""

    def run(self, unit: TorchMixerUnit, x: Tensor) -> Tensor: ...

    def at(self, scalars: Tensor) -> Tensor:
        """Return the scalars [H, n] at the positions of x, shaped to be multiplied with x."""
        ...


class Parallel:
    """Runs units over x [batch, length, H, e], from position 0 on."""

    def __init__(self, length: int) -> None:
        self._length = length

    def run(self, unit: TorchMixerUnit, x: Tensor) -> Tensor:
        matrix = self._powers(unit.decay).to(unit.alpha_in.dtype)
        matrix = unit.alpha_out[:, : self._length, None] * matrix
        matrix = matrix * unit.alpha_in[:, None, : self._length]
        mixed = torch.einsum("hts,bshe->bthe", matrix.to(x.dtype), x)
        return _finish(mixed, unit, x, self)

    def at(self, scalars: Tensor) -> Tensor:
        return scalars[:, : self._length].T.unsqueeze(-1)

    def _powers(self, decay: Tensor) -> Tensor:
        """Return decay ** (t - s) as [H, t, s]; 0 for s > t, where no power is taken."""
        gaps = torch.arange(self._length - 1, -1, -1, dtype=decay.dtype, device=decay.device)
        falling = F.pad(decay[:, None] ** gaps, (0, self._length - 1))
        return falling.unfold(-1, self._length, 1).flip(-2)


class Recurrent:
    """Runs units on x [batch, H, e] at one position, after state [units, batch, H * e]."""

    def __init__(self, position: int, state: Tensor) -> None:
        self._position = position
        self._states = iter(state)
        self._new_states: list[Tensor] = []

    def run(self, unit: TorchMixerUnit, x: Tensor) -> Tensor:
        before = next(self._states).view(x.shape)
        rounded = unit.decay.to(x.dtype)
        # The rounding error of decay would add up over the steps, to 1e-5 after 1,000. It is less
        # than half an ulp of the state, so it is added to the smaller term first, or it would be
        # lost again.
        left = (unit.decay - rounded).to(x.dtype)
        s = self.at(unit.alpha_in) * x + left[:, None] * before + rounded[:, None] * before
        self._new_states.append(s.flatten(-2))
        return _finish(self.at(unit.alpha_out) * s, unit, x, self)

    def at(self, scalars: Tensor) -> Tensor:
        return scalars[:, self._position, None]

    def new_state(self) -> Tensor:
        """Return the new state [units, batch, H * e], once every unit has run."""
        return torch.stack(self._new_states)


def _finish(y: Tensor, unit: TorchMixerUnit, x: Tensor, form: Form) -> Tensor:
    if unit.gamma is not None:
        y = y + form.at(unit.gamma).to(x.dtype) * x
    return y if unit.beta is None else y + form.at(unit.beta).to(x.dtype)


class TokenMixer(nn.Module):
    """The mixer that `config` names; parameters have the names and shapes of
    `engine.weights.tensors`.

    Heads are slices of the channels in order, of the projected input where there are projections.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        for name, shape in mixer_shapes(config).items():
            *path, leaf = name.split(".")
            module: nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(_initial(name, shape, config)))

    def forward(self, x: Tensor) -> Tensor:
        """Mix x [batch, length, d] to [batch, length, d], length ≤ n_ctx."""
        return self._run(x, Parallel(x.shape[1]))

    def step(self, x: Tensor, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Mix x [batch, d] with state [units, batch, d]; return output [batch, d] and new state."""
        form = Recurrent(position, state)
        return self._run(x, form), form.new_state()

    def _run(self, x: Tensor, form: Form) -> Tensor:
        if self.config.use_projections:
            x = self._project(x, projection_prefixes(self.config))
        heads = x.view(*x.shape[:-1], self.config.num_heads, self.config.head_dim)
        y = self._mix(heads, form).flatten(-2)
        return self._project(y, ["out_proj."]) if self.config.use_projections else y

    def _mix(self, x: Tensor, form: Form) -> Tensor:
        match self.config.mixer:
            case "row":
                return form.run(self._row(), x)
            case "column" | "column_heads":
                return form.run(self._column(), x)
            case "mixed" | "parallel" | "diagonal":
                return form.run(self._column_and_row_heads(), x)
            case "combined":
                alpha = self._alpha(row=1)
                column = TorchMixerUnit(torch.ones_like(alpha), alpha, self._decay(entry=1))
                return form.run(self._row(), x) + form.run(column, x)
            case "kernel":
                ones = torch.ones_like(self._beta())
                return self._taps(form.run(TorchMixerUnit(ones, ones, self._decay()), x), form)
            case "expanded":
                return form.run(self._column("2."), F.silu(form.run(self._column("0."), x)))

    def _column(self, stage: str = "") -> TorchMixerUnit:
        alpha = self._alpha(stage=stage)
        return TorchMixerUnit(torch.ones_like(alpha), alpha, self._decay(), self._beta(stage))

    def _row(self) -> TorchMixerUnit:
        alpha, decay = self._alpha(), self._decay(entry=0)
        if self.config.decay and self.config.combined_row_quirk:
            alpha, decay = alpha / self.config.decay_constant, self._decay(entry=0, constant=1)
        return TorchMixerUnit(alpha, torch.ones_like(alpha), decay, self._beta())

    def _column_and_row_heads(self) -> TorchMixerUnit:
        """Return a unit whose first half of the heads is column heads, the other half row heads."""
        alpha, half = self._alpha(), self.config.num_heads // 2
        ones = torch.ones_like(alpha[:half])
        alpha_in, alpha_out = torch.cat([ones, alpha[half:]]), torch.cat([alpha[:half], ones])
        gamma = None
        if self.config.mixer == "diagonal":  # δ instead of α weighs the newest token
            gamma = self._stacked("diag_weight") - alpha
        return TorchMixerUnit(alpha_in, alpha_out, self._decay(), self._beta(), gamma)

    def _taps(self, sums: Tensor, form: Form) -> Tensor:
        """Return channels j = β + Σ_i α_i · sums[j - (k - 1) + i], where sums below 0 are 0."""
        size, width = self.config.kernel_size, self.config.d_model
        padded = F.pad(sums, (size - 1, 0))
        y = form.at(self._beta()).to(sums.dtype)
        for i in range(size):
            y = y + form.at(self._alpha(row=i)).to(sums.dtype) * padded[..., i : i + width]
        return y

    def _alpha(self, row: int = 0, stage: str = "") -> Tensor:
        """Return one row of α, [H, n]: heads with two units have two, a kernel k, others one."""
        weight = self._stacked(stage + "weight")
        return weight.reshape(self.config.num_heads, -1, self.config.n_ctx)[:, row]

    def _beta(self, stage: str = "") -> Tensor:
        """Return β, [H, n]."""
        return self._stacked(stage + "bias").reshape(self.config.num_heads, self.config.n_ctx)

    def _decay(self, entry: int = -1, constant: int | None = None) -> Tensor:
        """Return the clipped λ ** (1 / c), f64[H]; with two λ and one unit, of the second λ."""
        heads = self.config.num_heads
        if not self.config.decay:
            return torch.ones(heads, dtype=torch.float64, device=next(self.parameters()).device)
        raw = self._stacked("decay_value")
        decay = raw.reshape(len(raw), -1)[:, entry].clamp(*DECAY_RANGE).double()
        return decay.expand(heads) ** (1 / (constant or self.config.decay_constant))

    def _stacked(self, name: str) -> Tensor:
        """Stack the scalars of that name over the scalar prefixes."""
        return torch.stack([self.get_parameter(p + name) for p in scalar_prefixes(self.config)])

    def _project(self, x: Tensor, prefixes: list[str]) -> Tensor:
        weight = torch.cat([self.get_parameter(prefix + "weight") for prefix in prefixes])
        bias = torch.cat([self.get_parameter(prefix + "bias") for prefix in prefixes])
        return F.linear(x, weight, bias)


def _initial(name: str, shape: tuple[int, ...], config: ModelConfig) -> Tensor:
    """Initialize as published, except that decays differ by head: some heads forget within words,
    one never does."""
    low, high = DECAY_RANGE
    if name.endswith("decay_value"):
        half = max(1, config.num_heads // 2)
        head = 0 if len(scalar_prefixes(config)) == 1 else int(name.split(".")[1])
        return torch.full(shape, high - (high - low) * (head % half) / half)
    if name.endswith("bias"):
        return torch.zeros(shape)
    return torch.randn(shape) * (1 if name.endswith("diag_weight") else (2 / shape[-1]) ** 0.5)
