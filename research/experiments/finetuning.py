"""`research.experiments finetuning`: pass@k before and after fine-tuning on solved questions.

`srm train sft` trains on the answers, by the paper's recipe but for what settings change; then the
engine samples questions that were not trained on, from the model that training began with and from
the one it made. Rows are generated, in GSM8K's form: word problems with a product and a sum, in
words that the bundled model has not seen. The paper fine-tunes models a hundred times as large on
GSM8K, and compares with a Transformer, which is not served here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from research.experiments.harness.report import finish, table
from research.experiments.harness.result_cache import Numbers, digest, folder_of
from research.experiments.harness.runner import Report, Results, check_writable, run_cases
from research.experiments.harness.settings import ExperimentSettings
from srm.engine.config import DEMO_MODEL, EngineConfig
from srm.engine.weights.checkpoint import read_model
from srm.settings import build
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


class Settings(ExperimentSettings, frozen=True):
    """Settings of `python -m research.experiments finetuning`."""

    seeds: tuple[int, ...] = (0, 1)
    model: Path = DEMO_MODEL
    """Folder of the model that training begins with."""
    rows: int = 4_000
    """Number of generated rows to train on."""
    epochs: int = 4
    batch_rows: int = 16
    learning_rate: float = 1e-4
    """Peak learning rate, as in `srm train sft`, and so is `clip_norm`."""
    clip_norm: float = 0.1
    questions: int = 100
    """Number of questions to sample."""
    samples: int = 256
    """Completions of each question; the largest k."""
    temperature: float = 0.7
    top_p: float = 0.9
    max_tokens: int = 128

    def sampling(self, evaluation: Path) -> GRPOConfig:
        """Return how the questions for evaluation are sampled."""
        settings = {
            "evaluation": (evaluation,),
            "evaluation_questions": self.questions,
            "evaluation_samples": self.samples,
            **self.only("model", "temperature", "top_p", "max_tokens"),
        }
        return build(GRPOConfig, settings)

    def tuning(self, train: Path, seed: int) -> SFTConfig:
        """Return the settings of a run of `srm train sft`."""
        settings = {
            "train": (train,),
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


def write_files(config: Settings) -> tuple[Path, Path]:
    """Write the rows to train on and those for evaluation; return the files."""
    drawn = list(generated(config.rows + config.questions, seed=0))
    folder = config.results / "finetuning"
    check_writable("results", folder)
    train, evaluation = folder / "train.jsonl", folder / "evaluation.jsonl"
    for path, rows in ((train, drawn[config.questions :]), (evaluation, drawn[: config.questions])):
        write_whole(path, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return train, evaluation


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


def rates_by_seed(results: Sequence[Numbers], ks: Sequence[int]) -> Floats:
    """Return each question's estimate of pass@k, [seeds, questions, ks]."""
    return np.stack(
        [
            pass_table([Tally(result["samples"], right) for right in result["right"]], ks)
            for result in results
        ]
    )


def rates(results: Sequence[Numbers], ks: Sequence[int]) -> Floats:
    """Return each question's estimate of pass@k, mean over seeds, [questions, ks]."""
    solved_rates: Floats = rates_by_seed(results, ks).mean(axis=0)
    return solved_rates


def powers(samples: int) -> list[int]:
    """Return the powers of ten up to the number of samples, and that number."""
    return sorted({10**power for power in range(7) if 10**power <= samples} | {samples})


def gain(before: Floats, after: Floats) -> str:
    """Return the mean difference over questions, and its standard error."""
    gains = after - before
    return f"{gains.mean():+.4f} ± {standard_errors(gains[:, None])[0]:.4f}"


def tuned(config: Settings, train: Path, rules: GRPOConfig, seed: int) -> Numbers:
    """Fine-tune with a seed; return the right samples of each question afterwards, and the
    losses."""
    tuning = config.tuning(train, seed)
    losses = sft(tuning)
    return solved(rules, tuning.output) | {
        "training_losses": losses.steps,
        "evaluation_losses": losses.evaluations,
    }


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: pass@k before and after, and the power laws."""
    ks = powers(config.samples)
    before, after = (rates(results[case], ks) for case in (BEFORE, AFTER))
    rows = (
        [f"{k:,}", *(f"{mean_rates.mean():.4f}" for mean_rates in both), gain(*both)]
        for at, k in enumerate(ks)
        for both in [(before[:, at], after[:, at])]
    )
    least = [min(loss for _, loss in result["evaluation_losses"]) for result in results[AFTER]]
    solved_once = {
        case: np.mean([np.mean(np.array(run["right"]) > 0) for run in results[case]])
        for case in (BEFORE, AFTER)
    }
    return [
        f"{len(before)} questions, {config.samples:,} samples of each at temperature "
        f"{config.temperature:g} and top_p {config.top_p:g}; right is who has the number behind "
        f"####. Fine-tuned with {len(config.seeds)} seeds, of which pass@k is the mean; least loss "
        f"on rows that were held back {min(least):.3f} … {max(least):.3f} nats a token. Gains are "
        "by question, with their standard error.",
        table(["k", BEFORE, AFTER, "gain"], rows),
        *(
            f"{case.capitalize()}: {share:.0%} of the questions are solved at least once. "
            f"{law(results[case], config.samples)}"
            for case, share in solved_once.items()
        ),
    ]


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


def draw_coverage(
    axes: Axes,
    results: Sequence[Numbers],
    ks: Sequence[int],
    style: tuple[str, str],
    law_at: Sequence[int],
    unit: float = 1.0,
) -> None:
    """Plot pass@k in a colour and with a label, with a 95 % interval over questions, and its law at
    some k; `unit` is the price of a sample."""
    colour, label = style
    solved_rates = rates(results, ks)
    means = solved_rates.mean(axis=0)
    over = np.array(intervals(resampled_means(solved_rates, RESAMPLED, 0)))
    axes.plot(unit * np.array(ks), means, color=colour, label=label)
    axes.fill_between(unit * np.array(ks), *over.T, color=colour, alpha=0.2)
    fitted: PowerLaw | None = fit(ks, means) if law_at else None
    if fitted is not None:
        axes.plot(unit * np.array(law_at), fitted.coverage(law_at), "--", color=colour)


def draw(config: Settings, results: Results) -> Figure:
    """Plot pass@k before and after."""
    figure, axes = plt.subplots(figsize=(7, 5))
    ks = spaced(config.samples)
    for case, colour in ((BEFORE, "C0"), (AFTER, "C1")):
        draw_coverage(axes, results[case], ks, (colour, case), law_at=ks)
    labels = {"xlabel": "samples of a question, k", "ylabel": "pass@k"}
    finish(axes, xscale="log", ylim=(0, 1.02), **labels)
    return figure


def run(config: Settings) -> Report:
    """Run both cases."""
    train, evaluation = write_files(config)
    rules = config.sampling(evaluation)
    model, rows = read_model(config.model).fingerprint, digest((train, evaluation))
    made_of = {"model": model, "rows": rows}
    before = {BEFORE: lambda _: solved(rules, config.model)}
    results = run_cases(config, before, made_of, config.seeds[:1])
    results |= run_cases(config, {AFTER: partial(tuned, config, train, rules)}, made_of)
    return results, page(config, results), draw(config, results)
