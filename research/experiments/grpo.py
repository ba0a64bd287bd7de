"""`python -m research.experiments grpo`: what GRPO does to pass@1 and pass@k, plain and balanced.

It compares 5, 50 and 200 rollouts a question, of as many questions fewer: an update samples as many
rollouts in every case. Plain GRPO learns from all of them; balanced resampling from 16 of each
question, or one less than there are, up to half of them good. Questions are the word problems of
`srm train grpo`; pass@k is of others than were trained on.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import mean

import msgspec
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.finetuning import gain, powers, rates, solved
from research.experiments.harness.report import AVERAGED, finish, first_and_last, table
from research.experiments.harness.result_cache import Numbers, folder_of
from research.experiments.harness.runner import Report, Results, run_cases
from research.experiments.harness.settings import ExperimentSettings
from srm.engine.config import DEMO_MODEL
from srm.engine.weights.checkpoint import read_model
from srm.settings import build
from srm.training.grpo.command import grpo
from srm.training.grpo.config import EvaluationSettings, GRPOConfig
from srm.training.grpo.record import JsonLinesFile, Update
from srm.training.statistics.coverage import Floats, spaced

START, PLAIN, BALANCED = "start", "plain", "balanced"


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments grpo`."""

    seeds: tuple[int, ...] = (0, 1)
    model: Path = DEMO_MODEL
    """Folder of the model that training begins with."""
    steps: int = 25
    rollouts: tuple[int, ...] = (5, 50, 200)
    """Numbers of rollouts of a question to compare."""
    sampled: int = 200
    """Rollouts in one update, all its questions together."""
    group_size: int = 16
    """Rollouts of a question that balanced resampling learns from, if there are more."""
    learning_rate: float = 1e-4
    kl_weight: float = 0.04
    """Weight of the KL divergence from the model that training began with (β)."""
    temperature: float = 0.7
    """Temperature of rollouts and of completions for pass@k, and so is `top_p`."""
    top_p: float = 0.9
    max_tokens: int = 96
    questions: int = 60
    """Number of questions for pass@k."""
    samples: int = 128
    """Completions of each of these questions; the largest k."""

    @property
    def cases(self) -> list[str]:
        """Names of the trained cases."""
        return [f"{kind} {count}" for kind in (PLAIN, BALANCED) for count in self.rollouts]

    def training(self, case: str, seed: int) -> GRPOConfig:
        """Return the settings of `srm train grpo` for a case."""
        kind, count = case.split()
        rollouts = int(count)
        settings = {
            "questions": self.sampled // rollouts,
            "rollouts": rollouts,
            "group_size": 0 if kind == PLAIN else min(self.group_size, rollouts - 1),
            "evaluate_every": 0,
            "save_every": self.steps,
            "seed": seed,
            **self.only("model", "steps", "learning_rate", "kl_weight"),
            **self.only("temperature", "top_p", "max_tokens", "threads"),
        }
        output = folder_of(self.results / "grpo" / f"model-{kind}-{rollouts}-{seed}", settings)
        return build(GRPOConfig, settings | {"output": output})

    @property
    def sampling(self) -> GRPOConfig:
        """Return how held-out questions are sampled: always with the same seed."""
        wanted = EvaluationSettings(1, self.questions, self.samples)
        rules = self.training(f"{PLAIN} {self.rollouts[0]}", 0)
        return msgspec.structs.replace(rules, evaluations=wanted)


def learned(config: Settings, case: str, seed: int) -> Numbers:
    """Train a case with a seed; return the right samples of each question afterwards, and the
    record of its updates."""
    rules = config.training(case, seed)
    summary = grpo(rules).summary
    updates = JsonLinesFile(rules.output / "updates.jsonl", Update, config.steps)
    return solved(config.sampling, rules.output) | {
        "rewards": [update.reward for update in updates],
        "mixed": mean(update.mixed for update in updates),
        "kl": updates[-1].kl,
        "learned_tokens": sum(update.learned_tokens for update in updates),
        "rollout_tokens": sum(update.rollout_tokens for update in updates),
        "summary": msgspec.to_builtins(summary),
    }


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: a table of pass@k and gains, one of the training, what agrees."""
    ks = powers(config.samples)
    start = rates(results[START], ks)
    gains, means = [], {}
    for case in config.cases:
        solved_rates = rates(results[case], ks)
        means[case] = solved_rates.mean(axis=0) - start.mean(axis=0)
        gains.append([case, *(gain(start[:, at], solved_rates[:, at]) for at in range(len(ks)))])
    began = [START, *(f"{value:.4f}" for value in start.mean(axis=0))]
    trained = []
    for case in config.cases:
        seeds, rules = results[case], config.training(case, 0)
        mixed = f"{mean(seed['mixed'] for seed in seeds):.0%}"
        tokens = f"{mean(seed['learned_tokens'] for seed in seeds):,.0f}"
        trained.append(
            [
                case,
                str(rules.data.questions),
                str(rules.rows),
                *first_and_last(seeds),
                mixed,
                tokens,
            ]
        )
    heads = ["case", "questions", "rows learned", f"reward of the first {AVERAGED} updates"]
    heads += [f"of the last {AVERAGED}", "mixed", "tokens learned"]
    return [
        f"{len(start)} other questions, {config.samples:,} samples of each; after "
        f"{config.steps} updates of {config.sampled} rollouts, with {len(config.seeds)} seeds, of "
        "which pass@k is the mean. What pass@k has gained, by question, with its standard error:",
        table(["case", *(f"pass@{k:,}" for k in ks)], [began, *gains]),
        table(heads, trained),
        agreement(config, means),
    ]


def agreement(config: Settings, gained: dict[str, Floats]) -> str:
    """Say whether pass@k changes as in the paper; `gained` has the mean gains of each case by k."""
    most = config.rollouts[-1]
    plain, balanced = (gained[f"{kind} {most}"][-1] for kind in (PLAIN, BALANCED))
    agrees = {1: "as in the paper", 0: "unchanged, unlike in the paper", -1: "against the paper"}
    as_there = agrees[np.sign(balanced)], agrees[-np.sign(plain)]
    return (
        f"In the paper balanced resampling raises pass@k, and plain GRPO lowers it where groups "
        f"are large. Here, with {most} rollouts, pass@{config.samples:,} goes by {balanced:+.4f} "
        f"balanced ({as_there[0]}) and by {plain:+.4f} plain ({as_there[1]})."
    )


def draw(config: Settings, results: Results) -> Figure:
    """Plot the gain in pass@k against k, a line for each case."""
    figure, axes = plt.subplots(figsize=(7, 5))
    ks = spaced(config.samples)
    start = rates(results[START], ks).mean(axis=0)
    for case in config.cases:
        style = "--" if case.startswith(PLAIN) else "-"
        colour = f"C{config.rollouts.index(int(case.split()[1]))}"
        gained = rates(results[case], ks).mean(axis=0) - start
        axes.plot(ks, gained, style, color=colour, label=case)
    axes.axhline(0, color="black", linewidth=0.5)
    labels = {"xlabel": "samples of a question, k", "ylabel": "gain of pass@k"}
    finish(axes, xscale="log", **labels)
    return figure


def run(config: Settings) -> Report:
    """Sample from the model as it is, and after it has learned in each case."""
    made_of = {"model": read_model(config.model).fingerprint}
    begun = {START: lambda _: solved(config.sampling, config.model)}
    results = run_cases(config, begun, made_of, config.seeds[:1])
    results |= run_cases(
        config, {case: partial(learned, config, case) for case in config.cases}, made_of
    )
    return results, page(config, results), draw(config, results)
