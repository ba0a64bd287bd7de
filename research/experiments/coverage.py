"""`research.experiments coverage`: problems solved for the same compute, SRM and a Transformer.

Both learn a task for the same processor time, each from the best of several learning rates and
initial scales, which are tried for a part of it. One run makes the models of several times: its
learning rate stays, and falls at the end of copies of it. Then both answer problems that neither
was trained on, many times: pass@k stands over samples, over operations and over seconds of the
processor. Beside them are guesses, which need no model, and a claim holds only above them. SRM is
sampled by our engine in this process, the Transformer by a loop in torch with keys and values kept:
vLLM for CPUs draws fewer tokens in a core second from models of this size.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from pathlib import Path
from pickle import UnpicklingError
from statistics import mean
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.finetuning import draw_coverage, law, powers, rates, rates_by_seed
from research.experiments.harness.learning_rates import (
    Start,
    best_rate,
    losses_of,
    neighbours,
    or_worst,
    search,
)
from research.experiments.harness.models import HEADS, MULTIPLE, REFERENCE
from research.experiments.harness.report import finish, spread, table
from research.experiments.harness.result_cache import Numbers, digest, folder_of
from research.experiments.harness.runner import (
    Report,
    Results,
    check_writable,
    fit,
    made_with,
    run_cases,
)
from research.experiments.harness.settings import ExperimentSettings
from research.experiments.harness.solving import draw_answers
from research.experiments.tasks.large_puzzles import draw_even
from research.experiments.tasks.regex_examples import RegexExamples
from research.experiments.tasks.tasks import (
    CountdownTask,
    LargeCountdownTask,
    SolvingTask,
    TextTask,
    draw_puzzles,
)
from srm.engine.config import ModelConfig
from srm.engine.weights.tensors import is_scalar
from srm.errors import ConfigError
from srm.training.baselines.transformer import Transformer, TransformerShape
from srm.training.model import SRM, LanguageModel
from srm.training.problems.countdown import (
    LARGEST,
    LARGEST_GIVEN,
    LEAST_TARGET,
    SIZES,
    Countdown,
    parse_prompt,
)
from srm.training.processes import in_order, processes
from srm.training.questions.questions import Question, check_apart, read_questions
from srm.training.schedule import count_factors
from srm.training.settings import check_numbers
from srm.training.statistics.coverage import Floats, Interval, intervals, resampled_means, spaced
from srm.training.text.whole_files import replace_file

TRANSFORMER, RANDOM = "Transformer", "random"
MODELS = (REFERENCE, TRANSFORMER)
TASKS: dict[str, type[SolvingTask]] = {
    **{"countdown-7": LargeCountdownTask, "countdown": CountdownTask},
    **{"regexes": RegexExamples, "questions": TextTask},
}
DECAYING = 0.2
"""Last share of the minutes, over which the learning rate falls."""
EVALUATION_BATCHES = 6
RESAMPLED = 1_000
"""Bootstrap resamples of the problems for the intervals."""


class CoverageFlags(ExperimentSettings, frozen=True):
    """Flags of `python -m research.experiments coverage`."""

    LEAST_SEEDS: ClassVar[int] = 1
    task: Literal["countdown-7", "countdown", "regexes", "questions"] = "countdown-7"
    """The task: `countdown-7`, puzzles of seven numbers with targets of five
    and six digits; `countdown`, those of the bundled model; `regexes`, regexes of strings that
    match; `questions`, those of files."""
    budgets: tuple[float, ...] = (2.0, 4.0, 8.0)
    """Minutes of one processor that each model is trained for; one run makes the models of all."""
    train: Path | None = None
    """File .jsonl or .parquet of questions to learn, whose answers end with `#### <number>`."""
    input: tuple[Path, ...] = ()
    """Files .jsonl and .parquet of questions to answer, like those of `train`, or of puzzles, whose
    `question` reads "make 958 of 11 49 18 74 14 :"; none: held-out puzzles are drawn. Those of
    `countdown-7` always are, and `regexes` has a file of its own."""
    problems: int = 200
    """Number of problems to answer, the first ones of each file."""
    samples: int = 1_000
    """Answers to each problem; the largest k."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device of training and sampling. On a GPU minutes and seconds are those of the clock."""
    search_minutes: float = 1.0
    """Minutes that each start of a model is tried for, with the first seed."""
    d_model: int = 128
    """Width of the SRM."""
    transformer_width: int = 128
    """Width of the Transformer; its gated layers have twice as many channels."""
    batch_tokens: int = 2_048
    """Approximate tokens of one update: in a few minutes of a processor many small ones teach
    more."""
    data_workers: int = 0
    """Processes that make batches ahead, as a GPU needs; their time is not counted."""

    @property
    def time(self) -> str:
        """The word for whose minutes and seconds are counted: `processor` or `GPU`."""
        return "processor" if self.device == "cpu" else "GPU"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, {"problems": 1, "samples": 1, "batch_tokens": 1})
        for width in (self.d_model, self.transformer_width):
            if width < 1 or width % MULTIPLE:
                raise ValueError(f"widths must be multiples of {MULTIPLE}, got {width}")
        if self.search_minutes <= 0:
            raise ValueError(f"search_minutes must be above 0, got {self.search_minutes}")
        if not self.budgets or sorted({0.0, *self.budgets}) != [0.0, *self.budgets]:
            raise ValueError(f"budgets must rise from above 0, got {self.budgets}")
        are_questions = self.task == "questions"
        if are_questions != (self.train is not None) or (are_questions and not self.input):
            raise ValueError("train and input must be files where task is questions, and no other")
        if self.task in ("countdown-7", "regexes") and self.input:
            raise ValueError(f"input must be empty where task is {self.task}")


class Settings(CoverageFlags, frozen=True):
    """Settings of `python -m research.experiments coverage`."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    learning_rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    """Rates that are tried first, with the usual initial weights."""
    most_starts: int = 24
    num_layers: int = 4

    def make(self, kind: str, task: SolvingTask, scale: float = 1.0) -> SRM | Transformer:
        """Make a model of a kind, whose initial matrices are `scale` times the usual ones."""
        model: SRM | Transformer
        if kind == TRANSFORMER:
            width = self.transformer_width
            shape = (width, self.num_layers, HEADS, 2 * width, task.vocab_size)
            model = Transformer(TransformerShape(*shape))
        else:
            sizes = (self.d_model, self.num_layers, HEADS, task.longest + 1, task.vocab_size)
            model = SRM(ModelConfig(*sizes, bos_token_id=task.begin, eos_token_id=task.end))
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and not is_scalar(name):
                parameter.data *= scale
        return model

    def weights(self, kind: str, minutes: float, seed: int) -> Path:
        """Return the file of a trained model's weights."""
        return self.results / "coverage" / f"model-{kind}-{minutes:g}-{seed}.pt"


def read_task(config: Settings) -> SolvingTask:
    """Return what is learned and answered. Raises ConfigError for a file without so many problems,
    or with one that models are trained on."""
    if config.train is not None:
        return TextTask(config.train, read_inputs(config))
    if config.task == "countdown-7":
        return LargeCountdownTask(draw_even(np.random.default_rng(0), config.problems))
    if config.task == "regexes":
        return RegexExamples(config.problems)
    if not config.input:
        drawn = draw_puzzles(np.random.default_rng(0), config.problems, is_held_out=True)
        return CountdownTask({"": drawn})
    puzzles = {kind: [*_puzzles(of_kind)] for kind, of_kind in read_inputs(config).items()}
    return CountdownTask(puzzles)


def fault_of(puzzle: Countdown) -> str:
    """Say why a puzzle is none to answer; nothing if it is one."""
    if len(puzzle.numbers) not in SIZES:
        return f"must have {', '.join(map(str, SIZES))} numbers, has {len(puzzle.numbers)}"
    if not all(1 <= number <= LARGEST_GIVEN for number in puzzle.numbers):
        return f"must have numbers of 1 … {LARGEST_GIVEN}"
    if not LEAST_TARGET <= puzzle.target <= LARGEST:
        return f"must have a target of {LEAST_TARGET} … {LARGEST}, has {puzzle.target}"
    return "" if puzzle.is_held_out else "is one that models are trained on: leave it out"


def read_inputs(config: Settings) -> dict[str, list[Question]]:
    """Return the questions to answer by kind, which is the name of their file."""
    by_kind = {}
    for path in config.input:
        questions = read_questions(path)
        if config.problems > len(questions):
            raise ConfigError(f"problems = {config.problems}, but {path} has {len(questions)}")
        if path.stem in by_kind:
            raise ConfigError(f"input: two files are called {path.stem}")
        by_kind[path.stem] = questions[: config.problems]
    check_apart("input", [], chain.from_iterable(by_kind.values()))
    return by_kind


def _puzzles(questions: Sequence[Question]) -> Iterator[Countdown]:
    for question in questions:
        try:
            puzzle = parse_prompt(question.question)
        except ValueError as error:
            raise ConfigError(f"input: {error}") from None
        if fault := fault_of(puzzle):
            raise ConfigError(f"input: {question.question!r:.200} {fault}")
        yield puzzle


def fitted(
    config: Settings,
    task: SolvingTask,
    kind: str,
    start: Start,
    minutes: float,
    seed: int,
    folder: Path | None = None,
    **treatment: Any,
) -> tuple[LanguageModel, Numbers]:
    """Train a model for some minutes; return it, and its loss on what is held out."""
    batches = task.batches(seed, config.batch_tokens)
    make = partial(config.make, kind, task, start.scale)
    treatment |= {"learning_rate": start.rate, "minutes": minutes, "decline": "wsd"}
    treatment |= {"data_workers": config.data_workers}
    run, model, took = fit(make, batches, seed, folder=folder, device=config.device, **treatment)
    steps = len(took["training_losses"])
    made = in_order(batches.__getitem__, range(steps), config.data_workers)
    tokens = sum(inputs.numel() for inputs, _ in made)
    figures = {"steps": steps, "factors": count_factors(model)}
    loss = run.evaluate(batches.evaluation(EVALUATION_BATCHES))
    return model, {"loss": loss, "training_tokens": tokens, **figures, **took}


def tried(config: Settings, task: SolvingTask, kind: str, start: Start, seed: int) -> Numbers:
    """Train a model for the minutes of the search; return its loss."""
    measure = or_worst(
        lambda seed: fitted(config, task, kind, start, config.search_minutes, seed)[1]
    )
    return measure(seed) | start._asdict()


def learned(
    config: Settings, task: SolvingTask, kind: str, start: Start, minutes: float, seed: int
) -> Numbers:
    """Train a model for the minutes and keep its weights; return its loss and their digest.

    A run with a learning rate that stays is kept for each of the times before; the next one, and
    the model of its time, go on from there.
    """
    made_of = made_with(config) | {"minutes": config.budgets[0], **start._asdict()}
    runs = folder_of(config.results / "coverage" / f"run-{kind}-{seed}", made_of)
    train = partial(fitted, config, task, kind, start, seed=seed)
    before: Path | None = None
    for time in config.budgets[: config.budgets.index(minutes) + 1]:
        stable = runs / f"stable-{time:g}"
        if not stable.exists():
            part = going_on(before, runs / f"part-{time:g}")
            train(minutes=(1 - DECAYING) * time, folder=part, decline_share=0.0)
            part.rename(stable)
        before = stable
    last = going_on(before, runs / f"last-{minutes:g}")
    model, figures = train(minutes=minutes, folder=last, decline_share=DECAYING)
    with replace_file(config.weights(kind, minutes, seed)) as partial_file:
        torch.save(model.state_dict(), partial_file)
        weights = digest([partial_file])
    shutil.rmtree(last)
    return figures | start._asdict() | {"weights": weights}


def going_on(before: Path | None, folder: Path) -> Path:
    """Return the folder, which begins as a copy of another run's."""
    if before is not None and not folder.exists():
        copy = folder.with_name(f"copy-{folder.name}")
        shutil.copytree(before, copy, dirs_exist_ok=True).rename(folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def trained(
    config: Settings, task: SolvingTask, kind: str, minutes: float, weights: str, seed: int
) -> LanguageModel:
    """Return a trained model, whose file has the digest `weights`. Raises ConfigError if it is
    missing or another one."""
    model: LanguageModel = config.make(kind, task)
    path = config.weights(kind, minutes, seed)
    if digest([path]) != weights:
        raise ConfigError(f"results: {path} is not the model of its result: remove {path.parent}")
    try:
        model.load_state_dict(torch.load(path, weights_only=True))
    except (OSError, RuntimeError, EOFError, KeyError, UnpicklingError) as error:
        raise ConfigError(f"results: {path} is no model: remove {path.parent}: {error}") from None
    return model


def solved(
    config: Settings, task: SolvingTask, kind: str, minutes: float, weights: str, seed: int
) -> Numbers:
    """Answer the problems with a trained model; return the right answers of each."""
    model = trained(config, task, kind, minutes, weights, seed)
    return draw_answers(model, task, config.samples, seed, config.device)


def run_all(config: Settings, task: SolvingTask) -> Results:
    """Guess, search the starts, train, and answer; or read from disk what was done before."""
    check_writable("results", config.results / "coverage")
    prompts = "\n".join(problem.prompt for problem in task.problems)
    problems = {"problems": hashlib.sha256(prompts.encode()).hexdigest()}
    made_of: dict[str, Any] = problems | {"train": digest([*filter(None, [config.train])])}
    made_of |= {"input": digest(config.input)}
    judged_by = hashlib.sha256("\n".join(problem.judged_by for problem in task.problems).encode())
    judged = {"judged_by": judged_by.hexdigest()}
    results = run_cases(config, {RANDOM: partial(guessed, config, task)}, made_of | judged)

    def measure(kind: str, start: Start) -> Numbers:
        case = {searching(kind, start): partial(tried, config, task, kind, start)}
        results.update(run_cases(config, case, made_of, config.seeds[:1]))
        return results[searching(kind, start)][0]

    for kind in MODELS:
        search(map(Start, config.learning_rates), partial(measure, kind), config.most_starts)
    starts = {kind: best_start(results, kind) for kind in MODELS}
    # so that a run that is stopped has all of the first seeds
    for seed, minutes in product(config.seeds, config.budgets):
        of_seed = run_seed(config, task, starts, (made_of, judged), minutes, seed)
        for case, numbers in of_seed.items():
            results.setdefault(case, []).extend(numbers)
    return results


def run_seed(
    config: Settings,
    task: SolvingTask,
    starts: Mapping[str, Start],
    made_of: tuple[Mapping[str, Any], Mapping[str, Any]],
    minutes: float,
    seed: int,
) -> Results:
    """Train from the starts for the minutes, and answer, with one seed. `made_of` says what models
    are made of, and what answers are judged by."""

    def run(made_of: Mapping[str, Any], name: str, case: Callable[[int], Numbers]) -> Numbers:
        results.update(run_cases(config, {name: case}, made_of, [seed]))
        return results[name][0]

    results: Results = {}
    of_model, of_judge = made_of
    for kind, start in starts.items():
        given = config, task, kind
        train = partial(learned, *given, start, minutes)
        about = {**of_model, **start._asdict(), "minutes": minutes, "first": config.budgets[0]}
        weights = run(about, timed(training(kind), minutes), train)["weights"]
        of_weights = {**of_model, **of_judge, "weights": weights}
        run(of_weights, timed(kind, minutes), partial(solved, *given, minutes, weights))
    return results


def timed(case: str, minutes: float) -> str:
    """Return the name of a case of models that are trained for the minutes."""
    return f"{case} {minutes:g} min"


def after(results: Results, minutes: float) -> Results:
    """Return the results by names that leave out the minutes of these models."""
    ending = timed("", minutes)
    return {case.removesuffix(ending): of for case, of in results.items()}


def guessed(config: Settings, task: SolvingTask, seed: int) -> Numbers:
    """Answer the problems without a model; return the right answers of each."""
    return {"right": task.guess(config.samples, seed), "samples": config.samples}


def searching(kind: str, start: Start) -> str:
    """Return the name of the case that tries a start."""
    return f"search {kind} {start}"


def training(kind: str) -> str:
    """Return the name of the case that trains a model."""
    return f"train {kind}"


def best_start(results: Results, kind: str) -> Start:
    """Return the start with the least loss."""
    return best_rate(tried_starts(results, kind))


def tried_starts(results: Results, kind: str) -> dict[Start, Numbers]:
    """Return the results of the search."""
    cases = (of[0] for case, of in results.items() if case.startswith(f"search {kind} "))
    return {Start(of["rate"], of["scale"]): of for of in cases}


def costs(results: Results, kind: str) -> dict[str, float]:
    """Return what one answer costs, mean over puzzles and seeds: seconds, and operations
    of products with weights, two for each weight and token."""
    seeds = results[kind]
    answers = sum(len(seed["right"]) * seed["samples"] for seed in seeds)
    tokens = sum(seed["tokens"] for seed in seeds) / answers
    factors = results[training(kind)][0]["factors"]
    return {
        "seconds": sum(seed["processor_seconds"] for seed in seeds) / answers,
        "FLOP": 2 * factors * tokens,
        "tokens": tokens,
    }


def at_budget(solved_rates: Floats, ks: Sequence[int], budget: float) -> float:
    """Return pass@k where `budget` answers can be paid, between the nearest k on a log scale; NaN
    below one answer and beyond the samples."""
    if not 1 <= budget <= ks[-1]:
        return float("nan")
    return float(np.interp(np.log(budget), np.log(ks), solved_rates))


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: what came out, pass@k over samples, operations and seconds, and
    what training took. Only the settings say which problem is of which file."""
    few = powers(config.samples)
    kinds = np.repeat([path.stem for path in config.input] or [""], config.problems)
    groups = {"": np.full(len(kinds), True)}
    if len(names := dict.fromkeys(kinds)) > 1:
        groups |= {f" of {name}": kinds == name for name in names}
    cases = [timed(kind, minutes) for minutes in config.budgets for kind in MODELS]
    at_few = {case: rates(results[case], few) for case in (RANDOM, *cases)}
    rows = [
        [f"{case}{title}", *(f"{value:.4f}" for value in all_rates[which].mean(axis=0))]
        for title, which in groups.items()
        for case, all_rates in at_few.items()
    ]
    last = after(results, config.budgets[-1])
    verdicts = [(each, verdict(config, after(results, each))) for each in config.budgets]
    return [
        *(f"After {each:g} {config.time} minutes of training: {words}" for each, words in verdicts),
        at_equal_loss(config, results),
        f"{len(kinds)} problems that neither model was trained on, {config.samples:,} "
        f"answers to each at temperature 1, with {len(config.seeds)} seed(s). The row "
        f"{RANDOM} has {TASKS[config.task].guesses}.",
        table(["pass@k", *(f"k = {k:,}" for k in few)], rows),
        *(f"{case}: {law(results[case], config.samples)}" for case in cases[-2:]),
        f"For the same {config.time} seconds, and for the same operations, as so many answers of "
        f"the Transformer, after {config.budgets[-1]:g} minutes; a dash stands where more answers "
        "than were drawn, or less than one, could be paid:",
        paid(config, last),
        *_took(config, results),
    ]


def paid(config: Settings, results: Results) -> str:
    """Return a table of what SRM solves for what answers of the Transformer cost."""
    ks = spaced(config.samples)
    curves = {kind: rates(results[kind], ks).mean(axis=0) for kind in MODELS}
    cost = {kind: costs(results, kind) for kind in MODELS}
    rows = []
    for k in powers(config.samples):
        row = [f"{k:,}", f"{at_budget(curves[TRANSFORMER], ks, k):.4f}"]
        for of in ("seconds", "FLOP"):
            answers = k * cost[TRANSFORMER][of] / cost[REFERENCE][of]
            reached = at_budget(curves[REFERENCE], ks, answers)
            row.append("–" if np.isnan(reached) else f"{reached:.4f}")
        rows.append(row)
    return table(["answers", "the Transformer's pass@k", "SRM, same seconds", "same FLOP"], rows)


def at_equal_loss(config: Settings, results: Results) -> str:
    """Say what both solve at the least loss that both reach, read off between their times."""
    losses, solve = {}, {}
    for kind in MODELS:
        cases = [(timed(training(kind), each), timed(kind, each)) for each in config.budgets]
        losses[kind] = [mean(seed["loss"] for seed in results[train]) for train, _ in cases]
        solve[kind] = [rates(results[case], [config.samples]).mean() for _, case in cases]
    reached = max(min(of) for of in losses.values())
    parts = []
    for kind in MODELS:
        order = np.argsort(losses[kind])
        along = np.array(losses[kind])[order]
        minutes = np.exp(np.interp(reached, along, np.log(config.budgets)[order]))
        share = np.interp(reached, along, np.array(solve[kind])[order])
        is_first = reached > along[-1]  # before the first time: not read off
        parts.append(
            f"{kind} {'before' if is_first else 'after'} {minutes:.3g} minutes, and solves "
            f"{share:.3f} of the problems in {config.samples:,} answers"
        )
    return f"At equal loss, {reached:.3f}: {'; '.join(parts)}."


def _took(config: Settings, results: Results) -> list[str]:
    """Return a table of training, and of what an answer costs."""
    rows = []
    for minutes, kind in product(config.budgets, MODELS):
        of_time = after(results, minutes)
        seeds, cost = of_time[training(kind)], costs(of_time, kind)
        seconds = mean(seed["processor_seconds"] for seed in seeds)
        tokens = mean(seed["training_tokens"] for seed in seeds)
        row = [kind, f"{seeds[0]['parameters']:,}", str(best_start(results, kind))]
        row += [
            f"{mean(seed['steps'] for seed in seeds):,.0f}",
            f"{tokens / 1e6:.1f}",
            f"{seconds / 60:.1f}",
            spread([seed["loss"] for seed in seeds]),
        ]
        drawn_tokens = sum(seed["tokens"] for seed in of_time[kind])
        drawn_seconds = sum(seed["processor_seconds"] for seed in of_time[kind])
        row += [f"{cost['FLOP'] / 1e6:.1f}", f"{1e6 * cost['seconds']:.0f}"]
        rows.append([*row, f"{drawn_tokens / drawn_seconds:,.0f}"])
    core = "core" if config.device == "cpu" else "GPU"
    heads = ["model", "parameters", "start", "updates", "M tokens", f"{config.time} min", "loss"]
    heads += ["MFLOP an answer", f"µs of a {core} an answer", f"tokens a {core} second"]
    tried = (f"{kind} {losses_of(tried_starts(results, kind))}" for kind in MODELS)
    edges = (edge(kind, tried_starts(results, kind)) for kind in MODELS)
    dtype = after(results, config.budgets[-1])[REFERENCE][0]["dtype"]
    return [
        "Training, and what an answer cost:",
        table(heads, rows),
        "Losses in nats a token by learning rate and factor of the initial matrices, after "
        f"{config.search_minutes:g} minutes: "
        f"{'; '.join(tried)}.{''.join(edges)}",
        "SRM was sampled by the engine of `srm serve` in the experiment's process, the Transformer "
        f"by a loop in torch with keys and values kept, both in {dtype}. Operations are two for "
        "each weight of a product and token; those of attention and of the state are left out.",
    ]


def edge(kind: str, tried: Mapping[Start, Numbers]) -> str:
    """Say where not all starts beside a model's best one were tried."""
    left = [str(start) for start in neighbours(best_rate(tried)) if start not in tried]
    return f" Beside {kind}'s best start {', '.join(left)} were not tried." if left else ""


def verdict(config: Settings, results: Results) -> str:
    """Say at the largest budget of seconds that both were drawn for whether the claim holds."""
    ks = spaced(config.samples)
    cost = {kind: costs(results, kind)["seconds"] for kind in MODELS}
    seconds = config.samples * min(cost.values())
    # The quotient may be above the samples by a rounding error.
    answers = {kind: min(max(1.0, seconds / cost[kind]), config.samples) for kind in MODELS}
    tables = {kind: rates_by_seed(results[kind], ks) for kind in MODELS}

    def reached(kind: str, curves: Floats) -> Floats:
        return np.array([at_budget(curve, ks, answers[kind]) for curve in curves])

    def resampled(kind: str) -> Floats:
        return reached(kind, resampled_means(tables[kind], RESAMPLED, 0))  # the same draws for all

    by_seed = {kind: reached(kind, tables[kind].mean(axis=1)) for kind in MODELS}
    srm, other = (by_seed[kind].mean() for kind in MODELS)
    better = REFERENCE if srm >= other else TRANSFORMER
    tables[RANDOM], answers[RANDOM] = rates_by_seed(results[RANDOM], ks), answers[better]
    outcome, of_gap = decide(
        "The paper's claim, more problems solved for the same compute,",
        resampled(REFERENCE) - resampled(TRANSFORMER),
        resampled(better) - resampled(RANDOM),
    )
    gaps = ", ".join(f"{gap:+.3f}" for gap in by_seed[REFERENCE] - by_seed[TRANSFORMER])
    guesses = reached(RANDOM, tables[RANDOM].mean(axis=1)).mean()
    return (
        f"{outcome}: in {seconds:.3g} {config.time} seconds a problem SRM solves {srm:.3f} of the "
        f"problems and the Transformer {other:.3f}, a difference of {srm - other:+.3f} "
        f"({of_gap.low:+.3f} … {of_gap.high:+.3f}, 95 % over problems and seeds; by seed {gaps}). "
        f"As many guesses as the better one's answers solve {guesses:.3f}."
    )


def decide(claim: str, gaps: Floats, above_guesses: Floats) -> tuple[str, Interval]:
    """Say whether a claim holds that a gap is above 0, and in which interval that lies; `gaps` are
    those of resampled problems and seeds, and `above_guesses` what the better model solves more
    than guesses. Where these may do as well, nothing is said about the claim."""
    of_gap, of_guesses = intervals(np.stack([gaps, above_guesses], axis=1))
    if of_guesses.low <= 0:
        return (
            f"{claim} is not tried here, since the better model is no better than guesses",
            of_gap,
        )
    if of_gap.low > 0:
        return f"{claim} holds here", of_gap
    return f"{claim} {'fails' if of_gap.high < 0 else 'is not decided'} here", of_gap


def draw(config: Settings, results: Results) -> Figure:
    """Plot pass@k over samples, operations and seconds, and the power laws beyond the samples."""
    figure, panels = plt.subplots(1, 3, figsize=(13, 4.5))
    ks = spaced(config.samples)
    beyond = [k * config.samples for k in spaced(100)]
    for axes, member, label in (
        (panels[0], "", "answers to a problem, k"),
        (panels[1], "FLOP", "FLOP a problem"),
        (panels[2], "seconds", f"{config.time} seconds a problem"),
    ):
        for kind, colour in zip(MODELS, ("C0", "C1"), strict=True):
            unit = costs(results, kind)[member] if member else 1.0
            draw_coverage(axes, results[kind], ks, (colour, kind), beyond, unit)
        if not member:  # guesses have no model, so no price
            draw_coverage(axes, results[RANDOM], ks, ("C7", RANDOM), law_at=())
        finish(axes, xlabel=label, xscale="log", ylim=(0, 1.02))
    panels[0].set(ylabel="pass@k")
    return figure


def run(config: Settings) -> Report:
    """Run all cases. Raises ConfigError if there is no such device."""
    with processes(config.device):
        task = read_task(config)
    results = run_all(config, task)
    return results, page(config, results), draw(config, after(results, config.budgets[-1]))
