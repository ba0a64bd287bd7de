"""Settings of experiments: flags that all have, and beside them each one's constants."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec

from srm.loadtest.records import RECORDS
from srm.settings import Command, build, read_settings, settings_in
from srm.training.settings import MOST_SEED, check_numbers


class ExperimentSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of every experiment.

    An experiment's own `Settings` add constants, which no flag sets: those of its record. What
    their base has are flags.
    """

    LEAST_SEEDS: ClassVar[int] = 2
    """Fewest seeds; two have a standard deviation."""
    output: Path = RECORDS
    """Folder that the record is written to."""
    results: Path = Path("runs/experiments")
    """Folder where the result of each case is kept; a case with a result there is not run again."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of weights, texts and samples; each case is run with each seed."""
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
        check_numbers(self, {})

    @property
    def name(self) -> str:
        """The experiment's name, which is its module's."""
        return type(self).__module__.rpartition(".")[2]

    def only(self, *names: str) -> dict[str, Any]:
        """Return the named settings as a dict, for another command that has them too."""
        return {name: getattr(self, name) for name in names}


Settings = TypeVar("Settings", bound=ExperimentSettings)


def configure(kind: type[Settings], argv: list[str], **constants: Any) -> Settings:
    """Return an experiment's settings as flags set them, with other constants where they are given.
    Raises ConfigError."""
    (base,) = kind.__bases__
    flags, own = ({setting.name for setting in settings_in(each)} for each in (base, kind))
    prog = f"python -m research.experiments {kind.__module__.rpartition('.')[2]}"
    given = read_settings((kind,), argv, Command(prog, private=frozenset(own - flags)))
    return build(kind, {**given, **constants})
