"""Batches of whole windows of a token file, each window once an epoch, in an order drawn anew.

Batch i is a function of (file, seed, i) alone, so a run resumes exactly where it stopped and
several processes agree on it without a word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srm.errors import ConfigError
from srm.training.text.token_file import Ids


class PackedBatches:
    """Inputs and targets, int64 [rows, length]: ids, and the ids that follow them."""

    def __init__(
        self,
        ids: Ids,
        rows: int,
        length: int,
        seed: int,
        end: int | None = None,
        name: str = "texts",
    ) -> None:
        """With `end`, the token behind each document, windows begin with documents. Raises
        ConfigError, which calls them by this name, unless the ids fill a batch."""
        self._ids = ids
        self._rows, self._length, self._seed = rows, length, seed
        self._begins = np.arange((len(ids) - 1) // length) * length
        if end is not None:
            self._begins = _document_windows(ids, length, end)
        self.windows = len(self._begins)
        """Number of windows, each once an epoch."""
        self._epoch, self._order = -1, np.empty(0, np.int64)
        if self.windows < rows:
            raise ConfigError(
                f"{name}: {len(ids):,} tokens make {self.windows} windows of {length}, and a batch "
                f"takes {rows}: give more text, or lower batch_tokens or n_ctx"
            )

    def __len__(self) -> int:
        """Return how many whole batches an epoch has."""
        return self.windows // self._rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        epoch, batch = divmod(index, len(self))
        order = self._order_of(epoch)
        return self._rows_of(order[batch * self._rows : (batch + 1) * self._rows])

    def following(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` rows behind the first `first` ones, of as many epochs as that takes."""
        places = np.arange(first, first + count)
        epochs = places // self.windows
        windows = np.empty(count, np.int64)
        for epoch in np.unique(epochs):
            is_its = epochs == epoch
            windows[is_its] = self._order_of(int(epoch))[places[is_its] % self.windows]
        return self._rows_of(windows)

    def _order_of(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(self.windows)
            self._epoch, self._order = epoch, order
        return self._order

    def _rows_of(self, windows: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        begins = self._begins[windows]
        taken = self._ids[begins[:, None] + np.arange(self._length + 1)]
        ids = torch.from_numpy(taken.astype(np.int64))
        return ids[:, :-1], ids[:, 1:]


def _document_windows(ids: Ids, length: int, end: int) -> npt.NDArray[np.int64]:
    """Return where windows begin that together have every token but for a rest at the end: with the
    last document that begins in the window before, or where that ends if it is one document."""
    documents = np.concatenate([[0], np.flatnonzero(ids == end) + 1])
    begins, place = [], 0
    while place + length < len(ids):
        begins.append(place)
        last = int(documents[np.searchsorted(documents, place + length, "right") - 1])
        place = last if last > place else place + length
    return np.array(begins, np.int64)
