"""`research.experiments memory`: how far back models remember, by how their λ are trained.

An SRM copies the first half of a sequence, as in `copying`: every token to predict is as far back
as the half is long, which is the gap. Beside it stands the loss on text, which needs what is near.
The four treatments of λ are: none at all, trained as published (all begin at 1, and stay out of
their range where an update takes them), at the model's own learning rate, and at a fiftieth of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import nn

from research.experiments.copying import fit_copies
from research.experiments.harness.corpus import Corpus, standard_library
from research.experiments.harness.models import HEADS
from research.experiments.harness.report import finish, minutes_of, ranged, spread, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Report, Results, fit_text, run_cases
from research.experiments.harness.settings import ExperimentSettings
from srm.engine.config import ModelConfig
from srm.engine.weights.tensors import DECAY_RANGE, is_scalar
from srm.training.model import SRM, LanguageModel
from srm.training.schedule import LAMBDA

TREATMENTS: dict[str, dict[str, Any]] = {
    "no decay": {},
    "as published": {"decay_rate_scale": 1.0, "clip_decays": False},
    "the model's rate": {"decay_rate_scale": 1.0},
    "a fiftieth": {"decay_rate_scale": 0.02},
}
"""How λ are trained, as members of Schedule."""


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments memory`."""

    steps: int = 1_000
    """Updates in each case that copies."""
    text_steps: int = 128
    """Updates in each case that reads text."""
    rows: int = 16
    d_model: int = 64
    num_layers: int = 2
    n_ctx: int = 128
    """Tokens in a sequence of text."""
    copied: tuple[int, ...] = (8, 16, 32)
    """Gaps to compare: the copied lengths, in tokens."""
    ids: int = 16
    """Number of token ids that sequences are drawn from, each equally likely."""
    learning_rate: float = 5e-3
    max_vocab_size: int = 1_024


def model(config: Settings, treatment: str, n: int, vocab_size: int) -> SRM:
    """Make the model of a treatment, for sequences of up to n tokens."""
    sizes = (config.d_model, config.num_layers, HEADS, n, vocab_size)
    made = SRM(ModelConfig(*sizes, decay=treatment != "no decay"))
    if treatment == "as published":
        for name, parameter in made.named_parameters():
            if name.endswith(LAMBDA):
                nn.init.ones_(parameter)
            elif is_scalar(name) and name.endswith("weight"):  # as of a head that forgets nothing
                nn.init.constant_(parameter, n**-0.5)
    return made


def decays(made: LanguageModel) -> list[float]:
    """Return all λ of a model, as it reads them, from the least."""
    raw = [value.data for name, value in made.named_parameters() if name.endswith(LAMBDA)]
    return sorted(torch.cat(raw).clamp(*DECAY_RANGE).tolist()) if raw else []


def copy(config: Settings, treatment: str, copied: int, seed: int) -> Numbers:
    """Train one case; return its accuracy on new sequences, their loss, and λ at the end."""
    make = partial(model, config, treatment, 2 * copied, config.ids)
    rate, how = config.learning_rate, TREATMENTS[treatment]
    made, figures = fit_copies(config, make, copied, seed, rate, **how)
    return figures | {"decays": decays(made)}


def read(config: Settings, corpus: Corpus, treatment: str, seed: int) -> Numbers:
    """Train one case on text; return its loss on held-out text, and λ at the end."""
    make = partial(model, config, treatment, config.n_ctx, corpus.vocab_size)
    rate, how = config.learning_rate, TREATMENTS[treatment]
    _, made, figures = fit_text(corpus, config, make, seed, config.text_steps, rate, **how)
    return figures | {"decays": decays(made)}


def accuracies(config: Settings, results: Results, treatment: str) -> list[list[float]]:
    """Return the accuracies of each gap, by seed."""
    return [[run["accuracy"] for run in results[f"{treatment} {gap}"]] for gap in config.copied]


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: a table by gap and text, and one of λ at the longest gap."""
    longest = config.copied[-1]
    rows = [
        [
            *(name, *map(spread, accuracies(config, results, name))),
            spread([run["loss"] for run in results[f"{name} text"]]),
        ]
        for name in TREATMENTS
    ]
    ends = [
        [name, *(_show(results[f"{name} {what}"][0]["decays"]) for what in (longest, "text"))]
        for name in TREATMENTS
    ]
    return [
        f"Accuracy on copied tokens of new sequences, by gap in tokens; chance is "
        f"{1 / config.ids:.3f}. Beside it the loss on text after {config.text_steps} updates, in "
        f"nats per token. {minutes_of(results)}",
        table(["λ", *(f"gap {gap}" for gap in config.copied), "loss on text"], rows),
        f"λ after training, seed {config.seeds[0]}:",
        table(["λ", f"gap {longest}", "text"], ends),
    ]


def _show(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values) or "–"


def draw(config: Settings, results: Results) -> Figure:
    """Plot accuracy by gap: means, and the range over seeds."""
    figure, axes = plt.subplots(figsize=(7, 5))
    for name in TREATMENTS:
        ranged(axes, config.copied, accuracies(config, results, name), marker="o", label=name)
    finish(axes, xlabel="gap (tokens)", ylabel="accuracy")
    return figure


def run(config: Settings) -> Report:
    """Run all cases."""
    corpus = standard_library(config.max_vocab_size)
    cases: dict[str, Callable[[int], Numbers]] = {}
    for name in TREATMENTS:
        cases |= {f"{name} {gap}": partial(copy, config, name, gap) for gap in config.copied}
        cases[f"{name} text"] = partial(read, config, corpus, name)
    results = run_cases(config, cases, {"texts": corpus.sha256})
    return results, page(config, results), draw(config, results)
