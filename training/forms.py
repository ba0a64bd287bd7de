"""The two forms of a recurrent unit: over whole sequences, and one token at a time.

A unit is a decaying sum with weights on its inputs and outputs,

    y_t = α_out,t · Σ_{s≤t} decay^(t-s) · α_in,s · x_s + γ_t · x_t + β_t

with one scalar per head and position each. `Parallel` runs it over whole sequences, as products
with lower-triangular matrices a head; `Recurrent` over one token and a state of plain sums. Nothing
is ever divided by a weight, and decay is never raised to a negative power.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

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


class Documents(NamedTuple):
    """Which document of its row each token is of, and where in it, int64 [batch, length] each."""

    numbers: Tensor
    """From 0 or 1 on, one more with each document."""
    positions: Tensor
    """From 0 on, anew with each document."""


def split_documents(is_begin: Tensor) -> Documents:
    """Return the documents that begin where bool [batch, length] says, and with a row."""
    places = torch.arange(is_begin.shape[1], device=is_begin.device)
    begins = (places * is_begin).cummax(1).values
    return Documents(is_begin.cumsum(1), places - begins)


class Parallel:
    """Runs units over x [batch, length, H, e], from position 0 on.

    One matrix covers `chunk` ≥ 2 tokens; their decayed sum is carried into the next chunk, so time
    and memory are linear in length. With chunk = length it is the published form (paper eq. 1-4).
    With `documents`, each is computed as if it stood alone: nothing is summed across their ends,
    and positions begin anew.
    """

    def __init__(self, length: int, chunk: int = CHUNK, documents: Documents | None = None) -> None:
        self._length = length
        self._chunk = chunk
        self._documents = documents

    def run(self, unit: TorchMixerUnit, x: Tensor) -> Tensor:
        numbers = None if self._documents is None else self._documents.numbers
        sums = decayed_sums(
            self.shape_scalars(unit.alpha_in).to(x.dtype) * x, unit.decay, self._chunk, numbers
        )
        return _finish(self.shape_scalars(unit.alpha_out).to(sums.dtype) * sums, unit, x, self)

    def shape_scalars(self, scalars: Tensor) -> Tensor:
        if self._documents is not None:
            return scalars.T[self._documents.positions].unsqueeze(-1)
        return scalars[:, : self._length].T.unsqueeze(-1)


def decayed_sums(x: Tensor, decay: Tensor, chunk: int, numbers: Tensor | None = None) -> Tensor:
    """Return Σ_{s≤t} decay^(t-s) · x_s for each t of x [batch, length, H, e]; decay is f64[H].

    With `numbers` int64 [batch, length], which do not fall, only tokens of the same number are
    summed. What is carried from chunk to chunk is at least of float32.
    """
    batch, length, *heads = x.shape
    if length <= chunk:
        return _sums_within(x, _powers(decay, length).to(x.dtype), numbers)
    assert chunk > 1, "or as many sums would be carried as there are tokens"
    x = F.pad(x, (0, 0, 0, 0, 0, -length % chunk)).view(batch, -1, chunk, *heads)
    powers = _powers(decay, chunk).to(x.dtype)
    if numbers is not None:
        numbers = F.pad(numbers, (0, -length % chunk)).view(batch, -1, chunk)
    within = _sums_within(x, powers, numbers)
    with torch.autocast(x.device.type, enabled=False):
        ends = within[:, :-1, -1]
        ends = ends.to(torch.promote_types(ends.dtype, torch.float32))
        last = None if numbers is None else numbers[:, :-1, -1]
        carried = F.pad(decayed_sums(ends, decay**chunk, chunk, last), (0, 0, 0, 0, 1, 0))
    gaps = torch.arange(1, chunk + 1, dtype=decay.dtype, device=decay.device)
    falling = (decay ** gaps[:, None]).unsqueeze(-1).to(x.dtype)
    over = carried.unsqueeze(2).to(x.dtype)
    if numbers is not None and last is not None:
        goes_on = numbers[:, 1:] == last.unsqueeze(2)  # as the last token of the chunk before
        over = over * F.pad(goes_on, (0, 0, 1, 0))[..., None, None]
    sums = within + falling * over
    return sums.flatten(1, 2)[:, :length]


def _sums_within(x: Tensor, powers: Tensor, numbers: Tensor | None) -> Tensor:
    """Return the decayed sums of x [..., length, H, e], by powers [H, length, length]."""
    if numbers is None:
        return torch.einsum("hts,...she->...the", powers, x)
    is_same = numbers.unsqueeze(-1) == numbers.unsqueeze(-2)
    return torch.einsum("...hts,...she->...the", powers * is_same.unsqueeze(-3), x)


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
