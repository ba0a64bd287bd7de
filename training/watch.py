"""What a run leaves on its way besides its state: models, and texts that they write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from srm.engine.config import ModelConfig
from srm.training.checkpoint import save_model
from srm.training.instruments.record import Sample
from srm.training.loop import Run

SAMPLE_TOKENS = 48


@dataclass(frozen=True, slots=True)
class ModelSeries:
    """Keeps the model every `every` updates, in a folder of its own that can be served."""

    run: Run
    config: ModelConfig
    text_files: Path
    """Folder with the model's tokenizer and chat template."""
    output: Path
    every: int
    """0: never."""
    is_first: bool = True
    """Whether this process is the one that writes."""

    def __call__(self, done: int, many: int = 1) -> None:
        """Keep the model after `done` updates, the last `many` of which were not looked at."""
        if not self.every or done % self.every >= many:
            return
        weights, folder = self.run.last_weights(), self.output / f"step-{done}"
        if self.is_first:
            save_model(self.config, weights, folder, self.text_files)


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
