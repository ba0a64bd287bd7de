"""`research.experiments trainers`: GRPO by TRL with rollouts of our server, and `srm train grpo`.

Both learn from the same word problems in the same order, so many rollouts of each, with the same
objective, optimizer and learning rates, in float32, on the same cores. Then both answer the
problems that they learned from, and held-out ones. TRL runs in an environment of its own.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from research.experiments.finetuning import gain, solved
from research.experiments.harness.report import AVERAGED, finish, first_and_last, table
from research.experiments.harness.result_cache import Numbers, digest, folder_of
from research.experiments.harness.runner import Report, Results, check_writable, run_cases
from research.experiments.harness.served import free_port, served
from research.experiments.harness.settings import ExperimentSettings
from srm.engine.config import DEMO_MODEL
from srm.engine.weights.checkpoint import read_model
from srm.engine.weights.convert import convert
from srm.errors import ConfigError
from srm.settings import build
from srm.tokenizer_file import read_tokenizer
from srm.training.checkpoint import load_model, save_model
from srm.training.grpo.asked import questions
from srm.training.grpo.command import grpo
from srm.training.grpo.config import GRPOConfig
from srm.training.grpo.record import JsonLinesFile, Update
from srm.training.problems.drawn import problems
from srm.training.schedule import LAMBDA, Schedule
from srm.training.statistics.coverage import Floats
from srm.training.text.whole_files import write_whole

ROOT = Path(__file__).resolve().parents[2]
START, TRL, SRM = "start", "TRL", "srm train grpo"
PARTS = 4
"""Micro-batches of an update by TRL, if its questions can be divided so."""
WITHIN = 2.0
"""Standard errors that two trainers may be apart."""
OFFLINE = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"), "1")
DIFFERENCES = (
    "What differs: TRL computes all rows, `srm train grpo` leaves out groups whose rewards are all "
    "equal, which have no gradient. TRL pads prompts on their left and has shuffled micro-batches; "
    "ours have rows of like length. TRL's weights go to the server through a folder, ours within "
    "the process; both are counted as waiting, and of `srm train grpo` what judging takes too. It "
    "alone puts λ back into its range after an update, and draws its samples by its seed: the "
    "server draws a seed for each prompt of TRL, whose runs are therefore new ones each time."
)


class TrainersFlags(ExperimentSettings, frozen=True):
    """Flags of `python -m research.experiments trainers`."""

    environment: Path = Path(".venv-clients")
    """Folder of the Python environment with TRL; `make test-clients` makes the default."""


class Settings(TrainersFlags, frozen=True):
    """Settings of `python -m research.experiments trainers`."""

    seeds: tuple[int, ...] = (0, 1)
    threads: int = 0
    """CPU threads for training; 0: all cores. The engine always has all cores."""
    model: Path = DEMO_MODEL
    """Folder of the model that training begins with."""
    steps: int = 50
    problems: int = 32
    """Word problems to learn from, which come again in every epoch."""
    questions: int = 8
    """Problems of one update."""
    rollouts: int = 8
    """Rollouts of each problem; all are learned from."""
    learning_rate: float = 3e-5
    """Learning rate of the first update; it falls to 0 along a cosine."""
    max_tokens: int = 96
    held_out: int = 100
    """Held-out problems for pass@1."""
    samples: int = 32
    """Completions of each problem for pass@1."""

    @property
    def folder(self) -> Path:
        """Folder of the problems and the runs."""
        return self.results / "trainers"

    @property
    def train(self) -> Path:
        """File of the problems to learn from."""
        return self.folder / "train.jsonl"

    def training(self, seed: int) -> GRPOConfig:
        """Return the settings of `srm train grpo`."""
        exact = {"precision": "float32", "dtype": "float32", "temperature": 1.0, "top_p": 1.0}
        plain = {"group_size": 0, "kl_weight": 0.0, "warmup_share": 0.0, "weight_decay": 0.0}
        settings = {
            "train": (self.train,),
            "evaluate_every": 0,
            "save_every": self.steps,
            "clip_norm": 1.0,
            "seed": seed,
            **self.only("model", "steps", "questions", "rollouts", "learning_rate", "max_tokens"),
            **self.only("threads"),
        }
        settings |= exact | plain
        output = folder_of(self.folder / f"srm-{seed}", settings)
        return build(GRPOConfig, settings | {"output": output})

    def evaluation(self, files: tuple[Path, ...]) -> GRPOConfig:
        """Return how all problems of files, or held-out ones, are sampled."""
        settings = {
            "evaluation": files,
            "evaluation_questions": self.problems if files else self.held_out,
            "evaluation_samples": self.samples,
            "temperature": 1.0,
            "top_p": 1.0,
            "dtype": "float32",
            **self.only("model", "max_tokens"),
        }
        return build(GRPOConfig, settings)

    def task(self, seed: int, folder: Path) -> dict[str, Any]:
        """Return what `research.experiments.harness.train_by_trl` is to do, but for the server's
        URL."""
        rules = self.training(seed)
        base, most = read_model(self.model).config, self.max_tokens
        tokenizer = read_tokenizer(self.model / "tokenizer.json")
        asked = questions(rules.data, rules.evaluations, seed, tokenizer, base.n_ctx, most).train
        drawn = [each.question for step in range(self.steps) for each in asked[step]]
        parts = math.gcd(PARTS, self.questions)
        arguments = {
            "output_dir": str(folder / "trainer"),
            "seed": seed % 2**32,
            "max_steps": self.steps,
            "shuffle_dataset": False,
            "num_generations": self.rollouts,
            "per_device_train_batch_size": self.questions * self.rollouts // parts,
            "gradient_accumulation_steps": parts,
            "max_completion_length": most,
            "temperature": 1.0,
            "beta": 0.0,
            "loss_type": "grpo",
            "scale_rewards": "group",
            "learning_rate": self.learning_rate,
            "lr_scheduler_type": "cosine",
            "max_grad_norm": rules.schedule.clip_norm,
            "gradient_checkpointing": False,
            "use_cpu": True,
            "bf16": False,
            "model_init_kwargs": {"dtype": "float32"},
            "trust_remote_code": True,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        scale = Schedule(1, self.learning_rate, 0, 0.0, 1).decay_rate_scale
        return {
            "arguments": arguments,
            "rows": [{"prompt": each.prompt(), "answer": each.answer} for each in drawn],
            "decays": {"name": LAMBDA, "learning_rate": scale * self.learning_rate},
            "threads": torch.get_num_threads(),
            "model": str(folder / "base"),
            "output": str(folder / "trained"),
            "result": str(folder / "result.json"),
        }


def write_problems(config: Settings) -> None:
    """Write the problems to learn from. Raises ConfigError if the file cannot be written."""
    check_writable("results", config.folder)
    rows = (
        {"question": problem.question, "answer": problem.solution}
        for problem in islice(problems("train", 0), config.problems)
    )
    write_whole(config.train, b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def answered(config: Settings, model: Path) -> Numbers:
    """Return the right samples of each problem, held-out ones and those that are learned from."""
    held_out, known = (solved(config.evaluation(files), model) for files in ((), (config.train,)))
    return {**held_out, "known": known["right"]}


def learned_by_us(config: Settings, seed: int) -> Numbers:
    """Train by `srm train grpo`; return what it has learned, and the times of its updates."""
    rules = config.training(seed)
    grpo(rules)
    updates = JsonLinesFile(rules.output / "updates.jsonl", Update, config.steps)
    waited = [update.waited_s + update.load_s for update in updates]
    return answered(config, rules.output) | {
        "rewards": [update.reward for update in updates],
        "mixed": [update.mixed for update in updates],
        "tokens": [update.rollout_tokens for update in updates],
        "seconds": [wait + update.learn_s for wait, update in zip(waited, updates, strict=True)],
        "waited": waited,
    }


def learned_by_trl(config: Settings, seed: int) -> Numbers:
    """Train by TRL, whose rollouts a server makes; return the same. Raises ConfigError if its
    environment is missing or it fails."""
    folder = (config.folder / f"trl-{seed}").resolve()
    check_writable("results", folder)
    task, python = config.task(seed, folder), config.environment / "bin" / "python"
    convert(config.model, None, folder / "base", form="transformers")
    port, slots = free_port(), config.questions * config.rollouts
    flags = [f"--admin-port={port}", f"--num-slots={slots}", "--dtype=float32"]
    with served(folder / "base", *flags, f"--data-dir={folder / 'data'}"):
        task["url"] = f"http://127.0.0.1:{port}"
        path = folder / "task.json"
        write_whole(path, msgspec.json.encode(task))
        # The path as it is: a link to the interpreter is what says whose packages it has.
        command = [
            str(python.absolute()),
            "-m",
            "research.experiments.harness.train_by_trl",
            str(path),
        ]
        variables = os.environ | OFFLINE | {"HF_HOME": str(folder / "hf"), "PYTHONPATH": ""}
        ran = subprocess.run(command, cwd=ROOT, env=variables, stdout=sys.stderr, check=False)
    if ran.returncode:
        raise ConfigError(f"TRL ended with code {ran.returncode}: it says why above")
    result: Numbers = msgspec.json.decode(Path(task["result"]).read_bytes())
    del result["judged"]
    # As `srm train grpo` stores a model: matrices in bfloat16.
    stored, made = folder / "stored", Path(task["output"])
    save_model(read_model(config.model).config, load_model(made).state_dict(), stored, config.model)
    return answered(config, stored) | result


def check_environment(config: Settings) -> None:
    """Raise ConfigError unless the environment has a Python."""
    python = config.environment / "bin" / "python"
    if not python.exists():
        raise ConfigError(
            f"environment: {python} is missing; `make .venv-clients/ready` makes one with TRL"
        )


def right_shares(results: list[Numbers], member: str) -> Floats:
    """Return f64[seeds, problems], the share of samples that are right."""
    shares: Floats = np.array([result[member] for result in results]) / results[0]["samples"]
    return shares


def difference(results: Results, member: str) -> tuple[float, float]:
    """Return by how much TRL's models solve more than ours, and its standard error: over problems,
    which are the same, and over seeds, the two added in squares."""
    theirs, ours = (right_shares(results[case], member) for case in (TRL, SRM))
    by_problem = theirs.mean(axis=0) - ours.mean(axis=0)
    variances = [by_problem.var(ddof=1) / len(by_problem)]
    variances += [each.mean(axis=1).var(ddof=1) / len(each) for each in (theirs, ours)]
    return float(by_problem.mean()), math.sqrt(sum(variances))


def agreement(results: Results) -> str:
    """Say whether both trainers have learned the same, within the errors."""
    parts = []
    for member, which in (("right", "held-out problems"), ("known", "those learned from")):
        apart, error = difference(results, member)
        verdict = "within" if abs(apart) <= WITHIN * error else "beyond"
        parts.append(f"{apart:+.4f} ± {error:.4f} of {which}, {verdict} {WITHIN:g} errors")
    return (
        f"pass@1 after TRL less pass@1 after `srm train grpo`: {'; '.join(parts)}. The errors are "
        "over problems and over seeds."
    )


def page(config: Settings, results: Results) -> list[str]:
    """Return the record's text: what was learned, what it took, and whether both agree."""
    solved_rows, took = [], []
    for case in (START, TRL, SRM):
        row = [case]
        for member in ("right", "known"):
            before, after = (
                right_shares(results[name], member).mean(axis=0) for name in (START, case)
            )
            by_seed = right_shares(results[case], member).mean(axis=1)
            row += [f"{after.mean():.4f}", "–" if case == START else gain(before, after)]
            row += ["–" if case == START else ", ".join(f"{value:.4f}" for value in by_seed)]
        solved_rows.append(row)
    for case in (TRL, SRM):
        seeds = results[case]
        seconds, waited = ([median(seed[name]) for seed in seeds] for name in ("seconds", "waited"))
        shares = [sum(seed["waited"]) / sum(seed["seconds"]) for seed in seeds]
        row = [case, *(", ".join(f"{value:.2f}" for value in each) for each in (seconds, waited))]
        row += [f"{mean(shares):.0%} ({min(shares):.0%} … {max(shares):.0%})"]
        row += [f"{mean(mean(seed['tokens']) for seed in seeds):,.0f}", *first_and_last(seeds)]
        row += [f"{mean(mean(seed['mixed']) for seed in seeds):.0%}"]
        took.append(row)
    versions = results[TRL][0]
    heads = ["after", "held-out pass@1", "gained", "by seed"]
    heads += ["pass@1 of those learned from", "gained", "by seed"]
    times = ["trainer", "s an update, median by seed", "of it waiting", "share that waits"]
    times += ["tokens sampled an update", f"reward of the first {AVERAGED}", f"last {AVERAGED}"]
    rows = config.questions * config.rollouts
    return [
        agreement(results),
        f"{config.steps} updates of {config.questions} problems out of {config.problems}, "
        f"{config.rollouts} rollouts of each, {rows} rows; {len(config.seeds)} seeds; TRL "
        f"{versions['trl']}, torch {versions['torch']} there. {config.held_out} held-out problems "
        f"and those learned from, {config.samples} samples of each at temperature 1. A gain is by "
        "problem, with its standard error over problems.",
        table(heads, solved_rows),
        table([*times, "problems with right and wrong rollouts"], took),
        DIFFERENCES,
    ]


def draw(results: Results) -> Figure:
    """Plot the mean reward of each update's rollouts, a line for each seed."""
    figure, axes = plt.subplots(figsize=(7, 4))
    for colour, case in enumerate((TRL, SRM)):
        for seed in results[case]:
            steps = range(1, len(seed["rewards"]) + 1)
            label = case if seed is results[case][0] else None
            axes.plot(steps, seed["rewards"], color=f"C{colour}", linewidth=0.8, label=label)
    finish(axes, xlabel="updates", ylabel="reward of the rollouts")
    return figure


def run(config: Settings) -> Report:
    """Run both trainers with all seeds."""
    check_environment(config)
    write_problems(config)
    made_of = {"model": read_model(config.model).fingerprint, "problems": digest([config.train])}
    start = {START: lambda _: answered(config, config.model)}
    results = run_cases(config, start, made_of, config.seeds[:1])
    cases = {TRL: partial(learned_by_trl, config), SRM: partial(learned_by_us, config)}
    results |= run_cases(config, cases, made_of)
    return results, page(config, results), draw(results)
