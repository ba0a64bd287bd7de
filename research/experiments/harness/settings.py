"""Settings that every experiment has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from srm.loadtest.records import RECORDS
from srm.training.settings import MOST_FLOAT, MOST_SEED, check_numbers
from srm.training.text.tokenizer import MIN_VOCAB_SIZE

LEAST = {"threads": 0, "further_rates": 0, "max_vocab_size": MIN_VOCAB_SIZE}
"""Least values of the settings that need not be at least 1."""


class ExperimentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of every experiment."""

    LEAST_SEEDS: ClassVar[int] = 2
    """Fewest seeds; two have a standard deviation."""
    output: Path = RECORDS
    """Folder that the record is written to."""
    results: Path = Path("runs/experiments")
    """Folder where the result of each case is kept; a case with a result there is not run again."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights and of the order of texts; each case is run with each seed."""
    threads: int = 1
    """CPU threads; 0: all cores."""

    def __post_init__(self) -> None:
        seeds = set(self.seeds)
        least = self.LEAST_SEEDS
        if len(seeds) < max(least, len(self.seeds)) or not all(0 <= n <= MOST_SEED for n in seeds):
            raise ValueError(
                f"seeds must be {'two' if least == 2 else 'one'} or more different numbers of "
                f"0 … 2**64 - 1, got {self.seeds}"
            )
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name.startswith("learning_rate"):
                rates = value if isinstance(value, tuple) else (value,)
                if not rates or not all(0 < rate < math.inf for rate in rates):
                    raise ValueError(f"{name} must be above 0 and finite, got {value}")
                if max(rates) > MOST_FLOAT:
                    raise ValueError(f"{name} must be at most {MOST_FLOAT:g}, got {value}")
            elif isinstance(value, int) and value < (least := LEAST.get(name, 1)):
                raise ValueError(f"{name} must be at least {least}, got {value}")
        check_numbers(self, {})

    def only(self, *names: str) -> dict[str, Any]:
        """Return the named settings as a dict, for another command that has them too."""
        return {name: getattr(self, name) for name in names}


class ModelSettings(ExperimentSettings, frozen=True):
    """Settings of experiments that make models: their size, and the length of their training."""

    steps: int = 256
    """Updates in each case."""
    rows: int = 8
    """Sequences in one update."""
    d_model: int = 128
    """Width of the models."""
    num_layers: int = 4
    """Number of blocks of the models."""
    n_ctx: int = 256
    """Tokens in a sequence."""
