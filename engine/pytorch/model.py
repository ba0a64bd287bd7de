"""One step of the model in PyTorch: the recurrence of `engine.weights.weights` over many rows.

The states of a row's tokens are found together, in log2 of their number passes (Hillis and Steele,
1986): after k of them each has the sum over the 2**k tokens up to its own, weighted by powers of
the decay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from srm.engine.weights.weights import Weights, named_tensors


@dataclass(frozen=True, slots=True)
class Rows:
    """A step's R rows and T tokens, on the device."""

    token_ids: Tensor  # i64[T] -1 where there is none, and the logits are not finite
    positions: Tensor  # i64[T] of each token
    reads: Tensor  # i64[R] slots
    writes: Tensor  # i64[R] slots
    firsts: Tensor | None = None  # i64[R] each row's first token; None if each has only one
    lasts: Tensor | None = None  # i64[R]
    offsets: Tensor | None = None  # i64[T] tokens of its row before it
    longest: int = 1
    """Tokens of the longest row."""
    num_logits: int = 0
    """Tokens from the first one on that pass the output head."""


def put(array: np.ndarray[Any, np.dtype[Any]], device: str | torch.device) -> Tensor:
    """Copy an array to the device."""
    return torch.tensor(array, device=device)


class TorchModel:
    """The weights on one device, and the step that they make."""

    def __init__(self, weights: Weights, dtype: torch.dtype, device: str) -> None:
        """Scalars of recurrences, and states and logits, are float32; all else is of this dtype."""
        self.config = weights.config
        self._dtype, self._device = dtype, device
        self._tensors = {
            name: tensor.to(device) for name, tensor in host_tensors(weights, dtype).items()
        }

    def use(self, tensors: dict[str, Tensor]) -> None:
        """Use these of `host_tensors` from now on. They are copied to where the old ones are, which
        captured steps read."""
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)

    def step(self, rows: Rows, states: Tensor) -> Tensor:
        """Feed the tokens, move the states f32[S, state_width] of the slots; return logits
        f32[num_logits, V]."""
        embedding = self._tensors["embedding"]
        x = embedding.index_select(0, rows.token_ids.clamp(min=0))
        x = torch.where(rows.token_ids[:, None] < 0, torch.nan, x)
        unit = 0
        for layer in range(self.config.num_layers):
            own = f"layers.{layer}."
            normed = self._norm(own + "channel_norm", x)
            inner = functional.silu(self._linear(own + "up", normed))
            x = x + self._linear(own + "down", inner)
            mixed = self._norm(own + "token_norm", x)
            if self.config.use_projections:
                mixed = self._linear(own + "proj_in", mixed)
            mixed, unit = self._mix(own, mixed, rows, states, unit)
            if self.config.use_projections:
                mixed = self._linear(own + "proj_out", mixed)
            x = x + mixed
        return (x[: rows.num_logits] @ self._tensors["head"]).float()

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._tensors[f"{name}_weight"], self._tensors[f"{name}_bias"]
        return functional.layer_norm(x, x.shape[-1:], weight, bias)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return torch.addmm(self._tensors[f"{name}_bias"], x, self._tensors[f"{name}_weight"])

    def _mix(
        self, layer: str, x: Tensor, rows: Rows, states: Tensor, unit: int
    ) -> tuple[Tensor, int]:
        """The layer's units, as the mixer joins them, and the number of the unit after them."""
        y = self._run_unit(f"{layer}units.0.", x, rows, states, unit)
        if self.config.mixer == "combined":
            return y + self._run_unit(f"{layer}units.1.", x, rows, states, unit + 1), unit + 2
        if self.config.mixer == "expanded":
            source = functional.silu(y)
            return self._run_unit(f"{layer}units.1.", source, rows, states, unit + 1), unit + 2
        return y, unit + 1

    def _run_unit(self, name: str, x: Tensor, rows: Rows, states: Tensor, unit: int) -> Tensor:
        width, num_heads = self.config.d_model, self.config.num_heads

        def scalars(kind: str) -> Tensor:  # f32[T, H, 1]
            return self._tensors[name + kind].index_select(0, rows.positions)[..., None]

        own = states[:, unit * width : (unit + 1) * width]
        starts = rows.positions if rows.firsts is None else rows.positions[rows.firsts]
        before = torch.where(starts[:, None] > 0, own.index_select(0, rows.reads), 0.0)
        values = x.float().view(-1, num_heads, width // num_heads)
        s = scalars("alpha_in") * values
        decay = self._tensors[name + "decay"]
        left = decay.float()[:, None] * before.view(-1, num_heads, width // num_heads)
        if rows.firsts is None or rows.lasts is None or rows.offsets is None:
            after = s = s + left
        else:
            s = _scan(s.index_add(0, rows.firsts, left), decay, rows.offsets, rows.longest)
            after = s.index_select(0, rows.lasts)
        own.index_copy_(0, rows.writes, after.flatten(1))
        y = scalars("alpha_out") * s + scalars("beta")
        if name + "gamma" in self._tensors:
            y = y + scalars("gamma") * values
        y = y.flatten(1)
        if name + "taps" in self._tensors:
            y = self._convolve(name, y, rows.positions)
        return y.to(self._dtype)

    def _convolve(self, name: str, y: Tensor, positions: Tensor) -> Tensor:
        """Weigh channels j - k + 1 … j by the taps of each token's position."""
        taps = self._tensors[name + "taps"].index_select(0, positions)
        padded = functional.pad(y.to(self._dtype).float(), (taps.shape[1] - 1, 0))
        result = self._tensors[name + "taps_beta"].index_select(0, positions)[:, None]
        for tap in range(taps.shape[1]):
            result = result + taps[:, tap, None] * padded[:, tap : tap + y.shape[1]]
        return result


def _scan(s: Tensor, decay: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Return the states f32[T, H, W] of tokens from what each adds: a token's state is that and the
    decay f64[H] times the state before it in its row."""
    step = 1
    while step < longest:
        is_in_row = (offsets[step:] >= step)[:, None, None]
        power = (decay**step).float()[:, None]
        s = torch.cat([s[:step], s[step:] + torch.where(is_in_row, power * s[:-step], 0.0)])
        step *= 2
    return s


def host_tensors(weights: Weights, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of the weights by its name, on the host, in the dtypes that the step wants.

    Scalars of a position are f32[n, …]; a decay is f64[H], the sum of its two parts.
    """
    results = {}
    for name, array in named_tensors(weights):
        if ".units." not in name:
            results[name] = torch.tensor(array, dtype=dtype)
        elif name.endswith(".decay"):
            results[name] = torch.from_numpy(array.astype(np.float64).sum(0))
        else:  # by position last, but for `taps_beta`, which has only that
            results[name] = torch.from_numpy(np.ascontiguousarray(array.T))
    return results
