"""`research.experiments finetuning`: pass@k before and after fine-tuning on solved questions.

`srm train sft` trains on the answers, by the paper's recipe but for what settings change; then the
engine samples questions that were not trained on, from the model that training began with and from
the one it made. Rows are files in GSM8K's form, or generated: word problems with a product and a
sum, in words that the bundled model has not seen. The paper fine-tunes models a hundred times as
large on GSM8K, and compares with a Transformer, which is not served here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.harness.report import table
from research.experiments.harness.result_cache import Numbers, digest, folder_of
from research.experiments.harness.runner import Results, check_writable, publish, run_cases
from research.experiments.harness.settings import ExperimentSettings
from srm.engine.config import DEMO_MODEL, EngineConfig
from srm.engine.weights.checkpoint import read_model
from srm.settings import build, load
from srm.tokenizer_file import read_tokenizer
from srm.training.checkpoint import load_model
from srm.training.finetuning.config import SFTConfig
from srm.training.finetuning.sft import sft
from srm.training.grpo.asked import questions
from srm.training.grpo.asking import Asking
from srm.training.grpo.config import GRPOConfig
from srm.training.grpo.engine_sampler import engine_sampler
from srm.training.questions.reward_process import RewardProcess
from srm.training.statistics.coverage import (
    Floats,
    Interval,
    Tally,
    intervals,
    pass_table,
    resampled_means,
    spaced,
    standard_errors,
)
from srm.training.statistics.power_law import PowerLaw, fit, fits
from srm.training.text.whole_files import write_whole

BEFORE, AFTER = "before", "after"
RESAMPLED = 1_000
"""Number of bootstrap resamples of the questions for the intervals."""
SLOTS = 2_048
"""Number of samples that run at once."""
MOST_GENERATED = 200_000
"""Most rows to generate: there are 257,004 different questions, and drawing many more new ones
takes long."""


class FinetuningConfig(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments finetuning`."""

    seeds: tuple[int, ...] = (0, 1)
    """Seeds of fine-tuning; each draws another order of the rows."""
    model: Path = DEMO_MODEL
    """Folder of the model that training begins with."""
    train: tuple[Path, ...] = ()
    """Files .jsonl and .parquet with question and answer; empty: generated rows."""
    evaluation: tuple[Path, ...] = ()
    """Files like those of `train` for pass@k; needed where `train` has files."""
    rows: int = 4_000
    """Number of generated rows to train on."""
    epochs: int = 4
    """Number of times that each row is trained on."""
    batch_rows: int = 16
    """Rows in one update."""
    learning_rate: float = 1e-4
    """Peak learning rate, as in `srm train sft`."""
    clip_norm: float = 0.1
    """Largest norm of all gradients together, as in `srm train sft`."""
    questions: int = 100
    """Number of questions to sample, the first ones."""
    samples: int = 1_000
    """Completions of each question; the largest k."""
    temperature: float = 0.7
    """Temperature of the completions."""
    top_p: float = 0.9
    """Top-p of the completions."""
    max_tokens: int = 128
    """Longest completion, in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.train) != bool(self.evaluation):
            raise ValueError("train and evaluation must both have files, or neither")
        if not self.train and self.rows + self.questions > MOST_GENERATED:
            raise ValueError(
                f"rows and questions must be at most {MOST_GENERATED} together where train has no "
                f"files, got {self.rows} and {self.questions}"
            )
        self.sampling(()), self.tuning((), 0)  # report what these do not take

    def sampling(self, evaluation: tuple[Path, ...]) -> GRPOConfig:
        """Return how the questions for evaluation are sampled. Raises ConfigError."""
        settings = {
            "evaluation": evaluation,
            "evaluation_questions": self.questions,
            "evaluation_samples": self.samples,
            **self.only("model", "temperature", "top_p", "max_tokens"),
        }
        return build(GRPOConfig, settings)

    def tuning(self, train: tuple[Path, ...], seed: int) -> SFTConfig:
        """Return the settings of a run of `srm train sft`. Raises ValueError."""
        settings = {
            "train": train,
            "seed": seed,
            **self.only("model", "epochs", "batch_rows", "learning_rate", "clip_norm", "threads"),
        }
        output = folder_of(self.results / "finetuning" / f"model-{seed}", settings)
        return SFTConfig(output=output, **settings)


def generated(count: int, seed: int) -> Iterator[dict[str, str]]:
    """Yield different questions, in GSM8K's form: calculations in marks, #### before the answer."""
    seen: set[str] = set()
    draw = random.Random(seed)
    while len(seen) < count:
        row = _problem(draw)
        if row["question"] not in seen:
            seen.add(row["question"])
            yield row


def _problem(draw: random.Random) -> dict[str, str]:
    who = draw.choice("farmer baker teacher gardener driver tailor".split())
    thing = draw.choice("eggs rolls chairs roses parcels buttons".split())
    rows, each, more = draw.randint(2, 12), draw.randint(2, 12), draw.randint(2, 60)
    first, total = rows * each, rows * each + more
    return {
        "question": f"A {who} counts {rows} rows of {each} {thing} in the morning, and {more} more "
        f"{thing} after noon. What number of {thing} did the {who} count that day?",
        "answer": f"The rows held {rows}*{each}=<<{rows}*{each}={first}>>{first} {thing}.\n"
        f"The {who} counted {first}+{more}=<<{first}+{more}={total}>>{total} {thing}.\n"
        f"#### {total}",
    }


def files(config: FinetuningConfig) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files to train on and those for evaluation, generated ones written first."""
    if config.train:
        return config.train, config.evaluation
    drawn = list(generated(config.rows + config.questions, seed=0))
    folder = config.results / "finetuning"
    check_writable("results", folder)
    train, evaluation = folder / "train.jsonl", folder / "evaluation.jsonl"
    for path, rows in ((train, drawn[config.questions :]), (evaluation, drawn[: config.questions])):
        write_whole(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return (train,), (evaluation,)


def solved(rules: GRPOConfig, model: Path) -> Numbers:
    """Complete the evaluation questions with the engine and the model in a folder.

    Returns the number of right samples of each question.
    """
    base = read_model(model).config
    tokenizer = read_tokenizer(model / "tokenizer.json")
    sampling = rules.sampling
    samples, most = rules.evaluations.evaluation_samples, sampling.max_tokens
    asked = questions(rules.data, rules.evaluations, rules.seed, tokenizer, base.n_ctx, most)
    engine = EngineConfig(
        model=model,
        dtype=sampling.dtype,
        num_slots=min(SLOTS, len(asked.evaluation) * samples),
        max_waiting=max(100_000, samples),
    )
    weights = load_model(model).state_dict()
    with (
        closing(RewardProcess(*rules.data.rewards)) as reward,
        closing(engine_sampler(base, weights, engine, 1, sampling.gpu_memory)) as sampler,
    ):
        asking = Asking(sampling, rules.seed, asked, tokenizer, reward, sampler)
        solved_rates = asking.evaluate(0, samples, None)
    return {"right": solved_rates.right, "samples": solved_rates.samples}


def rates(results: Sequence[Numbers], ks: Sequence[int]) -> Floats:
    """Return each question's estimate of pass@k, mean over seeds, [questions, ks]."""
    tables = (
        pass_table([Tally(result["samples"], right) for right in result["right"]], ks)
        for result in results
    )
    solved_rates: Floats = np.mean(list(tables), axis=0)
    return solved_rates


def powers(samples: int) -> list[int]:
    """Return the powers of ten up to the number of samples, and that number."""
    return sorted({10**power for power in range(7) if 10**power <= samples} | {samples})


def gain(before: Floats, after: Floats) -> str:
    """Return the mean difference over questions, and its standard error."""
    gains = after - before
    return f"{gains.mean():+.4f} ± {standard_errors(gains[:, None])[0]:.4f}"


def tuned(
    config: FinetuningConfig, train: tuple[Path, ...], rules: GRPOConfig, seed: int
) -> Numbers:
    """Fine-tune with a seed; return the right samples of each question afterwards, and the
    losses."""
    tuning = config.tuning(train, seed)
    losses = sft(tuning)
    return solved(rules, tuning.output) | {
        "training_losses": losses.steps,
        "evaluation_losses": losses.evaluations,
    }


def page(config: FinetuningConfig, results: Results) -> list[str]:
    """Return the record's text: pass@k before and after, and the power laws."""
    ks = powers(config.samples)
    before, after = (rates(results[case], ks) for case in (BEFORE, AFTER))
    rows = (
        [f"{k:,}", *(f"{mean_rates.mean():.4f}" for mean_rates in both), gain(*both)]
        for at, k in enumerate(ks)
        for both in [(before[:, at], after[:, at])]
    )
    least = [min(loss for _, loss in result["evaluation_losses"]) for result in results[AFTER]]
    lines = [
        f"{len(before)} questions, {config.samples:,} samples of each at temperature "
        f"{config.temperature:g} and top_p {config.top_p:g}; right is who has the number behind "
        f"####. Fine-tuned with {len(config.seeds)} seeds, of which pass@k is the mean; least loss "
        f"on rows that were held back {min(least):.3f} … {max(least):.3f} nats a token. Gains are "
        "by question, with their standard error.",
        "",
        *table(["k", BEFORE, AFTER, "gain"], rows),
        "",
    ]
    for case in (BEFORE, AFTER):
        once = np.mean([np.mean(np.array(result["right"]) > 0) for result in results[case]])
        lines += [f"{case.capitalize()}: {once:.0%} of the questions are solved at least once. "
                  f"{law(results[case], config.samples)}", ""]  # fmt: skip
    return lines[:-1]


def law(results: Sequence[Numbers], samples: int) -> str:
    """Say which power law pass@k follows, and how closely."""
    ks = spaced(samples)
    solved_rates = rates(results, ks)
    fitted = fit(ks, solved_rates.mean(axis=0))
    if fitted is None:
        return "Its pass@k has no power law to see."
    many = fits(ks, resampled_means(solved_rates, RESAMPLED, 0), fitted)
    of_a, of_b = intervals(np.array(many))
    away = np.abs(fitted.coverage(ks) - solved_rates.mean(axis=0)).max()
    return (
        f"pass@k = exp(a · k^b) with a = {_show(fitted.a, of_a)} and b = {_show(fitted.b, of_b)}, "
        f"95 % over questions; it is at most {away:.3f} beside the curve."
    )


def _show(value: float, interval: Interval) -> str:
    return f"{value:.3f} ({interval.low:.3f} … {interval.high:.3f})"


def drawn(config: FinetuningConfig, results: Results) -> Figure:
    """Plot pass@k before and after, each with its law and a 95 % interval over questions."""
    figure, axes = plt.subplots(figsize=(7, 5))
    ks = spaced(config.samples)
    for case, colour in ((BEFORE, "C0"), (AFTER, "C1")):
        solved_rates = rates(results[case], ks)
        over = np.array(intervals(resampled_means(solved_rates, RESAMPLED, 0)))
        axes.plot(ks, solved_rates.mean(axis=0), color=colour, label=case)
        axes.fill_between(ks, over[:, 0], over[:, 1], color=colour, alpha=0.2)
        fitted: PowerLaw | None = fit(ks, solved_rates.mean(axis=0))
        if fitted is not None:
            axes.plot(ks, fitted.coverage(ks), "--", color=colour)
    axes.set(xlabel="samples of a question, k", ylabel="pass@k", xscale="log", ylim=(0, 1.02))
    axes.grid(linewidth=0.3)
    axes.legend()
    return figure


def main(argv: list[str]) -> int:
    """Run both cases and write the record."""
    config = load(FinetuningConfig, argv, prog="python -m research.experiments finetuning")
    train, evaluation = files(config)
    rules = config.sampling(evaluation)
    made_of = {
        "model": read_model(config.model).fingerprint,
        "rows": digest((*train, *evaluation)),
    }
    cases = {BEFORE: lambda _: solved(rules, config.model)}
    results = run_cases("finetuning", config, cases, made_of, config.seeds[:1])
    cases = {AFTER: lambda seed: tuned(config, train, rules, seed)}
    results |= run_cases("finetuning", config, cases, made_of)
    publish("finetuning", argv, config, results, page(config, results), drawn(config, results))
    return 0
