"""Batches whose rows are of several token files, each with a share of its own.

The file of each row is drawn at random. The rows of a file come in its own epochs, each window once
in one, however often it is drawn. Batch i is a function of (files, shares, seed, i) alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srm.training.text.packed_batches import PackedBatches

_BLOCK = 1_024
"""Batches whose files are drawn at once."""


class MixedBatches:
    """Inputs and targets, int64 [rows, length]: ids, and the ids that follow them."""

    def __init__(
        self, sources: Sequence[PackedBatches], weights: Sequence[float], rows: int, seed: int
    ) -> None:
        """`weights` above 0, one for each source, are their shares times any number."""
        self._sources, self._rows, self._seed = sources, rows, seed
        self._shares = np.array(weights) / np.sum(weights)
        self._begun = [np.zeros(len(sources), np.int64)]
        self._block, self._drawn = -1, np.empty((0, rows), np.int64)

    def __len__(self) -> int:
        """Return for how many batches no window is expected to come twice, at least 1."""
        windows = np.array([source.windows for source in self._sources])
        return max(1, int((windows / self._shares).min() / self._rows))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        block, place = divmod(index, _BLOCK)
        while len(self._begun) <= block:
            drawn = self._draw(len(self._begun) - 1)
            self._begun.append(self._begun[-1] + self._count(drawn))
        drawn = self._draw(block)
        before = self._begun[block] + self._count(drawn[:place])
        counts = self._count(drawn[place])
        parts = [
            source.following(int(first), int(count))
            for source, first, count in zip(self._sources, before, counts, strict=True)
        ]
        inputs, targets = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def _draw(self, block: int) -> npt.NDArray[np.int64]:
        """Return the number of the source of each row of a block's batches, [batches, rows]."""
        if block != self._block:
            random, shape = np.random.default_rng((self._seed, block)), (_BLOCK, self._rows)
            drawn = random.choice(len(self._shares), size=shape, p=self._shares)
            self._block, self._drawn = block, drawn
        return self._drawn

    def _count(self, drawn: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return np.bincount(drawn.ravel(), minlength=len(self._sources))
