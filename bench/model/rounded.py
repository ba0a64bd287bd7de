"""The engine's step in torch with a device's roundings, to measure the error of narrow dtypes.

Runs on the folded weights, op by op as `engine.device.model` joins them. All arithmetic is float32;
where an op of the step graph reads or writes a tensor of a narrow dtype, the values are rounded to
it. So a matrix product has narrow operands, is summed in float32 and rounded once. The mixer's
scalars, decay above all, stay float32 whatever the precision.

No op but the recurrence reads another position, so many positions go through a layer together: the
roundings are those of decoding token by token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.steps.batch import F32
from engine.weights.weights import MixerUnit, Weights, named_tensors

EPSILON = 1e-5
"""The constant that a layer norm adds to the variance."""


@dataclass(frozen=True)
class Precision:
    """The dtype of every kind of tensor that a step reads or writes."""

    weights: torch.dtype = torch.float32
    """Matrices, biases, layer norms and the embedding; not the mixer's scalars."""
    operands: torch.dtype = torch.float32
    """The input of a matrix product."""
    activations: torch.dtype = torch.float32
    """The outputs of ops: norms, products, products plus biases, SiLU, the last unit of a layer."""
    units: torch.dtype = torch.float32
    """The output of the first of two units, and a kernel's sums before its taps."""
    residual: torch.dtype = torch.float32
    """The stream that every block adds to."""
    logits: torch.dtype = torch.float32
    """The logits that sampler and scores read."""
    state: torch.dtype = torch.float32
    """A unit's sums, between one token and the next."""


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest value of `dtype`, ties to even; return float32."""
    return x if dtype == torch.float32 else x.to(dtype).float()


class RoundedModel:
    """A model at one precision. T positions, B sequences, d channels, L layers with U units."""

    def __init__(self, weights: Weights, precision: Precision) -> None:
        self._config = weights.config
        self._precision = precision
        self._weights = {
            name: rounded(torch.from_numpy(value), precision.weights)
            for name, value in named_tensors(weights)
            if ".units." not in name
        }
        self._units = [
            [Unit(unit, weights.config.d_model) for unit in layer.units] for layer in weights.layers
        ]

    def empty_state(self, batch: int) -> Tensor:
        """Return the zero state f32[L, U, B, d] before position 0."""
        config = self._config
        return torch.zeros(config.num_layers, config.units_per_layer, batch, config.d_model)

    def run(self, ids: Tensor, state: Tensor, position: int = 0) -> Tensor:
        """Feed int64 [T, B] from `position` on; return logits f32[T, B, V]. Updates `state`."""
        x = rounded(F.embedding(ids, self._weights["embedding"]), self._precision.residual)
        for index, layer_state in enumerate(state):
            x = self._mix_channels(index, x)
            x = self._mix_tokens(index, x, layer_state, position)
        head = rounded(x, self._precision.operands) @ self._weights["head"]
        return rounded(head, self._precision.logits)

    def _mix_channels(self, index: int, x: Tensor) -> Tensor:
        inner = self._written(F.silu(self._linear(index, "up", self._norm(index, "channel", x))))
        return self._added(self._linear(index, "down", inner), x)

    def _mix_tokens(self, index: int, x: Tensor, state: Tensor, position: int) -> Tensor:
        precision, projects = self._precision, self._config.use_projections
        units = self._units[index]
        run = [partial(unit.run, position=position, dtype=precision.state) for unit in units]
        y = self._norm(index, "token", x)
        if projects:
            y = self._linear(index, "proj_in", y)
        match self._config.mixer:
            case "combined":
                first = rounded(run[0](y, state[0]), precision.units)
                y = first + run[1](y, state[1])
            case "expanded":
                first = F.silu(run[0](y, state[0]))
                y = run[1](rounded(first, precision.units), state[1])
            case "kernel":
                sums = rounded(run[0](y, state[0]), precision.units)
                y = units[0].tap(sums, position)
            case _:
                y = run[0](y, state[0])
        if projects:
            y = self._linear(index, "proj_out", self._written(y))
        return self._added(y, x)

    def _norm(self, index: int, name: str, x: Tensor) -> Tensor:
        weight, bias = (self._of(index, f"{name}_norm_{part}") for part in ("weight", "bias"))
        return self._written(F.layer_norm(x, [len(weight)], weight, bias, EPSILON))

    def _linear(self, index: int, name: str, x: Tensor) -> Tensor:
        product = rounded(x, self._precision.operands) @ self._of(index, f"{name}_weight")
        return self._written(self._written(product) + self._of(index, f"{name}_bias"))

    def _written(self, x: Tensor) -> Tensor:
        return rounded(x, self._precision.activations)

    def _added(self, y: Tensor, residual: Tensor) -> Tensor:
        return rounded(y + residual, self._precision.residual)

    def _of(self, index: int, name: str) -> Tensor:
        return self._weights[f"layers.{index}.{name}"]


@dataclass(frozen=True)
class Unit:
    """A recurrent unit, H heads. The scalars are those of `engine.weights.weights.MixerUnit`."""

    scalars: MixerUnit
    width: int
    """The number of channels d, equally divided among the H heads."""

    def run(self, x: Tensor, state: Tensor, position: int, dtype: torch.dtype) -> Tensor:
        """Map f32[T, B, d] to f32[T, B, d] from `position` on; updates the state [B, d] in place.

        The state is rounded to `dtype` between tokens; outputs use the unrounded sum.
        """
        given = self._at("alpha_in", x, position) * x
        decay, rest = (self._spread(part) for part in self.scalars.decay)
        sums = torch.empty_like(x)
        for new, row in zip(sums, given, strict=True):
            # float32's rounding error of decay is added to the smaller term, or it would be lost.
            torch.addcmul(torch.addcmul(row, rest, state), decay, state, out=new)
            state.copy_(rounded(new, dtype))
        y = self._at("alpha_out", x, position) * sums + self._at("beta", x, position)
        return y if self.scalars.gamma is None else y + self._at("gamma", x, position) * x

    def tap(self, sums: Tensor, position: int) -> Tensor:
        """Return f32[T, B, d]: channel j from neighbours j - (k - 1) … j, 0 left of the first."""
        assert self.scalars.taps is not None and self.scalars.taps_beta is not None
        size, here = len(self.scalars.taps), slice(position, position + len(sums))
        padded = F.pad(sums, (size - 1, 0))
        y = torch.from_numpy(self.scalars.taps_beta[here])[:, None, None]
        for i, tap in enumerate(self.scalars.taps):
            y = y + torch.from_numpy(tap[here])[:, None, None] * padded[..., i : i + self.width]
        return y

    def _at(self, name: str, x: Tensor, position: int) -> Tensor:
        """Return the scalars f32[T, 1, d] at the positions of x."""
        scalars: F32 = getattr(self.scalars, name)
        return self._spread(scalars[:, position : position + len(x)]).T[:, None]

    def _spread(self, scalars: F32) -> Tensor:
        """Repeat the scalars of a head for each of its channels: [H, …] -> [d, …]."""
        return torch.from_numpy(scalars).repeat_interleave(self.width // len(scalars), dim=0)
