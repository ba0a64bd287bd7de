"""Batches of problems as token ids, and of items in epochs.

Batch i is a function of (seed, i) alone, so a run resumes exactly where it stopped, and no batch
needs the ones before it.

Every row is full of consecutive problems, of which the last one is cut, so nothing is padded and
the model has seen several problems in one context. Most batches have short rows, so that many
problems are the first of theirs, and train answers alone; every `WHOLE_EVERY`-th has whole contexts
and trains every token, so that every position is trained and questions are known too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from srm.training.problems import countdown, regex_tokenizer, regexes
from srm.training.problems.drawn import examples

Item = TypeVar("Item")

WHOLE_EVERY = 4
SHORT = 128
"""Length of short rows, in tokens."""
IGNORED = -100
"""Target of a token that the loss leaves out."""


class ProblemBatches:
    """Batches of about `tokens` tokens: inputs and targets, int64 [rows, length]."""

    def __init__(self, tokenizer: Tokenizer, end: int, seed: int, tokens: int, n_ctx: int) -> None:
        """`end` is the token behind each problem."""
        self._tokenizer, self._end = tokenizer, end
        self._seed = seed
        self._tokens = tokens
        self._n_ctx = n_ctx

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        is_whole = index % WHOLE_EVERY == WHOLE_EVERY - 1
        length = self._n_ctx if is_whole else min(SHORT, self._n_ctx)
        stream = self._encoded((self._seed << 32) + index)
        rows, targets = [], []
        for _ in range(max(1, self._tokens // length)):
            ids: list[int] = []
            is_answer: list[bool] = []
            while len(ids) <= length:
                prompt, solution = next(stream)
                ids += prompt + solution
                is_answer += [is_whole] * len(prompt) + [True] * len(solution)
            row = torch.tensor(ids[: length + 1])
            rows.append(row[:-1])
            targets.append(row[1:].where(torch.tensor(is_answer[1 : length + 1]), IGNORED))
        return torch.stack(rows), torch.stack(targets)

    def _encoded(self, seed: int) -> Iterator[tuple[list[int], list[int]]]:
        stream = examples(seed)
        while True:
            yield from encode(self._tokenizer, list(islice(stream, 64)), self._end)


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


class RegexBatches:
    """Batches of about `tokens` tokens, rows of tasks of a regex from examples that are computed
    each as if it stood alone: inputs and targets, int64 [rows, n_ctx]. None is held out.

    Regexes are learned, and the last string of each prompt: what the strings before it say of it,
    the regex says too.
    """

    def __init__(self, seed: int, tokens: int, n_ctx: int) -> None:
        self._seed, self._rows, self._n_ctx = seed, max(1, tokens // n_ctx), n_ctx

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._drawn(f"{self._seed} {index}", regexes.MATCHES, is_held_out=False)

    def evaluation(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return batches of held-out tasks, the same ones for every model; regexes alone count."""
        numbers, mark = map(str, range(count)), regexes.ANSWER
        return [self._drawn(number, mark, is_held_out=True) for number in numbers]

    def _drawn(self, seed: str, mark: str, is_held_out: bool) -> tuple[Tensor, Tensor]:
        """Draw as many tasks as there is room for, and put each into the first row that has room,
        long ones first; a few short ones find none. What is behind the last `mark` is learned."""
        ids = regex_tokenizer.IDS
        begin, end = ids[regex_tokenizer.BEGIN], ids[regex_tokenizer.END]
        written: list[list[int]] = []
        left = self._rows * self._n_ctx
        for task in regexes.tasks(seed, is_held_out):
            written.append([begin, *(ids[name] for name in task.prompt + task.regex), end])
            left -= len(written[-1])
            if left <= 0:
                break
        inputs = torch.full((self._rows, self._n_ctx), end)
        targets = torch.full_like(inputs, IGNORED)
        lengths = [0] * self._rows
        for tokens in sorted(written, key=len, reverse=True):
            places = (row for row, at in enumerate(lengths) if at + len(tokens) <= self._n_ctx)
            if (row := next(places, None)) is None:
                continue
            learned = len(tokens) - tokens[::-1].index(ids[mark])
            first, last = lengths[row], lengths[row] + len(tokens)
            inputs[row, first:last] = torch.tensor(tokens)
            targets[row, first + learned - 1 : last - 1] = inputs[row, first + learned : last]
            lengths[row] = last
        return inputs, targets


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
        "answers in short rows": [step for step in range(steps) if (step + 1) % WHOLE_EVERY],
        "every token of whole contexts": range(WHOLE_EVERY - 1, steps, WHOLE_EVERY),
    }


def encode(
    tokenizer: Tokenizer, batch: list[tuple[str, str]], end: int
) -> list[tuple[list[int], list[int]]]:
    """Encode prompts, from the begin token, and solutions, to the end token."""
    prompts, solutions = zip(*batch, strict=True)
    begun = tokenizer.encode_batch(prompts)
    ended = tokenizer.encode_batch(solutions, add_special_tokens=False)
    return [(start.ids, [*other.ids, end]) for start, other in zip(begun, ended, strict=True)]
