"""The loss curve of a run as an SVG picture."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("svg")  # no display needed
from matplotlib import pyplot as plt

from training.data import PACKED_EVERY


def plot_losses(losses: list[float], path: Path) -> None:
    """Cross-entropy in nats per token by step, on a logarithmic scale, one line per batch kind."""
    kinds = {
        "one problem per row": [i for i in range(len(losses)) if (i + 1) % PACKED_EVERY],
        "whole contexts of problems": list(range(PACKED_EVERY - 1, len(losses), PACKED_EVERY)),
    }
    mpl.rcParams["svg.hashsalt"] = "srm"  # the same picture for the same numbers
    figure, axes = plt.subplots(figsize=(7, 4))
    for label, steps in kinds.items():
        axes.plot(steps, [losses[step] for step in steps], linewidth=0.8, label=label)
    axes.set(yscale="log", xlabel="step", ylabel="loss (nats per token)")
    axes.grid(which="both", linewidth=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
