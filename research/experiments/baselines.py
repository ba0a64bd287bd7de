"""`research.experiments baselines`: SRM, and what the paper compares it with, trained alike.

They are trained once with as many parameters as SRM has, and once more for as much processor time,
by its clock.
Each model takes the learning rate, of several, that gives it the least loss with the first seed:
what suits one is too much for another. Where that is the least or the largest of them, rates beyond
it are tried too. The paper measured its losses on FineWeb-edu, at widths near ours in proportion,
and on FineMath 4+ at equal compute; of RWKV-4 it has none, since that was unstable.

The losses along training say when one model overtakes another: the paper's Transformer learns more
slowly at first and ends below SRM's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.harness.corpus import Corpus, standard_library
from research.experiments.harness.learning_rates import best_rate, losses_of, or_worst
from research.experiments.harness.models import (
    IN_FLOAT32,
    MULTIPLE,
    REFERENCE,
    MakeModel,
    model_makers,
)
from research.experiments.harness.ordering import ordering
from research.experiments.harness.report import draw_lines, number, points, spread, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Report, Results, fit_text, run_cases, values_of
from research.experiments.harness.settings import ExperimentSettings

FINEWEB = {"SRM": 2.80, "Transformer": 2.573, "masked mixer": 2.628, "Mamba 2": 2.758}
"""The paper's losses at d 1,024, 512, 1,024 and 512."""
FINEMATH = {"SRM": 1.614, "Transformer": 1.391, "masked mixer": 1.483, "Mamba 2": 2.989}
"""The paper's losses at equal compute."""
PARTS = 16
"""Parts of a training run; of each the mean loss is shown."""


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments baselines`."""

    steps: int = 256
    rows: int = 16
    d_model: int = 96
    """Width of SRM; other models get the width that gives them about as many parameters."""
    num_layers: int = 4
    n_ctx: int = 128
    learning_rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2)
    further_rates: int = 4
    """Most further rates to try for a model: while its best rate is the largest or least one tried,
    twice or half of it is tried too."""
    max_vocab_size: int = 1_024


def width_of(make: MakeModel, parameters: int, most: int) -> int:
    """Return the width, up to `most`, whose model has the number of parameters nearest to
    `parameters`."""

    def distance(width: int) -> int:
        with torch.device("meta"):
            return abs(
                sum(parameter.numel() for parameter in make(width).parameters()) - parameters
            )

    return min(range(MULTIPLE, most + 1, MULTIPLE), key=distance)


class Length(NamedTuple):
    """The learning rate of a run, and how many updates it makes, or for how many seconds."""

    rate: float
    steps: int
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.rate:g} {self.steps or f'{self.seconds:g} s'}"


class Trials:
    """Training runs of each model at its width, with any learning rate and number of steps."""

    def __init__(self, config: Settings, corpus: Corpus) -> None:
        self._config, self._corpus = config, corpus
        self._make = model_makers(config.num_layers, config.n_ctx, corpus.vocab_size)
        wanted = sum(
            parameter.numel() for parameter in self._make[REFERENCE](config.d_model).parameters()
        )
        self._widths = {
            name: width_of(make, wanted, 2 * config.d_model) for name, make in self._make.items()
        }

    @property
    def names(self) -> list[str]:
        """Names of the models."""
        return list(self._make)

    def run(
        self, of: Mapping[str, Length], seeds: Sequence[int] = (), is_trial: bool = False
    ) -> dict[str, list[Numbers]]:
        """Return each model's results with the learning rate and the length that `of` gives it. A
        trial may diverge."""
        names = {f"{name} {length}": name for name, length in of.items()}
        cases = {case: self._case(name, of[name]) for case, name in names.items()}
        if is_trial:
            cases = {case: or_worst(measure) for case, measure in cases.items()}
        losses = run_cases(self._config, cases, {"texts": self._corpus.sha256}, seeds)
        return {names[case]: results for case, results in losses.items()}

    def _case(self, name: str, length: Length) -> Callable[[int], Numbers]:
        width = self._widths[name]
        full: dict[str, Any] = {"precision": "float32"} if name in IN_FLOAT32 else {}

        def measure(seed: int) -> Numbers:
            make = partial(self._make[name], width)
            how = seed, length.steps, length.rate
            minutes = length.seconds / 60
            _, _, took = fit_text(self._corpus, self._config, make, *how, minutes=minutes, **full)
            steps = len(took["training_losses"])
            return {"width": width, "learning_rate": length.rate, "steps": steps, **took}

        return measure


def try_rates(config: Settings, trials: Trials) -> dict[str, dict[float, Numbers]]:
    """Train each model with all learning rates and the first seed; return its results by rate."""
    tried: dict[str, dict[float, Numbers]] = {name: {} for name in trials.names}

    def run(rates: Mapping[str, float]) -> None:
        of = {name: Length(rate, config.steps) for name, rate in rates.items()}
        for name, (result,) in trials.run(of, config.seeds[:1], is_trial=True).items():
            tried[name][rates[name]] = result

    for rate in config.learning_rates:
        run(dict.fromkeys(tried, rate))
    for _ in range(config.further_rates):
        run({name: rate for name, losses in tried.items() if (rate := rate_beyond(losses))})
    return {name: dict(sorted(losses.items())) for name, losses in tried.items()}


def rate_beyond(tried: Mapping[float, Numbers]) -> float:
    """Return the next rate to try: twice or half the best one if it is the largest or least, else
    0."""
    best = best_rate(tried)
    return best * 2 if best == max(tried) else best / 2 if best == min(tried) else 0.0


def along(runs: Sequence[Numbers]) -> list[float]:
    """Return the mean training loss of each part of a run, over seeds."""
    losses = np.mean([run["training_losses"] for run in runs], axis=0)
    return [float(part.mean()) for part in np.array_split(losses, min(PARTS, len(losses)))]


def overtaken(first: Sequence[float], other: Sequence[float]) -> int | None:
    """Return from which point on `other` stays below `first`; None where it ends above."""
    above = [i for i, loss in enumerate(first) if other[i] >= loss]
    return None if above[-1:] == [len(first) - 1] else above[-1] + 1 if above else 0


def crossings(parameters: Results, steps: int) -> list[str]:
    """Say which models overtake the reference along training, by updates and by processor time."""
    curves = {name: along(runs) for name, runs in parameters.items()}
    seconds = {n: median(of) for n, of in values_of(parameters, "processor_seconds").items()}
    reference, lines = curves[REFERENCE], []
    ends = (np.arange(len(reference)) + 1) / len(reference)
    for name, curve in curves.items():
        if name == REFERENCE:
            continue
        by_time = np.interp(ends * seconds[REFERENCE], ends * seconds[name], curve)
        places = []
        for what, other in (("as many updates", curve), ("as much processor time", by_time)):
            place = overtaken(reference, list(other))
            where = "stays above it" if place is None else "is below it from the beginning"
            if place:
                where = f"is below it from update {round(steps * place / len(reference)):,} on"
            places.append(f"after {what} it {where}")
        lines.append(f"- {name}: {', '.join(places)}.")
    return lines


def equal(what: str, results: Results) -> Results:
    """Return the results of each model at equal `parameters` or `time`."""
    ending = f", equal {what}"
    return {case.removesuffix(ending): of for case, of in results.items() if case.endswith(ending)}


def page(_config: Settings, results: Results) -> list[str]:
    """Return the record's text: losses by learning rate, and for both comparisons a table and what
    agrees."""
    parameters, time = equal("parameters", results), equal("time", results)
    rates = []
    for name in parameters:
        trial = f"{name}, rate "
        result = {
            float(case.removeprefix(trial)): of[0]
            for case, of in results.items()
            if case.startswith(trial)
        }
        is_edge = rate_beyond(result)
        side = "; the best is the last that was tried on its side" if is_edge else ""
        rates.append(f"- {name}: {losses_of(result)}{side}")
    blocks = ["Losses by learning rate, with one seed:", "\n".join(rates)]
    for title, compared in (("parameters", parameters), ("processor time", time)):
        ours = values_of(compared, "loss")
        rows = [
            [
                *(name, str(runs[0]["width"]), f"{runs[0]['parameters']:,}"),
                f"{runs[0]['learning_rate']:g}",
                f"{mean(run['steps'] for run in runs):.0f}",
                f"{mean(run['processor_seconds'] for run in runs):.0f}",
                *(spread(ours[name]), number(FINEWEB.get(name)), number(FINEMATH.get(name))),
            ]
            for name, runs in compared.items()
        ]
        heads = ["model", "d", "parameters", "rate", "steps", "processor s", "loss"]
        heads += ["the paper's, FineWeb", "FineMath"]
        blocks += [f"Equal {title}:", table(heads, rows)]
        for text, paper in (("FineWeb", FINEWEB), ("FineMath", FINEMATH)):
            blocks.append(f"Against {text}: {ordering(ours, paper).sentence()}")
    steps = parameters[REFERENCE][0]["steps"]
    curves = {name: along(runs) for name, runs in parameters.items()}
    parts = len(curves[REFERENCE])
    shown = [parts * quarter // 4 - 1 for quarter in (1, 2, 3, 4)]
    heads = ["model", *(f"to {round(steps * (i + 1) / parts):,}" for i in shown)]
    rows = [[name, *(number(curve[i]) for i in shown)] for name, curve in curves.items()]
    return [
        *blocks,
        f"Training losses at equal parameters, each the mean of 1/{parts} of the {steps:,} "
        "updates, up to the one named:",
        table(heads, rows),
        f"Beside {REFERENCE}'s:",
        "\n".join(crossings(parameters, steps)),
    ]


def draw(parameters: Results, time: Results) -> Figure:
    """Plot losses beside the paper's, and losses along training by processor time."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5))
    points(left, values_of(time, "loss"), FINEMATH, "loss (nats per token), equal time")
    lines = {}
    for name, runs in parameters.items():
        curve, seconds = along(runs), mean(run["processor_seconds"] for run in runs)
        ends = (np.arange(len(curve)) + 1) * seconds / len(curve)
        lines[name] = ends.tolist(), curve
    labels = {"xlabel": "processor seconds", "ylabel": "training loss, equal parameters"}
    draw_lines(lines, right, xscale="log", **labels)
    return figure


def run(config: Settings) -> Report:
    """Try the rates, and train both comparisons at the best ones."""
    trials = Trials(config, standard_library(config.max_vocab_size))
    tried = try_rates(config, trials)
    rates = {name: best_rate(losses) for name, losses in tried.items()}
    by_steps = {name: Length(rate, config.steps) for name, rate in rates.items()}
    parameters = trials.run(by_steps)
    seconds = median(run["processor_seconds"] for run in parameters[REFERENCE])
    by_clock = {name: Length(rate, 0, seconds) for name, rate in rates.items()}
    time = trials.run(by_clock | {REFERENCE: by_steps[REFERENCE]})
    results = {
        f"{name}, rate {rate:g}": [value]
        for name, of in tried.items()
        for rate, value in of.items()
    }
    results |= {f"{name}, equal parameters": losses for name, losses in parameters.items()}
    results |= {f"{name}, equal time": losses for name, losses in time.items()}
    return results, page(config, results), draw(parameters, time)
