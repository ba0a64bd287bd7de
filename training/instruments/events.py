"""Where the numbers of a run go besides its log: TensorBoard and Weights & Biases, whose packages
are not installed with ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from srm.errors import ConfigError
from srm.files import read_file
from srm.training.text.whole_files import write_whole

_MAKERS = {"tensorboard": ("torch.utils.tensorboard", "SummaryWriter"), "wandb": ("wandb", "init")}
"""By setting, which has the name of its package: the module and what is called."""
_RUN_ID = "wandb-run-id"


class Events(Protocol):
    """The methods of torch's SummaryWriter that are used."""

    def add_scalar(self, name: str, value: float, step: int) -> None: ...

    def flush(self) -> None: ...


def check_events(settings: Any) -> None:
    """Raise ConfigError if `tensorboard` or `wandb` is true and its package is not installed."""
    for name in _MAKERS:
        if getattr(settings, name):
            _maker(name)


def events_in(folder: Path, done: int, settings: Any, config: Mapping[str, Any]) -> list[Events]:
    """Return the writers that `settings` want for the run in a folder, which has made so many
    updates; `config` describes it.

    TensorBoard's are in `folder/tensorboard`. Events that an earlier process wrote there for later
    updates are hidden, since those updates are made again. Raises ConfigError without the package,
    and where W&B refuses the run.
    """
    events: list[Events] = []
    if settings.tensorboard:
        events.append(_maker("tensorboard")(folder / "tensorboard", purge_step=done + 1))
    if settings.wandb:
        events.append(_WandbRun(folder, done, config))
    return events


class _WandbRun:
    """A run of W&B, which a process that goes on with ours goes on with too."""

    def __init__(self, folder: Path, done: int, config: Mapping[str, Any]) -> None:
        """Without an update nothing says whose run the folder's is: another one begins."""
        id_file = folder / _RUN_ID
        is_known = done > 0 and id_file.exists()
        defaults = {
            "WANDB_DIR": ("dir", folder),
            "WANDB_RUN_ID": ("id", read_file(id_file).decode() if is_known else None),
            "WANDB_RESUME": ("resume", "allow"),
        }
        # An argument would have precedence over what the user set.
        given = dict(value for name, value in defaults.items() if name not in os.environ)
        try:
            self._run = _maker("wandb")(config=dict(config), reinit="finish_previous", **given)
        except (import_module("wandb").Error, ValueError) as error:
            raise ConfigError(f"wandb = true: {error}") from error
        if not done and self._run.starting_step:
            raise ConfigError(
                f"wandb = true: the run {self._run.id} has {self._run.starting_step} updates, and "
                f"{folder} has none: unset WANDB_RUN_ID or give another"
            )
        write_whole(id_file, self._run.id.encode())

    def add_scalar(self, name: str, value: float, step: int) -> None:
        """Log a value, unless W&B has the step: it takes none again."""
        if step >= self._run.starting_step:
            self._run.log({name: value}, step=step)

    def flush(self) -> None:
        """Its own process sends what is logged."""


def _maker(name: str) -> Any:
    module, function = _MAKERS[name]
    try:
        return getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:  # a folder `wandb` is imported too
        raise ConfigError(
            f"{name} = true needs the package {name}: pip install {name} ({error})"
        ) from error
