"""The loss curve of a run, and errors by position, as SVG pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")  # no display needed
from matplotlib import pyplot as plt

from training.data import PACKED_EVERY

SHOWN_CASES = (
    "float32",
    "state fp16",
    "state bf16",
    "products bf16",
    "step bf16",
    "step bf16, residual logits f32",
    "step bf16, state bf16",
    "step fp16",
)
"""Cases of `srm bench precision` that are plotted."""


def plot_losses(losses: list[float], path: Path) -> None:
    """Plot cross-entropy in nats per token by step, on a log scale, one line per kind of batch."""
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


def plot_divergence(models: list[dict[str, Any]], path: Path) -> None:
    """Plot the RMS error of the logits by position, a panel per model, for SHOWN_CASES."""
    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    with mpl.rc_context({"svg.hashsalt": "srm", "svg.fonttype": "none"}):
        figure, panels = plt.subplots(
            rows, columns, figsize=(4.5 * columns, 3.2 * rows + 1), squeeze=False
        )
        for panel, model in zip(panels.flat, models, strict=False):
            ends = [last for _, last in model["positions"]]
            for found in model["cases"]:
                if found["case"] in SHOWN_CASES:
                    errors = found["by_position"]["rms_error"]
                    panel.plot(ends, errors, linewidth=1, label=found["case"])
            panel.set(yscale="log", title=model["name"], xlabel="position")
            panel.set_xscale("log", base=2)
            panel.grid(linewidth=0.3)
        panels[0][0].set_ylabel("RMS error / largest logit")
        for panel in panels.flat[len(models) :]:
            panel.set_axis_off()
        figure.legend(*panels[0][0].get_legend_handles_labels(), ncols=4, loc="lower center")
        figure.tight_layout(rect=(0, 0.1, 1, 1))
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
