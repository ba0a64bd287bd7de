"""The two forms of a recurrent unit: over whole sequences, and one token at a time.

A unit is a decaying sum with weights on its inputs and outputs,

    y_t = α_out,t · Σ_{s≤t} decay^(t-s) · α_in,s · x_s + γ_t · x_t + β_t

with one scalar per head and position each. `Parallel` runs it over whole sequences, as products
with lower-triangular matrices a head; `Recurrent` over one token and a state of plain sums. Nothing
is ever divided by a weight, and decay is never raised to a negative power.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 256
"""Tokens that one matrix spans in the parallel form."""


@dataclass(frozen=True)
class TorchMixerUnit:
    """A recurrent unit: H = heads, n = n_ctx. A column unit has α_in = 1, a row unit α_out = 1."""

    alpha_in: Tensor  # [H, n]
    alpha_out: Tensor  # [H, n]
    decay: Tensor  # f64[H]: λ ** (1 / c)
    beta: Tensor | None = None  # [H, n]
    gamma: Tensor | None = None  # [H, n]


class Form(Protocol):
    """A way to run units; x ends in [H, e]."""

    def run(self, unit: TorchMixerUnit, x: Tensor) -> Tensor: ...

    def shape_scalars(self, scalars: Tensor) -> Tensor:
        """Return the scalars [H, n] at the positions of x, shaped to be multiplied with x."""
        ...


class Parallel:
    """Runs units over x [batch, length, H, e], from position 0 on.

    One matrix covers `chunk` ≥ 2 tokens; their decayed sum is carried into the next chunk, so time
    and memory are linear in length. With chunk = length it is the published form (paper eq. 1-4).
    """

    def __init__(self, length: int, chunk: int = CHUNK) -> None:
        self._length = length
        self._chunk = chunk

    def run(self, unit: TorchMixerUnit, x: Tensor) -> Tensor:
        sums = decayed_sums(
            self.shape_scalars(unit.alpha_in).to(x.dtype) * x, unit.decay, self._chunk
        )
        return _finish(self.shape_scalars(unit.alpha_out).to(sums.dtype) * sums, unit, x, self)

    def shape_scalars(self, scalars: Tensor) -> Tensor:
        return scalars[:, : self._length].T.unsqueeze(-1)


def decayed_sums(x: Tensor, decay: Tensor, chunk: int) -> Tensor:
    """Return Σ_{s≤t} decay^(t-s) · x_s for each t of x [batch, length, H, e]; decay is f64[H].

    What is carried from chunk to chunk is at least of float32.
    """
    batch, length, *heads = x.shape
    if length <= chunk:
        return torch.einsum("hts,bshe->bthe", _powers(decay, length).to(x.dtype), x)
    assert chunk > 1, "or as many sums would be carried as there are tokens"
    x = F.pad(x, (0, 0, 0, 0, 0, -length % chunk)).view(batch, -1, chunk, *heads)
    within = torch.einsum("hts,bcshe->bcthe", _powers(decay, chunk).to(x.dtype), x)
    with torch.autocast(x.device.type, enabled=False):
        ends = within[:, :-1, -1]
        ends = ends.to(torch.promote_types(ends.dtype, torch.float32))
        carried = F.pad(decayed_sums(ends, decay**chunk, chunk), (0, 0, 0, 0, 1, 0))
    gaps = torch.arange(1, chunk + 1, dtype=decay.dtype, device=decay.device)
    falling = (decay ** gaps[:, None]).unsqueeze(-1).to(x.dtype)
    sums = within + falling * carried.unsqueeze(2).to(x.dtype)
    return sums.flatten(1, 2)[:, :length]


def _powers(decay: Tensor, length: int) -> Tensor:
    """Return decay ** (t - s) as [H, t, s]; 0 for s > t, where no power is taken."""
    gaps = torch.arange(length - 1, -1, -1, dtype=decay.dtype, device=decay.device)
    falling = F.pad(decay[:, None] ** gaps, (0, length - 1))
    return falling.unfold(-1, length, 1).flip(-2)


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
        s = (
            self.shape_scalars(unit.alpha_in) * x
            + left[:, None] * before
            + rounded[:, None] * before
        )
        self._new_states.append(s.flatten(-2))
        return _finish(self.shape_scalars(unit.alpha_out) * s, unit, x, self)

    def shape_scalars(self, scalars: Tensor) -> Tensor:
        return scalars[:, self._position, None]

    def new_state(self) -> Tensor:
        """Return the new state [units, batch, H * e], once every unit has run."""
        return torch.stack(self._new_states)


def _finish(y: Tensor, unit: TorchMixerUnit, x: Tensor, form: Form) -> Tensor:
    if unit.gamma is not None:
        y = y + form.shape_scalars(unit.gamma).to(x.dtype) * x
    return y if unit.beta is None else y + form.shape_scalars(unit.beta).to(x.dtype)
