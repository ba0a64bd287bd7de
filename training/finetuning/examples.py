"""Encodes rows as token ids, marks those that are trained on, and makes batches.

Batch i is a function of (examples, seed, i) alone, so a run resumes exactly where it stopped and
several processes agree on it without a word.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from srm.errors import ConfigError
from srm.server.text.text import Text
from srm.training.data import IGNORED, EpochBatches
from srm.training.finetuning.conversations import RowPiece, RowText

BETWEEN = "\n\n"
"""Text between two examples, and between the last one and the prompt, as in lm-eval."""


class Example(NamedTuple):
    """One row: token ids int32 [length], and bool [length] that marks the ones trained on."""

    ids: npt.NDArray[np.int32]
    is_target: npt.NDArray[np.bool_]


def with_shots(
    rows: Sequence[RowText], others: Sequence[RowText], shots: int, seed: int, setting: str
) -> list[RowText]:
    """Put `shots` other rows, drawn with the seed, before each prompt; never the row itself.

    Raises ConfigError where there are too few others, and for chats.
    """
    if not shots:
        return [*rows]
    if any(row.is_chat for row in (*rows, *others)):
        raise ConfigError(f"shots must be 0 where rows of {setting} have messages, got {shots}")
    if shots >= len(others):
        raise ConfigError(f"shots must be less than the {len(others)} rows of train, got {shots}")
    with_examples = []
    for number, row in enumerate(rows):
        rng = np.random.default_rng((seed, number))
        drawn = [others[place] for place in rng.choice(len(others), shots + 1, replace=False)]
        chosen = [token for token in drawn if token is not row][:shots]
        before = ["".join(piece.text for piece in shot.pieces) for shot in chosen]
        prompt, *rest = row.pieces
        whole = RowPiece(BETWEEN.join([*before, prompt.text]), False)
        with_examples.append(row._replace(pieces=(whole, *rest)))
    return with_examples


def encode(rows: Sequence[RowText], text: Text) -> list[Example]:
    """Return the rows as token ids.

    Each piece is tokenized by itself, as the server does with prompts. The first piece of a row
    that is no chat gets what the tokenizer adds, such as a begin token. A row ends with the end
    token.
    """
    first = [row.pieces[0].text for row in rows if not row.is_chat]
    others = [piece.text for row in rows for piece in row.pieces[not row.is_chat :]]
    begun, rest = iter(text.encode(first)), iter(text.encode(others, adds_special=False))
    end = text.model.end_id
    examples = []
    for row in rows:
        sources = [rest if row.is_chat else begun, *[rest] * (len(row.pieces) - 1)]
        ids = [np.frombuffer(next(source), np.int32) for source in sources]
        if end not in ids[-1]:
            ids[-1] = np.append(ids[-1], np.int32(end))
        marks = [
            np.full(len(part), piece.is_target) for part, piece in zip(ids, row.pieces, strict=True)
        ]
        examples.append(Example(np.concatenate(ids), np.concatenate(marks)))
    return examples


def fitting(examples: Sequence[Example], most: int, setting: str) -> list[Example]:
    """Return the examples of at most `most` tokens. Raises ConfigError if there are none."""
    ones = [example for example in examples if len(example.ids) <= most]
    if not ones:
        least = min(len(example.ids) for example in examples)
        raise ConfigError(
            f"{setting}: every row is longer than max_length = {most} tokens; the shortest has "
            f"{least}: raise max_length, or lower shots"
        )
    return ones


def digest(*parts: Sequence[Example]) -> str:
    """Return the SHA-256 of all token ids and marks."""
    hasher = hashlib.sha256()
    for examples in parts:
        hasher.update(len(examples).to_bytes(8, "little"))
        for ids, is_target in examples:
            hasher.update(len(ids).to_bytes(8, "little") + ids.tobytes() + is_target.tobytes())
    return hasher.hexdigest()


def padded(examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, int64 [rows, length]; targets that are not trained on are
    IGNORED."""
    ids = [torch.from_numpy(example.ids.astype(np.int64)) for example in examples]
    inputs = pad_sequence([row[:-1] for row in ids], batch_first=True)
    targets = [
        row[1:].masked_fill(~torch.from_numpy(example.is_target[1:]), IGNORED)
        for row, example in zip(ids, examples, strict=True)
    ]
    return inputs, pad_sequence(targets, batch_first=True, padding_value=IGNORED)


def in_order(examples: Sequence[Example], rows: int) -> list[tuple[Tensor, Tensor]]:
    """Return all examples in batches of `rows`. The last batch is filled up with rows without
    targets, so that every process has equally many."""
    batches = []
    for begin in range(0, len(examples), rows):
        some = examples[begin : begin + rows]
        filling = some[-1]._replace(is_target=np.zeros_like(some[-1].is_target))
        batches.append(padded([*some, *[filling] * (rows - len(some))]))
    return batches


class ExampleBatches:
    """Inputs and targets, int64 [rows, length], right-padded, of examples in epochs."""

    def __init__(self, examples: Sequence[Example], rows: int, seed: int) -> None:
        self._batches = EpochBatches(examples, rows, seed)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return padded(self._batches[index])
