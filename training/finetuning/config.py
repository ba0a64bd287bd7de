"""SFTConfig: the settings of `srm train sft`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from srm.engine.config import DEMO_MODEL, find_model
from srm.training.settings import RunSettings, check_numbers


class SFTConfig(RunSettings, frozen=True):
    """Settings of `srm train sft`; the defaults are the paper's recipe for GSM8K."""

    model: Path = DEMO_MODEL
    """Folder of the model that training begins with: config.json, model.safetensors,
    tokenizer.json."""
    output: Path = Path("runs/sft")
    """Folder of the run and of the new model; an existing run is resumed."""
    train: tuple[Path, ...] = ()
    """Files .jsonl and .parquet whose rows have messages, prompt and completion, or question and
    answer."""
    evaluation: tuple[Path, ...] = ()
    """Files like those of `train` for evaluation; empty: rows of `train` are held back."""
    evaluation_share: float = 0.05
    """Fraction of the rows of `train` that is held back for evaluation where `evaluation` is
    empty."""
    evaluate_every: int = 0
    """Updates between two evaluations; 0: one evaluation an epoch."""
    shots: int = 0
    """Number of other rows of `train`, drawn with the seed, put before each prompt as examples."""
    max_length: int = 0
    """Most tokens of a row; longer rows are left out. 0: the model's context."""
    epochs: int = 4
    """Number of times that each row is trained on."""
    batch_rows: int = 16
    """Rows of one update, all processes together."""
    learning_rate: float = 1e-4
    """Peak learning rate: reached after the warm-up, then falling to 0 along a cosine."""
    warmup_share: float = 0.1
    """Fraction of the updates over which the learning rate rises."""
    seed: int = 0
    """Seed of the order of rows, the choice of rows held back and the choice of shots."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "model", find_model(self.model))
        least = dict.fromkeys(("epochs", "batch_rows", "micro_batches"), 1)
        check_numbers(self, least | {"shots": 0, "max_length": 0})
        if not 0 <= self.warmup_share <= 1:
            raise ValueError(f"warmup_share must lie in [0, 1], got {self.warmup_share}")
        if not 0 < self.evaluation_share < 1:
            raise ValueError(f"evaluation_share must lie in (0, 1), got {self.evaluation_share}")
