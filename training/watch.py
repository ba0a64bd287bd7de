"""Texts that the model of a run writes on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from srm.training.instruments.record import Sample
from srm.training.loop import Run

SAMPLE_TOKENS = 48


@dataclass(frozen=True, slots=True)
class ShownSamples:
    """Has the model go on with a prompt every `every` updates, and shows it."""

    run: Run
    tokenizer: Tokenizer
    prompt: Sequence[int]
    n_ctx: int
    every: int
    last: int
    """Updates of the whole run, after which a text is shown too."""

    def __call__(self, done: int) -> None:
        """Sample at temperature 1, by a seed that is the number of updates."""
        if done % self.every and done != self.last:
            return
        random = torch.Generator().manual_seed(done)
        most = min(SAMPLE_TOKENS, max(1, self.n_ctx // 2))
        ids = list(self.prompt)[-max(1, self.n_ctx - most) :]
        begin = len(ids)
        while len(ids) < begin + most:
            chances = self.run.next_logits(ids).softmax(0)
            if not bool(chances.isfinite().all()):
                return  # the save that follows says what is wrong
            ids.append(int(torch.multinomial(chances, 1, generator=random)))
        decode = self.tokenizer.decode
        self.run.show(Sample(decode(ids[:begin]), decode(ids[begin:])))
