"""Text that every machine with Python has: the sources of its standard library, as token ids."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from srm.training.text.packed_batches import PackedBatches
from srm.training.text.token_file import Ids
from srm.training.text.tokenizer import END_ID, train_tokenizer

HELD_OUT_EVERY = 10
"""One file in this many, in the order of their names, is held out for evaluation."""
EVALUATION_TOKENS = 65_536
"""Approximate number of held-out tokens to evaluate on, drawn in windows."""


@dataclass(frozen=True)
class Corpus:
    """Token ids to train on and to evaluate with."""

    training: Ids
    held_out: Ids
    vocab_size: int
    sha256: str
    """Hash that identifies the texts, which differ between versions of Python."""

    def batches(self, rows: int, n_ctx: int, seed: int) -> PackedBatches:
        """Return batches to train on, int64 [rows, n_ctx] each."""
        return PackedBatches(self.training, rows, n_ctx, seed)

    def evaluation(self, rows: int, n_ctx: int) -> list[tuple[Tensor, Tensor]]:
        """Return batches of held-out text, the same ones for every model."""
        batches = PackedBatches(self.held_out, rows, n_ctx, seed=0)
        count = max(1, EVALUATION_TOKENS // (rows * n_ctx))
        return [batches[index] for index in range(min(count, len(batches)))]


def standard_library(vocab_size: int) -> Corpus:
    """Read the modules that are files of the standard library, with a tokenizer trained on them."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text("utf-8") for path in paths]
    held_out, training = texts[::HELD_OUT_EVERY], texts.copy()
    del training[::HELD_OUT_EVERY]
    tokenizer = train_tokenizer(training, vocab_size)

    def encoded(some: list[str]) -> Ids:
        rows = (
            np.array([*encoding.ids, END_ID], np.uint16)
            for encoding in tokenizer.encode_batch(some)
        )
        return np.concatenate(list(rows))

    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    return Corpus(encoded(training), encoded(held_out), tokenizer.get_vocab_size(), digest)
