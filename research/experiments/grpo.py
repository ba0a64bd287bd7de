"""`python -m research.experiments grpo`: what GRPO does to pass@1 and pass@k, plain and balanced.

It compares 5, 50 and 200 rollouts a question, of as many questions fewer: an update samples as many
rollouts in every case. Plain GRPO learns from all of them; balanced resampling from 16 of each
question, or one less than there are, up to half of them good. Questions are those of files, or the
word problems of `srm train grpo`; pass@k is of others than were trained on.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from statistics import mean

import msgspec
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.finetuning import gain, powers, rates, solved
from research.experiments.harness.report import table
from research.experiments.harness.result_cache import Numbers, digest, folder_of
from research.experiments.harness.runner import Results, publish, run_cases
from research.experiments.harness.settings import ExperimentSettings
from srm.engine.config import DEMO_MODEL
from srm.engine.weights.checkpoint import read_model
from srm.settings import build, load
from srm.training.grpo.command import grpo
from srm.training.grpo.config import EvaluationSettings, GRPOConfig
from srm.training.grpo.record import JsonLinesFile, Update
from srm.training.questions.questions import check_apart, read_questions
from srm.training.statistics.coverage import Floats, spaced

START, PLAIN, BALANCED = "start", "plain", "balanced"
AVERAGED = 5
"""Number of first and of last updates whose mean reward is shown."""


class GRPOExperimentConfig(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments grpo`."""

    seeds: tuple[int, ...] = (0, 1)
    """Seeds of training; each draws other questions, rollouts and groups."""
    model: Path = DEMO_MODEL
    """Folder of the model that training begins with."""
    train: tuple[Path, ...] = ()
    """Files of JSON lines with question and answer; empty: generated word problems."""
    evaluation: tuple[Path, ...] = ()
    """Files like those of `train` for pass@k; needed where `train` has files. Empty: held-out word
    problems."""
    steps: int = 30
    """Updates in each case."""
    rollouts: tuple[int, ...] = (5, 50, 200)
    """Numbers of rollouts of a question to compare."""
    sampled: int = 400
    """Rollouts in one update, all its questions together."""
    group_size: int = 16
    """Rollouts of a question that balanced resampling learns from, if there are more."""
    learning_rate: float = 2e-5
    """Peak learning rate, as in `srm train grpo`."""
    kl_weight: float = 0.04
    """Weight of the KL divergence from the model that training began with (β)."""
    temperature: float = 0.7
    """Temperature of the rollouts and of the completions for pass@k."""
    top_p: float = 0.9
    """Top-p of the rollouts and of the completions for pass@k."""
    max_tokens: int = 96
    """Longest completion, in tokens."""
    questions: int = 100
    """Number of questions for pass@k, the first ones."""
    samples: int = 256
    """Completions of each of these questions; the largest k."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.train) != bool(self.evaluation):
            raise ValueError("train and evaluation must both have files, or neither")
        for count in self.rollouts:
            if count < 3 or self.sampled % count:
                raise ValueError(
                    f"rollouts must each be at least 3 and divide sampled = {self.sampled}, got "
                    f"{count}"
                )
        if not self.rollouts or sorted(set(self.rollouts)) != list(self.rollouts):
            raise ValueError(f"rollouts must be one or more that rise, got {self.rollouts}")
        for case in self.cases:
            self.training(case, 0)  # reports what it does not take

    @property
    def cases(self) -> list[str]:
        """Names of the trained cases."""
        return [f"{kind} {count}" for kind in (PLAIN, BALANCED) for count in self.rollouts]

    def training(self, case: str, seed: int) -> GRPOConfig:
        """Return the settings of `srm train grpo` for a case. Raises ConfigError."""
        kind, count = case.split()
        rollouts = int(count)
        settings = {
            "questions": self.sampled // rollouts,
            "rollouts": rollouts,
            "group_size": 0 if kind == PLAIN else min(self.group_size, rollouts - 1),
            "evaluate_every": 0,
            "save_every": self.steps,
            "seed": seed,
            **self.only("model", "train", "evaluation", "steps", "learning_rate", "kl_weight"),
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


def learned(config: GRPOExperimentConfig, case: str, seed: int) -> Numbers:
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


def page(config: GRPOExperimentConfig, results: Results) -> list[str]:
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
        rewards = (
            f"{mean(mean(seed['rewards'][part]) for seed in seeds):.3f}"
            for part in (slice(AVERAGED), slice(-AVERAGED, None))
        )
        mixed = f"{mean(seed['mixed'] for seed in seeds):.0%}"
        tokens = f"{mean(seed['learned_tokens'] for seed in seeds):,.0f}"
        trained.append([case, str(rules.data.questions), str(rules.rows), *rewards, mixed, tokens])
    heads = ["case", "questions", "rows learned", f"reward of the first {AVERAGED} updates"]
    heads += [f"of the last {AVERAGED}", "mixed", "tokens learned"]
    return [
        f"{len(start)} other questions, {config.samples:,} samples of each; after "
        f"{config.steps} updates of {config.sampled} rollouts, with {len(config.seeds)} seeds, of "
        "which pass@k is the mean. What pass@k has gained, by question, with its standard error:",
        "",
        *table(["case", *(f"pass@{k:,}" for k in ks)], [began, *gains]),
        "",
        *table(heads, trained),
        "",
        agreement(config, means),
    ]


def agreement(config: GRPOExperimentConfig, gained: dict[str, Floats]) -> str:
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


def drawn(config: GRPOExperimentConfig, results: Results) -> Figure:
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
    axes.set(xlabel="samples of a question, k", ylabel="gain of pass@k", xscale="log")
    axes.grid(linewidth=0.3)
    axes.legend(fontsize=7)
    return figure


def main(argv: list[str]) -> int:
    """Run all cases and write the record."""
    config = load(GRPOExperimentConfig, argv, prog="python -m research.experiments grpo")
    check_apart(
        "evaluation",
        chain.from_iterable(map(read_questions, config.train)),
        islice(chain.from_iterable(map(read_questions, config.evaluation)), config.questions),
    )
    made_of = {
        "model": read_model(config.model).fingerprint,
        "questions": digest((*config.train, *config.evaluation)),
    }
    begun = {START: lambda _: solved(config.sampling, config.model)}
    results = run_cases("grpo", config, begun, made_of, config.seeds[:1])

    def case_of(case: str) -> Callable[[int], Numbers]:
        return lambda seed: learned(config, case, seed)

    cases = {case: case_of(case) for case in config.cases}
    results |= run_cases("grpo", config, cases, made_of)
    publish("grpo", argv, config, results, page(config, results), drawn(config, results))
    return 0
