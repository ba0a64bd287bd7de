"""Token mixers in torch: every variant, built of the units that `forms.py` runs in two forms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from srm.engine.config import ModelConfig
from srm.engine.weights.tensors import (
    DECAY_RANGE,
    mixer_shapes,
    projection_prefixes,
    scalar_prefixes,
)
from srm.training.forms import CHUNK, Documents, Form, Parallel, Recurrent, TorchMixerUnit


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

    def forward(self, x: Tensor, chunk: int = CHUNK, documents: Documents | None = None) -> Tensor:
        """Mix x [batch, length, d] to [batch, length, d], length ≤ n_ctx."""
        return self._run(x, Parallel(x.shape[1], chunk, documents))

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
        y = form.shape_scalars(self._beta()).to(sums.dtype)
        for i in range(size):
            y = (
                y
                + form.shape_scalars(self._alpha(row=i)).to(sums.dtype) * padded[..., i : i + width]
            )
        return y

    def _alpha(self, row: int = 0, stage: str = "") -> Tensor:
        """Return one row of α, [H, n]. Heads with two units have two rows, kernels `kernel_size`,
        others one."""
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
