"""Events of a run for TensorBoard, where its package is installed."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from srm.errors import ConfigError


class Events(Protocol):
    """The methods of torch's SummaryWriter that are used."""

    def add_scalar(self, name: str, value: float, step: int) -> None: ...

    def flush(self) -> None: ...


def events_in(folder: Path, done: int) -> Events:
    """Return a writer to `folder/tensorboard` of a run that has made so many updates.

    Events that an earlier process wrote for later updates are hidden, since those updates are made
    again. Raises ConfigError without the package.
    """
    return cast(Events, _tensorboard().SummaryWriter(folder / "tensorboard", purge_step=done + 1))


def check_events(wanted: bool) -> None:
    """Raise ConfigError if events are wanted and TensorBoard is not installed."""
    if wanted:
        _tensorboard()


def _tensorboard() -> Any:
    try:
        return import_module("torch.utils.tensorboard")
    except ImportError as error:
        raise ConfigError(
            f"tensorboard = true needs the package tensorboard: pip install tensorboard ({error})"
        ) from error
