"""Batches of problems as token ids, and of items in epochs.

Batch i is a function of (seed, i) alone, so a run resumes exactly where it stopped, and no batch
needs the ones before it.

Most batches are chats of like lengths, one a row from its first token on, as a model is asked, and
train replies alone; behind each its row is empty. Every `WHOLE_EVERY`-th has whole contexts of
consecutive chats and trains every token, so that every position is trained and questions are known
too.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from srm.training.problems import countdown
from srm.training.problems.drawn import chats

Item = TypeVar("Item")
_Chat = list[tuple[int, int]]
"""Each token, and 1 in a reply, 0 before it."""

WHOLE_EVERY = 8
POOL = 4
"""Batches that are drawn at once, to take one of like lengths."""
MEAN_LENGTH = 64
"""Tokens of a chat, about."""
IGNORED = -100
"""Target of a token that the loss leaves out."""


class ProblemBatches:
    """Batches of about `tokens` tokens: inputs and targets, int64 [rows, length]."""

    def __init__(self, tokenizer: Tokenizer, end: int, seed: int, tokens: int, n_ctx: int) -> None:
        """`end` is the token behind each reply."""
        self._tokenizer, self._end = tokenizer, end
        self._seed = seed
        self._tokens = tokens
        self._n_ctx = n_ctx

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        seed = (self._seed << 32) + index
        if index % WHOLE_EVERY == WHOLE_EVERY - 1:
            stream = chain.from_iterable(self._encoded(seed))
            shape = max(1, self._tokens // self._n_ctx), self._n_ctx + 1
            ids = torch.tensor([id for id, _ in islice(stream, math.prod(shape))]).view(shape)
            return ids[:, :-1], ids[:, 1:]
        count = max(1, POOL * self._tokens // MEAN_LENGTH)
        drawn = sorted(islice(self._encoded(seed), count), key=len)
        whole = [row for row in drawn if len(row) <= self._n_ctx + 1]
        rows = self._of_like_lengths(whole or drawn[:1], random.Random(seed))
        length = min(len(rows[-1]), self._n_ctx + 1)
        inputs = torch.full((len(rows), length), self._end)
        targets = torch.full((len(rows), length), IGNORED)
        for i, row in enumerate(rows):
            ids, is_reply = torch.tensor(row[:length]).T
            inputs[i, : len(ids)] = ids
            targets[i, : len(ids)] = ids.where(is_reply.bool(), IGNORED)
        return inputs[:, :-1], targets[:, 1:]

    def _of_like_lengths(self, drawn: list[_Chat], random_: random.Random) -> list[_Chat]:
        """Return one of the batches that these make, the shortest first; all as likely."""
        batches: list[list[_Chat]] = [[]]
        for row in drawn:
            if batches[-1] and (len(batches[-1]) + 1) * len(row) > self._tokens:
                batches.append([])
            batches[-1].append(row)
        return random_.choice(batches)

    def _encoded(self, seed: int) -> Iterator[_Chat]:
        """Yield chats, each from its begin token to the end token of its last reply."""
        stream = chats(seed)
        while True:
            some = list(islice(stream, 64))
            turns = iter(
                encode(self._tokenizer, [turn for chat in some for turn in chat], self._end)
            )
            for chat in some:
                yield [
                    (id, is_reply)
                    for turn in islice(turns, len(chat))
                    for is_reply, ids in enumerate(turn)
                    for id in ids
                ]


class CountdownBatches:
    """Batches of about `tokens` tokens, a countdown puzzle a row and all of one size, of which the
    answers are learned: inputs and targets, int64 [rows, length]. None is held out."""

    def __init__(self, seed: int, tokens: int, form: countdown.Form) -> None:
        self._seed, self._tokens, self._form = seed, tokens, form

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.batch((self._seed, index), index % len(countdown.SIZES), is_held_out=False)

    def evaluation(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return batches of held-out puzzles, the same ones for every model of this form."""
        return [
            self.batch((1, index), index % len(countdown.SIZES), is_held_out=True)
            for index in range(count)
        ]

    def batch(self, seed: tuple[int, int], at: int, is_held_out: bool) -> tuple[Tensor, Tensor]:
        """Return puzzles of the size that is `at` that place."""
        size = countdown.SIZES[at]
        random, rows = np.random.default_rng(seed), max(1, self._tokens // (4 * size + 4))
        is_chain = self._form == "chain"
        solved = countdown.draw_split(random, rows, size, is_chain, is_held_out)
        ids, start, lengths = countdown.write(solved, self._form)
        written = torch.from_numpy(ids[:, : start + int(lengths.max())])
        places = torch.arange(written.shape[1])
        is_answer = (places >= start) & (places < start + torch.from_numpy(lengths)[:, None])
        return written[:, :-1], written.where(is_answer, IGNORED)[:, 1:]


class EpochBatches(Generic[Item]):
    """Batches of `size` items, each of which comes once an epoch, in an order drawn anew.

    A batch may span two epochs, so that all batches have `size` items.
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
    """Return the kinds of batches, each with those of the first `steps` steps that use it."""
    return {
        "replies in rows of their own": [step for step in range(steps) if (step + 1) % WHOLE_EVERY],
        "every token of whole contexts": range(WHOLE_EVERY - 1, steps, WHOLE_EVERY),
    }


def encode(
    tokenizer: Tokenizer, batch: list[tuple[str, str]], end: int
) -> list[tuple[list[int], list[int]]]:
    """Encode prompts, from the begin token, and solutions, to the end token."""
    prompts, solutions = zip(*batch, strict=True)
    begun = tokenizer.encode_batch_fast(prompts)
    ended = tokenizer.encode_batch_fast(solutions, add_special_tokens=False)
    return [(start.ids, [*other.ids, end]) for start, other in zip(begun, ended, strict=True)]
