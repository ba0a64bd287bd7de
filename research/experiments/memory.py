"""`research.experiments memory`: how far back models remember, by how their λ are trained.

An SRM copies the first half of a sequence, as in `copying`: every token to predict is as far back
as the half is long, which is the gap. Beside it stands the loss on text, which needs what is near.
The four treatments of λ are: none at all, trained as published (all begin at 1, and stay out of
their range where an update takes them), at the model's own learning rate, and at a fiftieth of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean
from typing import Any

import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import nn

from research.experiments.copying import EVALUATION_BATCHES, Copies, accuracy
from research.experiments.harness.corpus import Corpus, standard_library
from research.experiments.harness.models import HEADS
from research.experiments.harness.report import spread, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Results, fit, publish, run_cases, values_of
from research.experiments.harness.settings import ModelSettings
from srm.engine.config import ModelConfig
from srm.engine.weights.tensors import DECAY_RANGE
from srm.settings import load
from srm.training.model import SRM
from srm.training.schedule import LAMBDA

TREATMENTS: dict[str, dict[str, Any]] = {
    "no decay": {},
    "as published": {"decay_rate_scale": 1.0, "clip_decays": False},
    "the model's rate": {"decay_rate_scale": 1.0},
    "a fiftieth": {"decay_rate_scale": 0.02},
}
"""How λ are trained, as members of Schedule."""


class MemoryConfig(ModelSettings, frozen=True):
    """Settings of `python -m research.experiments memory`."""

    steps: int = 1_000
    """Updates in each case that copies."""
    text_steps: int = 128
    """Updates in each case that reads text."""
    rows: int = 16
    """Sequences in one update."""
    d_model: int = 64
    """Width of the models."""
    num_layers: int = 2
    """Number of blocks of the models."""
    n_ctx: int = 128
    """Tokens in a sequence of text."""
    copied: tuple[int, ...] = (8, 16, 32)
    """Gaps to compare: the copied lengths, in tokens."""
    ids: int = 16
    """Number of token ids that sequences are drawn from, each equally likely."""
    learning_rate: float = 5e-3
    """Peak learning rate: reached after a tenth of the updates, then falling to 0."""
    max_vocab_size: int = 1_024
    """Most entries of the tokenizer that is trained."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.copied or min(self.copied) < 1 or sorted(set(self.copied)) != [*self.copied]:
            raise ValueError(f"copied must be one or more numbers ≥ 1 that rise, got {self.copied}")
        if self.ids < 2:
            raise ValueError(f"ids must be at least 2, got {self.ids}")
        model(self, "no decay", 1, self.ids)  # reports an invalid shape before any work


def model(config: MemoryConfig, treatment: str, n: int, vocab_size: int) -> SRM:
    """Make the model of a treatment, for sequences of up to n tokens."""
    sizes = (config.d_model, config.num_layers, HEADS, n, vocab_size)
    made = SRM(ModelConfig(*sizes, decay=treatment != "no decay"))
    if treatment == "as published":
        for name, parameter in made.named_parameters():
            if name.endswith(LAMBDA):
                nn.init.ones_(parameter)
    return made


def decays(made: SRM) -> list[float]:
    """Return all λ of a model, as it reads them, from the least."""
    raw = [value.data for name, value in made.named_parameters() if name.endswith(LAMBDA)]
    return sorted(torch.cat(raw).clamp(*DECAY_RANGE).tolist()) if raw else []


def copy(config: MemoryConfig, treatment: str, copied: int, seed: int) -> Numbers:
    """Train one case; return its accuracy on new sequences, their loss, and λ at the end."""
    fresh = Copies(config.rows, copied, config.ids, (1,))
    evaluation = [fresh[index] for index in range(EVALUATION_BATCHES)]
    run, made, took = fit(
        lambda: model(config, treatment, 2 * copied, config.ids),
        Copies(config.rows, copied, config.ids, (0, seed)),
        seed,
        config.steps,
        config.learning_rate,
        **TREATMENTS[treatment],
    )
    assert isinstance(made, SRM)
    figures = {"accuracy": accuracy(run, evaluation), "loss": run.evaluate(evaluation)}
    return figures | {"decays": decays(made), **took}


def read(config: MemoryConfig, corpus: Corpus, treatment: str, seed: int) -> Numbers:
    """Train one case on text; return its loss on held-out text, and λ at the end."""
    run, made, took = fit(
        lambda: model(config, treatment, config.n_ctx, corpus.vocab_size),
        corpus.batches(config.rows, config.n_ctx, seed),
        seed,
        config.text_steps,
        config.learning_rate,
        **TREATMENTS[treatment],
    )
    assert isinstance(made, SRM)
    loss = run.evaluate(corpus.evaluation(config.rows, config.n_ctx))
    return {"loss": loss, "decays": decays(made), **took}


def page(config: MemoryConfig, results: Results) -> list[str]:
    """Return the record's text: a table by gap and text, and one of λ at the longest gap."""
    longest, first = config.copied[-1], config.seeds[0]
    ours = values_of({k: v for k, v in results.items() if "text" not in k}, "accuracy")
    losses = values_of(results, "loss")
    rows = [
        [
            name,
            *(spread(ours[f"{name} {n}"]) for n in config.copied),
            spread(losses[f"{name} text"]),
        ]
        for name in TREATMENTS
    ]
    spent = sum(sum(values) for values in values_of(results, "processor_seconds").values())
    ends = [
        [name, *(_shown(results[f"{name} {what}"][0]["decays"]) for what in (longest, "text"))]
        for name in TREATMENTS
    ]
    return [
        f"Accuracy on copied tokens of new sequences, by gap in tokens; chance is "
        f"{1 / config.ids:.3f}. Beside it the loss on text after {config.text_steps} updates, in "
        f"nats per token. All cases took {spent / 60:.0f} processor minutes.",
        "",
        *table(["λ", *(f"gap {gap}" for gap in config.copied), "loss on text"], rows),
        "",
        f"λ after training, seed {first}:",
        "",
        *table(["λ", f"gap {longest}", "text"], ends),
    ]


def _shown(values: list[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values) or "–"


def drawn(config: MemoryConfig, results: Results) -> Figure:
    """Plot accuracy by gap: means, and the range over seeds."""
    figure, axes = plt.subplots(figsize=(7, 5))
    for name in TREATMENTS:
        by_gap = [[r["accuracy"] for r in results[f"{name} {gap}"]] for gap in config.copied]
        means = [mean(values) for values in by_gap]
        lows = [middle - min(values) for middle, values in zip(means, by_gap, strict=True)]
        highs = [max(values) - middle for middle, values in zip(means, by_gap, strict=True)]
        axes.errorbar(config.copied, means, [lows, highs], marker="o", capsize=3, label=name)
    axes.set(xlabel="gap (tokens)", ylabel="accuracy")
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=7)
    return figure


def main(argv: list[str]) -> int:
    """Run all cases and write the record."""
    config = load(MemoryConfig, argv, prog="python -m research.experiments memory")
    corpus = standard_library(config.max_vocab_size)
    cases: dict[str, Callable[[int], Numbers]] = {}
    for name in TREATMENTS:
        cases |= {f"{name} {gap}": partial(copy, config, name, gap) for gap in config.copied}
        cases[f"{name} text"] = partial(read, config, corpus, name)
    results = run_cases("memory", config, cases, {"texts": corpus.sha256})
    publish("memory", argv, config, results, page(config, results), drawn(config, results))
    return 0
