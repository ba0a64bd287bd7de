"""`python -m experiments baselines`: SRM, Transformer, masked mixer and Mamba 2, trained alike.

Once with as many parameters, and once more for as much processor time, as SRM has. Each model takes
the learning rate, of several, that gives it the least loss with the first seed: what suits one is
too much for another. The paper's losses are of FineWeb-edu at widths near ours in proportion, and
of FineMath 4+ at equal compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import mean, median

import torch

from engine.config import ModelConfig
from engine.settings import load
from experiments.corpus import Corpus, standard_library
from experiments.kept import Numbers
from experiments.ordering import ordering
from experiments.runner import Results, fit, publish, run_cases, values_of
from experiments.settings import ModelSettings
from experiments.shown import beside, number, spread, table
from training.baselines.mamba2 import Mamba2, Mamba2Shape
from training.baselines.masked_mixer import MaskedMixerModel, MaskedMixerShape
from training.baselines.transformer import Transformer, TransformerShape
from training.model import SRM, LanguageModel

REFERENCE = "SRM"
"""The model whose parameters and time the others get."""
HEADS = 4
"""Of attention and mixers; Mamba 2 has twice as many, as in the paper, and half of d as state."""
FINEWEB = {"SRM": 2.80, "Transformer": 2.573, "masked mixer": 2.628, "Mamba 2": 2.758}
"""The paper's losses at d 1,024, 512, 1,024 and 512."""
FINEMATH = {"SRM": 1.614, "Transformer": 1.391, "masked mixer": 1.483, "Mamba 2": 2.989}
"""Its losses at equal compute."""

Make = Callable[[int], LanguageModel]
"""Makes a model of a width."""


class BaselinesConfig(ModelSettings, frozen=True):
    """Settings of `python -m experiments baselines`."""

    rows: int = 16
    """Sequences of an update."""
    d_model: int = 96
    """Width of SRM; the others have what gives them about as many parameters."""
    n_ctx: int = 128
    """Tokens of a sequence."""
    learning_rates: tuple[float, ...] = (2e-3, 6e-3, 1.2e-2)
    """Peaks that are tried: reached after a tenth of the updates, then falling to 0."""
    max_vocab_size: int = 1_024
    """Entries of the tokenizer that is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % (2 * HEADS):
            raise ValueError(f"d_model must be a multiple of {2 * HEADS}, got {self.d_model}")


def models(layers: int, n: int, vocab_size: int) -> dict[str, Make]:
    """Return what makes each model, of so many layers and for sequences of up to n tokens."""
    return {
        "SRM": lambda d: SRM(ModelConfig(d, layers, HEADS, n, vocab_size)),
        "Transformer": lambda d: Transformer(TransformerShape(d, layers, HEADS, 2 * d, vocab_size)),
        "masked mixer": lambda d: MaskedMixerModel(
            MaskedMixerShape(d, layers, HEADS, n, vocab_size)
        ),
        "Mamba 2": lambda d: Mamba2(Mamba2Shape(d, layers, 2 * HEADS, d // 2, vocab_size)),
    }


def width_of(make: Make, parameters: int, most: int) -> int:
    """Return the width, up to `most`, at which a model's parameters are nearest to so many."""

    def distance(width: int) -> int:
        with torch.device("meta"):
            return abs(sum(one.numel() for one in make(width).parameters()) - parameters)

    return min(range(2 * HEADS, most + 1, 2 * HEADS), key=distance)


class Trials:
    """Training runs of each model at its width, with any learning rate and number of steps."""

    def __init__(self, config: BaselinesConfig, corpus: Corpus) -> None:
        self._config, self._corpus = config, corpus
        self._make = models(config.num_layers, config.n_ctx, corpus.vocab_size)
        wanted = sum(one.numel() for one in self._make[REFERENCE](config.d_model).parameters())
        self._widths = {
            name: width_of(make, wanted, 2 * config.d_model) for name, make in self._make.items()
        }

    def run(
        self, of: Mapping[str, tuple[float, int]], seeds: Sequence[int] = ()
    ) -> dict[str, list[Numbers]]:
        """Return the results of each model named, with that rate and number of steps."""
        names = {f"{name} {rate:g} {steps}": name for name, (rate, steps) in of.items()}
        cases = {case: self._case(name, *of[name]) for case, name in names.items()}
        found = run_cases("baselines", self._config, cases, {"texts": self._corpus.sha256}, seeds)
        return {names[case]: results for case, results in found.items()}

    def _case(self, name: str, rate: float, steps: int) -> Callable[[int], Numbers]:
        config, corpus, width = self._config, self._corpus, self._widths[name]

        def measure(seed: int) -> Numbers:
            batches = corpus.batches(config.rows, config.n_ctx, seed)
            run, _, took = fit(lambda: self._make[name](width), batches, seed, steps, rate)
            loss = run.evaluate(corpus.evaluation(config.rows, config.n_ctx))
            return {"loss": loss, "width": width, "learning_rate": rate, "steps": steps, **took}

        return measure


def best_rates(config: BaselinesConfig, trials: Trials) -> dict[str, float]:
    """Return the learning rate that gives each model the least loss with the first seed."""
    names, best = list(FINEWEB), dict[str, tuple[float, float]]()
    for rate in config.learning_rates:
        of = dict.fromkeys(names, (rate, config.steps))
        for name, (result,) in trials.run(of, config.seeds[:1]).items():
            best[name] = min(best.get(name, (math.inf, 0.0)), (result["loss"], rate))
    return {name: rate for name, (_, rate) in best.items()}


def equal_time(results: Results, steps: int) -> dict[str, int]:
    """Return how many steps each model makes in the processor time of the reference's."""
    seconds = {
        name: median(times) for name, times in values_of(results, "processor_seconds").items()
    }
    return {name: max(1, round(steps * seconds[REFERENCE] / seconds[name])) for name in results}


def page(parameters: Results, time: Results) -> list[str]:
    """Return the record's text: a table, and for both comparisons what agrees."""
    lines = []
    for title, results in (("parameters", parameters), ("processor time", time)):
        ours = values_of(results, "loss")
        seconds = values_of(results, "processor_seconds")
        rows = []
        for name, (one, *_) in results.items():
            sizes = [str(one["width"]), f"{one['parameters']:,}", f"{one['learning_rate']:g}"]
            took = [str(one["steps"]), f"{mean(seconds[name]):.0f}", spread(ours[name])]
            rows.append([name, *sizes, *took, number(FINEWEB[name]), number(FINEMATH[name])])
        heads = ["model", "d", "parameters", "rate", "steps", "processor s", "loss"]
        heads += ["the paper's, FineWeb", "FineMath"]
        lines += [f"Equal {title}:", "", *table(heads, rows), ""]
        for text, paper in (("FineWeb", FINEWEB), ("FineMath", FINEMATH)):
            lines += [f"Against {text}: {ordering(ours, paper).sentence()}", ""]
    return lines[:-1]


def main(argv: list[str]) -> int:
    """Run all cases and write the record."""
    config = load(BaselinesConfig, argv, prog="python -m experiments baselines")
    trials = Trials(config, standard_library(config.max_vocab_size))
    rates = best_rates(config, trials)
    parameters = trials.run({name: (rate, config.steps) for name, rate in rates.items()})
    steps = equal_time(parameters, config.steps)
    time = trials.run({name: (rate, steps[name]) for name, rate in rates.items()})
    both = {f"{name}, equal parameters": found for name, found in parameters.items()}
    both |= {f"{name}, equal time": found for name, found in time.items()}
    figure = beside(values_of(time, "loss"), FINEMATH, "loss (nats per token), equal time")
    publish("baselines", argv, config, both, page(parameters, time), figure)
    return 0
