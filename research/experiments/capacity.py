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

from research.experiments.copying import EVALUATION_BATCHES, Copies, accuracy
from research.experiments.harness.models import HEADS, MULTIPLE, make_variant
from research.experiments.harness.report import table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Results, fit, publish, run_cases
from research.experiments.harness.settings import ExperimentSettings
from srm.settings import load

VARIANT = "mixed decay"
RATE_WIDTH = 128
"""Width for which the learning rate is given."""
PAPER = (15_155, 1_024, 16)
"""The paper's estimate of tokens in the state of a model of that width and so many blocks."""


class CapacityConfig(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments capacity`."""

    LEAST_SEEDS: ClassVar[int] = 1
    seeds: tuple[int, ...] = (0,)
    """Seeds of weights and sequences; each case is run with each seed."""
    widths: tuple[int, ...] = (128, 256, 512)
    """Widths of the models."""
    copied: tuple[int, ...] = (16, 32, 64)
    """Lengths of what is repeated, in tokens."""
    ids: int = 16
    """Number of token ids that sequences are drawn from, each equally likely."""
    steps: int = 600
    """Updates in each case."""
    rows: int = 16
    """Sequences in one update."""
    num_layers: int = 2
    """Number of blocks of the models."""
    learning_rate: float = 5e-3
    """Peak learning rate at d 128, in proportion to 1 / √d: reached after a tenth of the updates,
    then falling to 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("widths", MULTIPLE), ("copied", 1)):
            value = getattr(self, name)
            if not value or sorted(set(value)) != [*value] or value[0] < least:
                raise ValueError(
                    f"{name} must be one or more numbers ≥ {least} that rise, got {value}"
                )
        if any(width % MULTIPLE for width in self.widths):
            raise ValueError(f"widths must be multiples of {MULTIPLE}, got {self.widths}")
        if self.ids < 2:
            raise ValueError(f"ids must be at least 2, got {self.ids}")


def case(width: int, copied: int) -> str:
    """Return the name of a case."""
    return f"{width} {copied}"


def measure(config: CapacityConfig, width: int, copied: int, seed: int) -> Numbers:
    """Train one case; return its accuracy and loss on new sequences, and the tokens held."""
    fresh = Copies(config.rows, copied, config.ids, (1,))
    evaluation = [fresh[index] for index in range(EVALUATION_BATCHES)]
    rate = config.learning_rate * (RATE_WIDTH / width) ** 0.5
    run, _, took = fit(
        lambda: make_variant(VARIANT, width, config.num_layers, 2 * copied, config.ids),
        Copies(config.rows, copied, config.ids, (0, seed)),
        seed,
        config.steps,
        rate,
    )
    took.pop("training_losses")
    loss = run.evaluate(evaluation)
    held = copied * max(0.0, 1 - loss / math.log(config.ids))
    return {"accuracy": accuracy(run, evaluation), "loss": loss, "held": held, **took}


def most_held(config: CapacityConfig, results: Results, width: int) -> tuple[float, int]:
    """Return the most tokens held at a width, the mean over seeds, and the length it was at."""
    by_length = {
        copied: mean(run["held"] for run in results[case(width, copied)])
        for copied in config.copied
    }
    best = max(by_length, key=lambda copied: by_length[copied])
    return by_length[best], best


def page(config: CapacityConfig, results: Results) -> list[str]:
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
    spent = sum(run["processor_seconds"] for runs in results.values() for run in runs)
    return [
        f"Random tokens of {config.ids} ids that an SRM of {config.num_layers} blocks and {HEADS} "
        f"heads still has in its state, after {config.steps:,} updates of {config.rows} sequences: "
        "the repeated tokens times (1 - loss / ln ids). In brackets the share repeated rightly. "
        f"All cases took {spent / 60:.0f} processor minutes.",
        "",
        *table(["d", *(f"{copied} tokens" for copied in config.copied)], rows),
        "",
        "The most of these. Numbers of a state are d for each block:",
        "",
        *table(["d", "numbers", "tokens held", "of", "tokens a number", "bits a number"], most),
        "",
        f"The paper's estimate, {tokens:,} tokens at d {width:,}, is "
        f"{tokens / (width * blocks):.3f} tokens a number, if of a model of {blocks} blocks. "
        "A length of which nearly all is repeated says that more would fit.",
    ]


def drawn(config: CapacityConfig, results: Results) -> Figure:
    """Plot the tokens held by length, a line for each width."""
    figure, axes = plt.subplots(figsize=(7, 5))
    for width in config.widths:
        held = [mean(run["held"] for run in results[case(width, n)]) for n in config.copied]
        axes.plot(config.copied, held, marker="o", label=f"d {width}")
    axes.plot(config.copied, config.copied, color="0.7", linewidth=1, label="all")
    axes.set(xlabel="random tokens", ylabel="tokens held")
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=7)
    return figure


def main(argv: list[str]) -> int:
    """Run all cases and write the record."""
    config = load(CapacityConfig, argv, prog="python -m research.experiments capacity")
    cases = {
        case(width, copied): partial(measure, config, width, copied)
        for width, copied in product(config.widths, config.copied)
    }
    results = run_cases("capacity", config, cases, {})
    publish("capacity", argv, config, results, page(config, results), drawn(config, results))
    return 0
