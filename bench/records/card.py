"""The parts of a model's card that are made from the files in its folder. Knows no page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from engine.weights.inspect_model import inspect_model

LAST = 100
"""The last training steps whose mean loss is shown."""


def _model(folder: Path) -> list[str]:
    """Render the output of `srm inspect`."""
    rows = [f"| {name} | {value} |" for name, value in inspect_model(folder).items()]
    return ["| | |", "|---|---|", *rows]


def _training(folder: Path) -> list[str]:
    losses = msgspec.json.decode((folder / "losses.json").read_bytes(), type=list[float])
    return [
        f"{len(losses):,} steps; the mean loss of the last {LAST} is "
        f"{mean(losses[-LAST:]):.3f} nats a token."
    ]


def _accuracy(folder: Path) -> list[str]:
    """Render the result of `srm evaluate`."""
    found: dict[str, Any] = msgspec.json.decode((folder / "evaluation.json").read_bytes())
    ks = [f"pass@{int(k):,}" for k in found["pass_at"]]
    rates = [found["greedy"], *found["pass_at"].values()]
    kinds = found["pass_at_1_by_kind"].items()
    return [
        f"{found['problems']:,} held-out problems, {found['samples']:,} samples each at "
        f"temperature {found['temperature']:g}, by the weights {found['fingerprint']}.",
        "",
        f"| greedy | {' | '.join(ks)} |",
        "|---|" + "---|" * len(ks),
        f"| {' | '.join(f'{rate:.3f}' for rate in rates)} |",
        "",
        "| kind of problem | pass@1 |",
        "|---|---|",
        *(f"| {kind} | {rate:.3f} |" for kind, rate in kinds),
    ]


CARD: dict[str, Callable[[Path], list[str]]] = {
    "model": _model,
    "training": _training,
    "accuracy": _accuracy,
}
"""By the name used in a card: the function that returns the lines for its folder."""
