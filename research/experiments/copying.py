"""`python -m research.experiments copying`: how well models repeat the first half of a sequence.

As in the paper, the second half of each sequence is the first once more, and only its tokens are
trained on and counted, each predicted from all before it. The paper's first halves are text, and
some of a text can be guessed; ours are drawn at random from few ids, so what is right beyond chance
was remembered. Variants are compared by width, and by copied length.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

from research.experiments.harness.models import make_variant
from research.experiments.harness.ordering import ordering
from research.experiments.harness.report import (
    draw_lines,
    minutes_of,
    number,
    points,
    spread,
    table,
)
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Report, Results, fit, run_cases, values_of
from research.experiments.harness.settings import ExperimentSettings
from srm.training.data import IGNORED
from srm.training.loop import Run
from srm.training.model import LanguageModel

NARROW = "Mamba 2"
"""Model that is half as wide as the others, as in the paper."""
VARIANTS = (
    "mixed decay no projections",
    "mixed decay",
    "mixed no projections",
    "mixed",
    "plain heads",
    "headless",
    "kernel 4",
    "kernel 8",
    NARROW,
    "Transformer",
)
PAPER = {
    "mixed decay no projections": (0.348, 0.689, 0.747),
    "plain heads": (0.404, None, None),
    "headless": (0.442, None, None),
    "kernel 4": (0.492, 0.785, None),
    "kernel 8": (None, 0.844, None),
    "Mamba 2": (0.252, 0.512, 0.967),
}
"""The paper's accuracies at d 256, 512 and 1,024, of Mamba 2 at half of that: 512 tokens are
copied."""
PAPER_WIDTHS = ("the paper's, d 256", "d 512", "d 1,024")
PAPER_FALLS = "from more than 0.9 to less than 0.3"
"""How the paper's accuracy falls at d 256 as more tokens are copied."""
EVALUATION_BATCHES = 8


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments copying`."""

    seeds: tuple[int, ...] = (0, 1)
    steps: int = 1_000
    rows: int = 32
    d_model: int = 32
    """Width of the models for which copied lengths are compared."""
    num_layers: int = 2
    n_ctx: int = 32
    """Tokens in a sequence where widths are compared; the second half repeats the first."""
    widths: tuple[int, ...] = (32, 64, 128)
    """Widths to compare; the paper's are 256, 512 and 1,024. Mamba 2 gets half of each."""
    copied: tuple[int, ...] = (4, 8, 16)
    """Copied lengths to compare, in tokens."""
    ids: int = 16
    """Number of token ids that sequences are drawn from, each equally likely."""
    learning_rate: float = 5e-3

    @property
    def grid(self) -> list[tuple[int, int]]:
        """Pairs of width and copied length; each variant has a case for each pair."""
        by_width = [(width, self.n_ctx // 2) for width in self.widths]
        return sorted({*by_width, *((self.d_model, copied) for copied in self.copied)})


class Copies:
    """Batches of inputs and targets, int64 [rows, 2 * copied - 1], by step; targets in the first
    half are ignored."""

    def __init__(self, rows: int, copied: int, ids: int, seed: tuple[int, ...]) -> None:
        self._shape, self._ids, self._seed = (rows, copied), ids, seed

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = np.random.default_rng((*self._seed, index)).integers(self._ids, size=self._shape)
        ids = torch.from_numpy(np.tile(drawn, 2))
        targets = ids[:, 1:].clone()
        targets[:, : self._shape[1] - 1] = IGNORED
        return ids[:, :-1], targets


def model(config: Settings, variant: str, width: int, copied: int) -> LanguageModel:
    """Make the model of a case."""
    width = width // 2 if variant == NARROW else width
    return make_variant(variant, width, config.num_layers, 2 * copied, config.ids)


def accuracy(run: Run, batches: list[tuple[Tensor, Tensor]]) -> float:
    """Return the fraction of the targets that the model finds the likeliest token."""
    right = count = 0
    with torch.no_grad():
        for inputs, targets in batches:
            is_counted = targets != IGNORED
            likeliest = run.logits(inputs).argmax(-1)
            right += int((likeliest == targets)[is_counted].sum())
            count += int(is_counted.sum())
    return right / count


def fit_copies(
    config: Any,
    make: Callable[[], LanguageModel],
    copied: int,
    seed: int,
    learning_rate: float,
    **treatment: Any,
) -> tuple[LanguageModel, Numbers]:
    """Train a model to copy, in `rows` sequences of `ids` for `steps` as the settings say; return
    it, with accuracy and loss in nats per copied token on new sequences, and what it took."""
    fresh = Copies(config.rows, copied, config.ids, (1,))
    evaluation = [fresh[index] for index in range(EVALUATION_BATCHES)]
    batches = Copies(config.rows, copied, config.ids, (0, seed))
    run, made, took = fit(
        make, batches, seed, config.steps, learning_rate=learning_rate, **treatment
    )
    figures = {"accuracy": accuracy(run, evaluation), "loss": run.evaluate(evaluation)}
    return made, figures | took


def copy(config: Settings, variant: str, width: int, copied: int, seed: int) -> Numbers:
    """Train one case; return its figures."""
    make = partial(model, config, variant, width, copied)
    _, figures = fit_copies(config, make, copied, seed, config.learning_rate)
    return figures | {"width": width, "copied": copied}


def case(variant: str, width: int, copied: int) -> str:
    """Return the name of a case."""
    return f"{variant} {width} {copied}"


def paper(config: Settings) -> dict[str, float]:
    """Return the paper's accuracies by our cases, matching its widths with ours from the narrowest
    up."""
    return {
        case(variant, width, config.n_ctx // 2): figures
        for variant, accuracies in PAPER.items()
        for width, figures in zip(config.widths, accuracies, strict=False)
        if figures is not None
    }


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: tables by width and by length, and what agrees."""
    ours, theirs = values_of(results, "accuracy"), paper(config)
    by_width = [
        [variant, *(spread(ours[case(variant, w, config.n_ctx // 2)]) for w in config.widths)]
        + [number(figures) for figures in PAPER.get(variant, (None, None, None))]
        for variant in VARIANTS
    ]
    by_length = {
        variant: [ours[case(variant, config.d_model, n)] for n in config.copied]
        for variant in VARIANTS
    }
    d_model, shortest, longest = config.d_model, config.copied[0], config.copied[-1]
    falling = sum(mean(of[-1]) < mean(of[0]) for of in by_length.values())
    rows = [[variant, *map(spread, of)] for variant, of in by_length.items()]
    return [
        f"Accuracy on the second half of new sequences; chance is {1 / config.ids:.3f}. "
        f"{minutes_of(results)}",
        f"{config.n_ctx // 2} tokens copied, by width, and the paper's of 512 tokens; Mamba 2 is "
        "half as wide, here and there:",
        table(["variant", *(f"d {w}" for w in config.widths), *PAPER_WIDTHS], by_width),
        ordering(ours, theirs).sentence(),
        f"By tokens copied, at d {d_model}:",
        table(["variant", *(str(copied) for copied in config.copied)], rows),
        f"From {shortest} to {longest} copied tokens the accuracy of {falling} of {len(rows)} "
        f"variants falls; the paper's falls {PAPER_FALLS} at d 256.",
    ]


def draw(config: Settings, results: Results) -> Figure:
    """Plot accuracies beside the paper's, and by copied length."""
    ours = values_of(results, "accuracy")
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5.5))
    points(left, ours, paper(config), "accuracy")
    lines = {
        variant: (
            config.copied,
            [mean(ours[case(variant, config.d_model, n)]) for n in config.copied],
        )
        for variant in VARIANTS
    }
    draw_lines(lines, right, xlabel=f"tokens copied, d {config.d_model}", ylabel="accuracy")
    return figure


def run(config: Settings) -> Report:
    """Run all cases."""
    cases = {
        case(variant, *sizes): partial(copy, config, variant, *sizes)
        for sizes in config.grid
        for variant in VARIANTS
    }
    results = run_cases(config, cases, {})
    return results, page(config, results), draw(config, results)
