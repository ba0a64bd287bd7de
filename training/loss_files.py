"""Writes the losses of a training run into its folder, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import msgspec
from matplotlib import pyplot as plt

from srm.training.loop import Losses
from srm.training.text.whole_files import replace_file, write_whole


def write_losses(
    losses: Losses, folder: Path, kinds: Mapping[str, Sequence[int]] | None = None
) -> None:
    """Write `losses.json`, `loss.svg` and, if there were any, `evaluation_losses.json`.

    Losses are in nats per target. `kinds` maps kinds of batches to the steps that used them; each
    is a line of the plot, on a log scale.
    """
    write_whole(folder / "losses.json", msgspec.json.encode(losses.steps))
    steps = range(len(losses.steps))
    lines: dict[str, tuple[Sequence[int], Sequence[float]]] = {
        kind: (at, [losses.steps[step] for step in at])
        for kind, at in (kinds or {"training": steps}).items()
    }
    if losses.evaluations:
        reported = msgspec.json.encode(losses.evaluations)
        write_whole(folder / "evaluation_losses.json", reported)
        done, losses_by_step = zip(*losses.evaluations, strict=True)
        lines["evaluation"] = (done, losses_by_step)
    mpl.use("svg")  # no display needed
    with mpl.rc_context({"svg.hashsalt": "srm"}):  # the same picture for the same numbers
        figure, axes = plt.subplots(figsize=(7, 4))
        for label, (at, values) in lines.items():
            axes.plot(at, values, linewidth=0.8, label=label)
        axes.set(yscale="log", xlabel="step", ylabel="loss (nats per token)")
        axes.grid(which="both", linewidth=0.3)
        axes.legend()
        figure.tight_layout()
        with replace_file(folder / "loss.svg") as partial:
            figure.savefig(partial, format="svg", metadata={"Date": None})
        plt.close(figure)
