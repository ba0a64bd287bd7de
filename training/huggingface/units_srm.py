"""Recurrent units in torch, over whole rows or from a state.

A unit is a decaying sum with weights on its inputs and outputs,

    y_t = α_out,t · Σ_{s≤t} decay^(t-s) · α_in,s · x_s + γ_t · x_t + β_t

with one scalar per head and position each. Nothing is ever divided by a weight, and decay is never
raised to a negative power.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

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
    run: RunUnit | None = None
    """What runs each unit over rows without states in the place of operations of torch."""


class Unit(NamedTuple):
    """The scalars of one unit. α that are None are 1; β and γ that are None are 0."""

    decay: Tensor
    """λ ** (1 / c), f64[..., H]."""
    alpha_in: Tensor | None = None
    """[..., H, n_ctx]; where it is placed, [..., length, H, 1] or [..., rows, length, H, 1]."""
    alpha_out: tuple[Tensor, ...] = ()
    """α of as many channels, the last of which is the channel itself and the others stand before
    it; none: 1."""
    beta: Tensor | None = None
    gamma: Tensor | None = None
    levels: tuple[Level, ...] = ()
    """What its sums are made of, once it is placed."""


RunUnit = Callable[[Tensor, Unit, Places], Tensor]
Level = tuple[Tensor, Tensor | None]
"""Powers of the decay between the tokens of a chunk, [..., H, t, s], and to each of its tokens from
the chunk before, [..., t, H, 1]; None: there is one chunk."""


def place_units(
    stacked: list[Unit], places: Places, length: int, dtype: torch.dtype
) -> list[list[Unit]]:
    """Return by mixer the units of those whose scalars are stacked along the first axis, all placed
    at once for rows of that length and dtype; 0: for single tokens, which have no sums."""

    placed = []
    for decay, alpha_in, alpha_out, beta, gamma, _ in stacked:
        rows = [row for row in (alpha_in, *alpha_out, beta, gamma) if row is not None]
        values = torch.stack(rows).mT[..., places.positions, :].unsqueeze(-1).to(dtype)
        row = iter(values.unbind())
        unit = Unit(
            decay,
            None if alpha_in is None else next(row),
            tuple(next(row) for _ in alpha_out),
            None if beta is None else next(row),
            None if gamma is None else next(row),
            _levels(decay, length, places.chunk, dtype) if length and places.run is None else (),
        )
        placed.append(unit)
    return [[Unit(*unit) for unit in units] for units in _by_mixer(placed)]


def _by_mixer(stacked: Any) -> Iterator[Any]:
    """Divide tensors in nested sequences along their first axis; what is empty is all mixers'."""
    if isinstance(stacked, Tensor):
        return iter(stacked.unbind())
    if not stacked:
        return repeat(stacked)
    return zip(*map(_by_mixer, stacked), strict=False)


def split_documents(is_begin: Tensor, chunk: int = CHUNK) -> Places:
    """Return the places of documents that begin where bool [rows, length] says, and with a row."""
    columns = torch.arange(is_begin.shape[1], device=is_begin.device)
    begins = (columns * is_begin).cummax(1).values
    return Places(columns - begins, is_begin.cumsum(1), chunk=chunk)


class Units:
    """Runs the units of one mixer over x [rows, length, H, e], after the states that they had."""

    def __init__(
        self, places: Places, states: Tensor | None, placed: list[Unit] | None = None
    ) -> None:
        """`states` are [units, rows, H * e], plain sums; None: rows begin at position 0. `placed`
        units are those of x; None: the mixer places its own."""
        self.places, self.placed = places, placed
        self._states = states
        self._ends: list[Tensor] = []
        self._run = 0

    def place(self, stacked: list[Unit], x: Tensor) -> None:
        """Place units at x, stacked for its mixer alone."""
        is_step = self._states is not None and x.shape[1] == 1
        length = 0 if is_step else x.shape[1]
        (self.placed,) = place_units(stacked, self.places, length, self._dtype(x))

    def _dtype(self, x: Tensor) -> torch.dtype:
        """Return that in which x is summed: a step is computed as its state is kept."""
        return x.dtype if self._states is None else torch.promote_types(x.dtype, torch.float32)

    def run(self, x: Tensor) -> Tensor:
        """Run the next unit."""
        assert self.placed is not None
        unit = self.placed[self._run]
        if self.places.run is not None:
            assert self._states is None
            self._run += 1
            return self.places.run(x, unit, self.places)
        decay, alpha_in, alpha_out, beta, gamma, levels = unit
        x = x.to(self._dtype(x))
        inputs = x if alpha_in is None else alpha_in.to(x.dtype) * x
        y = decayed_sums(inputs, levels, self.places.documents)
        if self._states is not None:
            y = self._go_on(y, decay, self._states[self._run])
        self._run += 1
        if alpha_out:
            y = _weighted(y, alpha_out)
        if gamma is not None:
            y = y + gamma.to(x.dtype) * x
        return y if beta is None else y + beta.to(x.dtype)

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


def _weighted(y: Tensor, alpha: Sequence[Tensor]) -> Tensor:
    """Return the sums of y's channels times α, the last of which is of a channel itself and the
    others of those before it, which are 0 before the first."""
    *others, own = alpha
    weighted = own.to(y.dtype) * y
    width = y.shape[-1]
    if others:
        padded = F.pad(y, (len(others), 0))
        for first, scalars in enumerate(others):
            weighted = weighted + scalars.to(y.dtype) * padded[..., first : first + width]
    return weighted


def decayed_sums(x: Tensor, levels: Sequence[Level], documents: Tensor | None) -> Tensor:
    """Return Σ_{s≤t} decay^(t-s) · x_s for each t of x [rows, length, H, e]; `levels` are of the
    decay and the length.

    Only tokens of the same document are summed. The sum of a chunk is carried into the next one, so
    time and memory are linear in length; what is carried is at least of float32.
    """
    rows, length, *heads = x.shape
    if not levels:  # of one token
        return x
    (powers, falling), *carried_levels = levels
    if falling is None:
        return _sums_within(x, powers.to(x.dtype), documents)
    chunk = powers.shape[-1]
    if rest := -length % chunk:
        x = F.pad(x, (0, 0, 0, 0, 0, rest))
    x = x.view(rows, -1, chunk, *heads)
    if documents is not None:
        documents = F.pad(documents, (0, rest)).view(rows, -1, chunk)
    within = _sums_within(x, powers.to(x.dtype), documents)
    with torch.autocast(x.device.type, enabled=False):
        ends = within[:, :-1, -1]
        ends = ends.to(torch.promote_types(ends.dtype, torch.float32))
        last = None if documents is None else documents[:, :-1, -1]
        carried = F.pad(decayed_sums(ends, carried_levels, last), (0, 0, 0, 0, 1, 0))
    over = carried.unsqueeze(2).to(x.dtype)
    if documents is not None and last is not None:
        goes_on = documents[:, 1:] == last.unsqueeze(2)  # as the last token of the chunk before
        over = over * F.pad(goes_on, (0, 0, 1, 0))[..., None, None]
    sums = within + falling.to(x.dtype) * over
    return sums.flatten(1, 2)[:, :length]


def _levels(decay: Tensor, length: int, chunk: int, dtype: torch.dtype) -> tuple[Level, ...]:
    """Return what sums over so many tokens of that dtype are made of, in chunks; then the same of
    what is carried between them."""
    if length <= chunk:
        return ((_powers(decay, length).to(dtype), None),)
    assert chunk > 1, "or as many sums would be carried as there are tokens"
    gaps = torch.arange(1, chunk + 1, dtype=decay.dtype, device=decay.device)
    falling = (decay.unsqueeze(-2) ** gaps[:, None]).unsqueeze(-1).to(dtype)
    wide = torch.promote_types(dtype, torch.float32)
    chunks = (length - 1) // chunk  # that are carried
    carried = _levels(decay**chunk, chunks, chunk, wide) if chunks > 1 else ()
    return (_powers(decay, chunk).to(dtype), falling), *carried


def _sums_within(x: Tensor, powers: Tensor, documents: Tensor | None) -> Tensor:
    """Return the decayed sums of x [..., length, H, e], by powers [H, length, length]."""
    if documents is None:
        return torch.einsum("hts,...she->...the", powers, x)
    is_same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return torch.einsum("...hts,...she->...the", powers * is_same.unsqueeze(-3), x)


def _powers(decay: Tensor, length: int) -> Tensor:
    """Return decay ** (t - s) as [..., H, t, s]; 0 for s > t, where no power is taken."""
    gaps = torch.arange(length - 1, -1, -1, dtype=decay.dtype, device=decay.device)
    falling = F.pad(decay.unsqueeze(-1) ** gaps, (0, length - 1))
    return falling.unfold(-1, length, 1).flip(-2)
