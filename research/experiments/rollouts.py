"""`research.experiments rollouts`: how much of GRPO's time its rollouts take, by who samples them.

They are sampled by the engine in turn with the trainer; by the engine at the same time, a step
ahead; and by a plain sampler in torch, in turn, as training libraries have without an engine. All
have one model and the same settings; the paper has no figures of it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.harness.report import finish, table
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Report, Results, run_cases, values_of
from research.experiments.harness.settings import ExperimentSettings
from srm.engine.config import DEMO_MODEL
from srm.engine.weights.checkpoint import read_model
from srm.settings import build
from srm.training.grpo.command import grpo
from srm.training.grpo.config import GRPOConfig
from srm.training.grpo.record import JsonLinesFile, Update, summary

CASES: dict[str, dict[str, Any]] = {
    "engine, in turn": {},
    "engine, ahead": {"ahead": True},
    "torch, in turn": {"sampler": "torch"},
}
"""The cases, as settings of `srm train grpo`."""
WARMING = 2
"""Number of first updates that are not measured: they start threads and fill caches."""
TIMES = ("waited_s", "learn_s", "load_s")
"""Parts of an update's time, one after the other."""
RATES = ("rollout_tokens_per_s", "learned_tokens_per_s")
SHARES = ("waiting_share", "overlap_share")


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments rollouts`."""

    seeds: tuple[int, ...] = (0, 1)
    threads: int = 0
    """CPU threads for training; 0: all cores. The engine always has all cores."""
    model: Path = DEMO_MODEL
    steps: int = 6
    """Number of measured updates, after two that are not measured."""
    questions: int = 8
    rollouts: int = 50
    group_size: int = 16
    """Rollouts of each question that are learned from."""
    max_tokens: int = 96

    def training(self, case: str, seed: int) -> GRPOConfig:
        """Return the settings of `srm train grpo` for a case."""
        steps = self.steps + WARMING
        folder = self.results / "rollouts" / f"model-{case.replace(', ', '-').replace(' ', '-')}"
        settings = {
            "output": folder.with_name(f"{folder.name}-{seed}"),
            "steps": steps,
            "save_every": steps,
            "evaluate_every": 0,
            "seed": seed,
            **self.only("model", "questions", "rollouts", "group_size", "max_tokens", "threads"),
            **CASES[case],
        }
        return build(GRPOConfig, settings)


def timed(rules: GRPOConfig) -> Numbers:
    """Train a case; return rates and shares of its updates without the first ones."""
    grpo(rules)
    updates = JsonLinesFile(rules.output / "updates.jsonl", Update, rules.schedule.steps)[WARMING:]
    seconds = {
        name: sum(getattr(update, name) for update in updates) for name in (*TIMES, "rollout_s")
    }
    return {**msgspec.to_builtins(summary(updates)), **seconds}


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: a table, and how much the engine saves."""
    rows = []
    for case, seeds in results.items():
        sampled, learned, waiting, overlap = (
            [seed[name] for seed in seeds] for name in (*RATES, *SHARES)
        )
        spent = [_spent(seed) / config.steps for seed in seeds]
        seconds = f"{mean(spent):.2f} ({min(spent):.2f} … {max(spent):.2f})"
        waits = f"{mean(waiting):.0%} ({min(waiting):.0%} … {max(waiting):.0%})"
        speeds = f"{mean(sampled):,.0f}", f"{mean(learned):,.0f}"
        rows.append([case, seconds, waits, f"{mean(overlap):.0%}", *speeds])
    heads = ["rollouts by", "s an update", "of it waiting for rollouts", "sampling overlapped"]
    heads += ["tok/s while sampling", "tok/s while learning"]
    whole = {case: mean(map(_spent, seeds)) for case, seeds in results.items()}
    rates = {case: mean(value) for case, value in values_of(results, RATES[0]).items()}
    engine, ahead, torch = CASES
    return [
        f"{config.steps} updates of {config.questions} questions, {config.rollouts} rollouts of "
        f"each and {config.group_size} of these learned from, at most {config.max_tokens} tokens "
        f"long; {len(config.seeds)} runs with seeds of their own. Means, and the least and most.",
        table(heads, rows),
        f"In turn, the engine samples {rates[engine] / rates[torch]:.1f} times as many tokens a "
        f"second as torch does, and an update takes {whole[engine] / whole[torch]:.0%} of the "
        f"time. Ahead, it takes {whole[ahead] / whole[engine]:.0%} of what it takes in turn.",
    ]


def _spent(one: Numbers) -> float:
    return float(sum(one[name] for name in TIMES))


def draw(config: Settings, results: Results) -> Figure:
    """Plot the parts of an update's seconds."""
    figure, axes = plt.subplots(figsize=(7, 3))
    left = [0.0] * len(results)
    for name, label in zip(
        TIMES, ("waiting for rollouts", "learning", "weights over"), strict=True
    ):
        widths = [mean(value) / config.steps for value in values_of(results, name).values()]
        axes.barh(list(results), widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    finish(axes, xlabel="seconds an update")
    return figure


def run(config: Settings) -> Report:
    """Run all cases."""

    def case_of(case: str) -> Callable[[int], Numbers]:
        return lambda seed: timed(config.training(case, seed))

    made_of = {"model": read_model(config.model).fingerprint}
    results = run_cases(config, {case: case_of(case) for case in CASES}, made_of)
    return results, page(config, results), draw(config, results)
