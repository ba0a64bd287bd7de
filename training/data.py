"""Batches of problems as token ids, and of items in epochs.

Batch i is a function of (seed, i) alone, so a run resumes exactly where it stopped, and no batch
needs the ones before it.

Most batches hold one problem per row, right-padded; every `PACKED_EVERY`-th fills whole contexts
with consecutive problems, so that every position is trained and the model has seen several problems
in one context.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from training.tasks import Problem, problems
from training.text.tokenizer import END_ID

Item = TypeVar("Item")

PACKED_EVERY = 8
IGNORED = -100
"""The target that cross-entropy skips."""


class ProblemBatches:
    """Batches of about `tokens` tokens: inputs and targets, int64 [rows, length]."""

    def __init__(self, tokenizer: Tokenizer, seed: int, tokens: int, n_ctx: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._tokens = tokens
        self._n_ctx = n_ctx
        self._row_length = min(64, n_ctx)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index % PACKED_EVERY == PACKED_EVERY - 1:
            return self._packed(index)
        count = self._tokens // self._row_length
        drawn = islice(problems("train", (self._seed << 32) + index), count)
        encoded = encode(self._tokenizer, list(drawn))
        rows = [torch.tensor(ids[: self._row_length + 1]) for ids in encoded]
        inputs = pad_sequence([row[:-1] for row in rows], batch_first=True, padding_value=END_ID)
        return inputs, pad_sequence([row[1:] for row in rows], True, IGNORED)

    def _packed(self, index: int) -> tuple[Tensor, Tensor]:
        count = max(1, self._tokens // self._n_ctx)
        wanted = count * (self._n_ctx + 1)
        stream = problems("train", (self._seed << 32) + index)
        ids: list[int] = []
        while len(ids) < wanted:
            for row in encode(self._tokenizer, list(islice(stream, 64))):
                ids += row
        rows = torch.tensor(ids[:wanted]).view(count, self._n_ctx + 1)
        return rows[:, :-1], rows[:, 1:]


class EpochBatches(Generic[Item]):
    """Batches of `size` items, each of which comes once an epoch, in an order drawn anew.

    A batch may lie in two epochs, so all have as many items.
    """

    def __init__(self, items: Sequence[Item], size: int, seed: int) -> None:
        self._items, self._size, self._seed = items, size, seed
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def __getitem__(self, index: int) -> list[Item]:
        places = range(index * self._size, (index + 1) * self._size)
        return [self._at(*divmod(place, len(self._items))) for place in places]

    def _at(self, epoch: int, place: int) -> Item:
        if epoch != self._epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(len(self._items))
            self._epoch, self._order = epoch, order
        return self._items[int(self._order[place])]


def problem_kinds(steps: int) -> dict[str, Sequence[int]]:
    """Return which of so many steps have which kind of batch."""
    return {
        "one problem per row": [step for step in range(steps) if (step + 1) % PACKED_EVERY],
        "whole contexts of problems": range(PACKED_EVERY - 1, steps, PACKED_EVERY),
    }


def encode(tokenizer: Tokenizer, batch: list[Problem]) -> list[list[int]]:
    """Encode prompt and solution of each problem, from the begin token to the end token."""
    texts = [problem.prompt + problem.solution for problem in batch]
    return [[*encoding.ids, END_ID] for encoding in tokenizer.encode_batch(texts)]
