"""Recurrent units in torch, over whole rows or from a state.

A unit is a decaying sum with weights on its inputs and outputs,

    y_t = α_out,t · Σ_{s≤t} decay^(t-s) · α_in,s · x_s + γ_t · x_t + β_t

with one scalar per head and position each. Nothing is ever divided by a weight, and decay is never
raised to a negative power.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 256
"""Tokens that one matrix spans."""


@dataclass
class Places:
    """Where the tokens of x [rows, length] stand."""

    positions: slice | Tensor
    """Their positions, i64[rows, length]; a slice where those of all rows are the same."""
    documents: Tensor | None = None
    """i64[rows, length], from 0 or 1 on: the document of its row that each token is of, where a row
    has several. Nothing is summed across their ends."""
    lengths: Tensor | None = None
    """i64[rows]: tokens of each row; what stands behind them is padding."""
    chunk: int = CHUNK
    """Tokens that one matrix spans, at least 2. With the length of x it is the published form
    (paper eq. 1-4), whose time and memory grow with length²."""

    def scalars(self, values: Tensor) -> Tensor:
        """Return values [H, n_ctx] at the positions, shaped to be multiplied with x."""
        return values.T[self.positions].unsqueeze(-1)


def split_documents(is_begin: Tensor, chunk: int = CHUNK) -> Places:
    """Return the places of documents that begin where bool [rows, length] says, and with a row."""
    columns = torch.arange(is_begin.shape[1], device=is_begin.device)
    begins = (columns * is_begin).cummax(1).values
    return Places(columns - begins, is_begin.cumsum(1), chunk=chunk)


class Units:
    """Runs the units of one mixer over x [rows, length, H, e], after the states that they had."""

    def __init__(self, places: Places, states: Tensor | None) -> None:
        """`states` are [units, rows, H * e], plain sums; None: rows begin at position 0."""
        self.places = places
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
        """Run the next unit; decay is f64[H], λ ** (1 / c). α that are None are 1."""
        places = self.places
        if self._states is not None:  # a step is computed as its state is kept
            x = x.to(torch.promote_types(x.dtype, torch.float32))
        inputs = x if alpha_in is None else self.scale(x, alpha_in)
        y = inputs  # which are the sums of one token
        if self._states is None or x.shape[1] > 1:
            y = decayed_sums(inputs, decay, places.chunk, places.documents)
        if self._states is not None:
            y = self._go_on(y, decay, next(self._states))
        if alpha_out is not None:
            y = self.scale(y, alpha_out)
        if gamma is not None:
            y = y + self.scale(x, gamma)
        return y if beta is None else y + places.scalars(beta).to(x.dtype)

    def scale(self, x: Tensor, scalars: Tensor) -> Tensor:
        return self.places.scalars(scalars).to(x.dtype) * x

    def ends(self) -> Tensor | None:
        """Return the states after the rows' last tokens, once all units have run."""
        return torch.stack(self._ends) if self._ends else None

    def _go_on(self, sums: Tensor, decay: Tensor, before: Tensor) -> Tensor:
        """Add the state before to the sums, and note the one after them."""
        start = before.view(len(before), 1, *sums.shape[2:]).to(sums.dtype)
        gaps = torch.arange(1, sums.shape[1] + 1, dtype=decay.dtype, device=decay.device)
        exact = (decay ** gaps[:, None]).unsqueeze(-1)
        rounded = exact.to(sums.dtype)
        # The rounding error of decay would add up over the steps, to 1e-5 after 1,000. It is less
        # than half an ulp of the state, so it is added to the smaller term first, or it would be
        # lost again.
        sums = sums + (exact - rounded).to(sums.dtype) * start + rounded * start
        end = sums[:, -1]
        if (lengths := self.places.lengths) is not None:
            rows = torch.arange(len(lengths), device=lengths.device)
            end = sums[rows, (lengths - 1).clamp(min=0)]
            end = torch.where(lengths[:, None, None] > 0, end, start[:, 0])
        self._ends.append(end.flatten(1).to(before.dtype))
        return sums


def decayed_sums(x: Tensor, decay: Tensor, chunk: int, documents: Tensor | None = None) -> Tensor:
    """Return Σ_{s≤t} decay^(t-s) · x_s for each t of x [rows, length, H, e]; decay is f64[H].

    Only tokens of the same document are summed. The sum of a chunk is carried into the next one, so
    time and memory are linear in length; what is carried is at least of float32.
    """
    rows, length, *heads = x.shape
    if length <= chunk:
        return _sums_within(x, _powers(decay, length).to(x.dtype), documents)
    assert chunk > 1, "or as many sums would be carried as there are tokens"
    x = F.pad(x, (0, 0, 0, 0, 0, -length % chunk)).view(rows, -1, chunk, *heads)
    powers = _powers(decay, chunk).to(x.dtype)
    if documents is not None:
        documents = F.pad(documents, (0, -length % chunk)).view(rows, -1, chunk)
    within = _sums_within(x, powers, documents)
    with torch.autocast(x.device.type, enabled=False):
        ends = within[:, :-1, -1]
        ends = ends.to(torch.promote_types(ends.dtype, torch.float32))
        last = None if documents is None else documents[:, :-1, -1]
        carried = F.pad(decayed_sums(ends, decay**chunk, chunk, last), (0, 0, 0, 0, 1, 0))
    gaps = torch.arange(1, chunk + 1, dtype=decay.dtype, device=decay.device)
    falling = (decay ** gaps[:, None]).unsqueeze(-1).to(x.dtype)
    over = carried.unsqueeze(2).to(x.dtype)
    if documents is not None and last is not None:
        goes_on = documents[:, 1:] == last.unsqueeze(2)  # as the last token of the chunk before
        over = over * F.pad(goes_on, (0, 0, 1, 0))[..., None, None]
    sums = within + falling * over
    return sums.flatten(1, 2)[:, :length]


def _sums_within(x: Tensor, powers: Tensor, documents: Tensor | None) -> Tensor:
    """Return the decayed sums of x [..., length, H, e], by powers [H, length, length]."""
    if documents is None:
        return torch.einsum("hts,...she->...the", powers, x)
    is_same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return torch.einsum("...hts,...she->...the", powers * is_same.unsqueeze(-3), x)


def _powers(decay: Tensor, length: int) -> Tensor:
    """Return decay ** (t - s) as [H, t, s]; 0 for s > t, where no power is taken."""
    gaps = torch.arange(length - 1, -1, -1, dtype=decay.dtype, device=decay.device)
    falling = F.pad(decay[:, None] ** gaps, (0, length - 1))
    return falling.unfold(-1, length, 1).flip(-2)
