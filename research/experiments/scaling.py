"""`research.experiments scaling`: loss over parameters and over compute, SRM and Transformer.

Both are trained at several widths, at each for several durations, each with a schedule of its own.
The loss of the longest runs is a power of the number of parameters; the least loss for the compute,
of all runs, is a power of that. The paper's figures 3b and 3c show such lines, and give no numbers.
Operations are those of all products of matrices, token mixing included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from statistics import mean
from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.harness.corpus import Corpus, standard_library
from research.experiments.harness.models import REFERENCE, count_flops, model_makers
from research.experiments.harness.report import finish, spread, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Report, Results, fit_text, run_cases
from research.experiments.harness.settings import ExperimentSettings

OTHER = "Transformer"
NAMES = (REFERENCE, OTHER)
RATE_WIDTH = 96
"""Width for which learning rates are given."""
DRAWS = 2_000
"""Resamplings of the runs for an interval."""
INTERVAL = 0.95


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments scaling`."""

    seeds: tuple[int, ...] = (0, 1)
    widths: tuple[int, ...] = (32, 48, 64, 96)
    durations: tuple[int, ...] = (64, 128, 256, 512)
    """Numbers of updates; losses over parameters are those of the most."""
    rows: int = 8
    n_ctx: int = 128
    num_layers: int = 4
    learning_rate: float = 1.2e-2
    """Peak learning rate of SRM at d 96, in proportion to 1 / √d."""
    learning_rate_other: float = 1.2e-2
    """The same of the Transformer: `baselines` finds both."""
    max_vocab_size: int = 1_024

    def rate(self, name: str, width: int) -> float:
        """Return the learning rate of a model at a width."""
        own = self.learning_rate if name == REFERENCE else self.learning_rate_other
        return float(own * (RATE_WIDTH / width) ** 0.5)


class LossLaw(NamedTuple):
    """loss = factor · x^exponent, and the interval of the exponent."""

    exponent: float
    low: float
    high: float
    factor: float

    def __str__(self) -> str:
        return f"{self.exponent:.4f} ({self.low:.4f} to {self.high:.4f})"


def power_law(x: Sequence[float], loss: Sequence[float]) -> LossLaw:
    """Fit a line to the logarithms; the interval is of resampled runs, whose x are not all
    the same."""
    of_x, of_loss = np.log(x), np.log(loss)
    exponent, shift = np.polyfit(of_x, of_loss, 1)
    random = np.random.default_rng(0)
    drawn: list[float] = []
    while len(drawn) < DRAWS:
        some = random.integers(len(x), size=len(x))
        if np.ptp(of_x[some]) > 0:
            drawn.append(float(np.polyfit(of_x[some], of_loss[some], 1)[0]))
    low, high = np.quantile(drawn, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return LossLaw(float(exponent), float(low), float(high), float(np.exp(shift)))


def case(name: str, width: int, steps: int) -> str:
    """Return the name of a case."""
    return f"{name} {width} {steps}"


def measure(
    config: Settings, corpus: Corpus, name: str, width: int, steps: int, seed: int
) -> Numbers:
    """Train a case; return its loss, and what training took."""
    make = partial(model_makers(config.num_layers, config.n_ctx, corpus.vocab_size)[name], width)
    rate = config.rate(name, width)
    _, model, took = fit_text(corpus, config, make, seed, steps, rate)
    took.pop("training_losses")
    return {"flops": steps * config.rows * count_flops(model, config.n_ctx), **took}


def frontier(results: Results, name: str) -> list[str]:
    """Return a model's cases of which none of less compute has less loss, by compute."""
    own = [of for of in results if of.startswith(f"{name} ")]
    least, best = float("inf"), []
    for of in sorted(own, key=lambda of: results[of][0]["flops"]):
        if (loss := mean(run["loss"] for run in results[of])) < least:
            least = loss
            best.append(of)
    return best


def laws(config: Settings, results: Results) -> dict[str, dict[str, LossLaw]]:
    """Return by model the power laws over parameters and over compute."""
    fitted: dict[str, dict[str, LossLaw]] = {}
    for name in NAMES:
        longest = [case(name, width, config.durations[-1]) for width in config.widths]
        chosen = {"parameters": longest, "flops": frontier(results, name)}
        fitted[name] = {}
        for member, cases in chosen.items():
            runs = [run for of in cases for run in results[of]]
            xs = [run[member] for run in runs]
            if len(set(xs)) > 1:
                fitted[name][member] = power_law(xs, [run["loss"] for run in runs])
    return fitted


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: exponents, losses, and what they say of both models."""
    fitted = laws(config, results)
    rows = [
        [name, *(str(fitted[name].get(member, "–")) for member in ("parameters", "flops"))]
        for name in NAMES
    ]
    grid = [
        [
            *(name, str(width), f"{runs[0]['parameters']:,}", str(steps)),
            f"{runs[0]['flops']:.3g}",
            f"{mean(run['processor_seconds'] for run in runs):.1f}",
            spread([run["loss"] for run in runs]),
        ]
        for name, width, steps in product(NAMES, config.widths, config.durations)
        for runs in [results[case(name, width, steps)]]
    ]
    tokens = config.rows * config.n_ctx
    return [
        f"Exponents of the loss, with {INTERVAL:.0%} intervals of resampled runs. Over parameters: "
        f"at {config.durations[-1] * tokens:,} tokens. Over compute: the least loss for it.",
        table(["model", "over parameters", "over compute"], rows),
        f"Over parameters: {comparison(fitted, 'parameters')}",
        f"Over compute: {comparison(fitted, 'flops')}",
        f"Losses on held-out text, in nats per token; updates are of {tokens:,} tokens:",
        table(["model", "d", "parameters", "updates", "operations", "processor s", "loss"], grid),
    ]


def comparison(fitted: Mapping[str, Mapping[str, LossLaw]], member: str) -> str:
    """Say whose loss falls faster, and where the laws meet."""
    if any(member not in fitted[name] for name in NAMES):
        return "too few points for a law."
    ours, other = (fitted[name][member] for name in NAMES)
    if ours.low <= other.high and other.low <= ours.high:
        return "the intervals of both exponents overlap."
    faster = NAMES[other.exponent < ours.exponent]
    meet = np.log(other.factor / ours.factor) / (ours.exponent - other.exponent) / np.log(10)
    return f"the {faster}'s loss falls faster; the laws meet at 10^{meet:.1f}, extrapolated."


def draw(config: Settings, results: Results) -> Figure:
    """Plot loss over parameters and over compute, with the laws."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5))
    fitted = laws(config, results)
    for colour, name in zip(("C0", "C1"), NAMES, strict=True):
        longest = [case(name, width, config.durations[-1]) for width in config.widths]
        own = [of for of in results if of.startswith(f"{name} ")]
        for axes, member, cases in ((left, "parameters", longest), (right, "flops", own)):
            xs = [results[of][0][member] for of in cases]
            losses = [mean(run["loss"] for run in results[of]) for of in cases]
            axes.plot(xs, losses, linestyle="", marker="o", color=colour, label=name)
            if law := fitted[name].get(member):
                ends = np.array(sorted(xs), float)
                axes.plot(ends, law.factor * ends**law.exponent, color=colour, linewidth=1)
    finish(left, xscale="log", yscale="log", xlabel="parameters", ylabel="loss (nats per token)")
    finish(right, xscale="log", yscale="log", xlabel="operations")
    return figure


def run(config: Settings) -> Report:
    """Run all cases."""
    corpus = standard_library(config.max_vocab_size)
    cases = {
        case(name, width, steps): partial(measure, config, corpus, name, width, steps)
        for width, name, steps in product(config.widths, NAMES, config.durations)
    }
    results = run_cases(config, cases, {"texts": corpus.sha256})
    return results, page(config, results), draw(config, results)
