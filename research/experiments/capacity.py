"""`python -m research.experiments capacity`: how many random tokens the state of an SRM can hold.

An SRM repeats a sequence of tokens drawn at random, as in `copying`. When the second half begins,
all that the model still has of the first is its state. From the loss on the second half follows how
many nats of the first it had at least: those of the tokens less the loss. Divided by the nats of a
token that is the number of tokens held, and the most over several lengths is given. It is what
models of this training hold: with more of it they may hold more.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import product
from statistics import mean
from typing import ClassVar

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.copying import fit_copies
from research.experiments.harness.models import HEADS, make_variant
from research.experiments.harness.report import draw_lines, minutes_of, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Report, Results, run_cases
from research.experiments.harness.settings import ExperimentSettings

VARIANT = "mixed decay"
RATE_WIDTH = 128
"""Width for which the learning rate is given."""
PAPER = (15_155, 1_024, 16)
"""The paper's estimate of tokens in the state of a model of that width and so many blocks."""


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments capacity`."""

    LEAST_SEEDS: ClassVar[int] = 1
    seeds: tuple[int, ...] = (0,)
    widths: tuple[int, ...] = (128, 256, 512)
    copied: tuple[int, ...] = (8, 16, 32)
    """Lengths of what is repeated, in tokens."""
    ids: int = 16
    """Number of token ids that sequences are drawn from, each equally likely."""
    steps: int = 300
    rows: int = 16
    num_layers: int = 2
    learning_rate: float = 5e-3
    """Peak learning rate at d 128, in proportion to 1 / √d."""


def case(width: int, copied: int) -> str:
    """Return the name of a case."""
    return f"{width} {copied}"


def measure(config: Settings, width: int, copied: int, seed: int) -> Numbers:
    """Train one case; return its accuracy and loss on new sequences, and the tokens held."""
    sizes = width, config.num_layers, 2 * copied, config.ids
    rate = config.learning_rate * (RATE_WIDTH / width) ** 0.5
    make = partial(make_variant, VARIANT, *sizes)
    _, figures = fit_copies(config, make, copied, seed, rate)
    figures.pop("training_losses")
    held = copied * max(0.0, 1 - figures["loss"] / math.log(config.ids))
    return figures | {"held": held}


def most_held(config: Settings, results: Results, width: int) -> tuple[float, int]:
    """Return the most tokens held at a width, the mean over seeds, and the length it was at."""
    by_length = {
        copied: mean(run["held"] for run in results[case(width, copied)])
        for copied in config.copied
    }
    best = max(by_length, key=lambda copied: by_length[copied])
    return by_length[best], best


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: tokens held by width and length, and beside the size of a
    state."""

    def cell(width: int, copied: int) -> str:
        runs = results[case(width, copied)]
        held, right = (mean(run[name] for run in runs) for name in ("held", "accuracy"))
        return f"{held:.1f} ({right:.3f})"

    tokens, width, blocks = PAPER
    bits = math.log2(config.ids)
    rows = [[str(d), *(cell(d, copied) for copied in config.copied)] for d in config.widths]
    most = []
    for d in config.widths:
        held, at = most_held(config, results, d)
        numbers = config.num_layers * d
        shown = [str(d), f"{numbers:,}", f"{held:.1f}", str(at)]
        most.append([*shown, f"{held / numbers:.3f}", f"{held * bits / numbers:.2f}"])
    return [
        f"Random tokens of {config.ids} ids that an SRM of {config.num_layers} blocks and {HEADS} "
        f"heads still has in its state, after {config.steps:,} updates of {config.rows} sequences: "
        "the repeated tokens times (1 - loss / ln ids). In brackets the share repeated rightly. "
        f"{minutes_of(results)}",
        table(["d", *(f"{copied} tokens" for copied in config.copied)], rows),
        "The most of these. Numbers of a state are d for each block:",
        table(["d", "numbers", "tokens held", "of", "tokens a number", "bits a number"], most),
        f"The paper's estimate, {tokens:,} tokens at d {width:,}, is "
        f"{tokens / (width * blocks):.3f} tokens a number, if of a model of {blocks} blocks. "
        "A length of which nearly all is repeated says that more would fit.",
    ]


def draw(config: Settings, results: Results) -> Figure:
    """Plot the tokens held by length, a line for each width."""
    figure, axes = plt.subplots(figsize=(7, 5))
    lines = {
        f"d {d}": (
            config.copied,
            [mean(run["held"] for run in results[case(d, n)]) for n in config.copied],
        )
        for d in config.widths
    }
    axes.plot(config.copied, config.copied, color="0.7", linewidth=1, label="all")
    draw_lines(lines, axes, xlabel="random tokens", ylabel="tokens held")
    return figure


def run(config: Settings) -> Report:
    """Run all cases."""
    cases = {
        case(width, copied): partial(measure, config, width, copied)
        for width, copied in product(config.widths, config.copied)
    }
    results = run_cases(config, cases, {})
    return results, page(config, results), draw(config, results)
