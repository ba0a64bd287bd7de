"""`srm train grpo`: samples rollouts with the engine, rewards them and learns from them."""

from __future__ import annotations

import math
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.weights.checkpoint import read_model
from srm.errors import ConfigError
from srm.settings import build
from srm.tokenizer_file import read_tokenizer
from srm.training.checkpoint import load_model
from srm.training.grpo.alternation import Records, alternate
from srm.training.grpo.asked import questions
from srm.training.grpo.asking import Asking
from srm.training.grpo.config import (
    GRPOConfig,
    ObjectiveSettings,
    SamplingSettings,
    ScheduleSettings,
)
from srm.training.grpo.learner import Learner
from srm.training.grpo.objective import Objective
from srm.training.grpo.record import JsonLinesFile, RunTimes, StepEvaluation, Update, plot, summary
from srm.training.grpo.rollouts import Sampler
from srm.training.grpo.torch_sampler import TorchSampler
from srm.training.instruments.events import check_events
from srm.training.loop import Run
from srm.training.model import SRM
from srm.training.processes import processes
from srm.training.questions.reward_process import RewardProcess
from srm.training.schedule import Schedule
from srm.training.settings import select_fixed
from srm.training.text.whole_files import write_whole


class Trained(NamedTuple):
    """The records of a run."""

    evaluations: list[StepEvaluation]
    summary: RunTimes


def grpo(config: GRPOConfig) -> Trained:
    """Train, or resume the run in `config.output`; leaves a model folder there.

    Raises ConfigError for settings that do not fit the model, the questions or the run that is
    there, and where the reward fails.
    """
    if config.output.resolve() == config.model.resolve():
        raise ConfigError(f"output must be another folder than model, got {config.output} for both")
    check_events(config)
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    base = read_model(config.model)
    tokenizer = read_tokenizer(config.model / "tokenizer.json")
    n_ctx, max_tokens = base.config.n_ctx, config.sampling.max_tokens
    asked = questions(config.data, config.evaluations, config.seed, tokenizer, n_ctx, max_tokens)
    with processes(config.device) as own, own.alone_in(config.output):
        if own.count > 1:
            raise ConfigError(f"srm train grpo runs in one process, got {own.count} of torchrun")
        source = {"model": base.fingerprint, "questions": asked.source}
        model = load_model(config.model)
        schedule = _schedule(config)
        run = Run(model, schedule, config.output, own, source, select_fixed(config), config.model)
        reference = load_model(config.model) if config.objective.kl_weight else None
        learner = Learner(
            run,
            reference,
            _objective(config.objective, config.sampling, config.schedule.updates_per_batch),
            own.device,
            run.precision,
            config.schedule.micro_batch_tokens,
        )
        done = len(run.losses.steps)
        _check_steps(config.schedule, done)
        updates, evaluations = records = _records(config.output, done)
        with ExitStack() as open_processes:
            reward = RewardProcess(*config.data.rewards)
            open_processes.callback(reward.close)
            sampler = _sampler(config, base.config, run, len(updates) + 1, own.device)
            open_processes.callback(sampler.close)
            asking = Asking(config.sampling, config.seed, asked, tokenizer, reward, sampler)
            alternate(config, run, learner, asking, records)
    totals = summary(updates)
    write_whole(config.output / "summary.json", msgspec.json.encode(totals))
    plot(updates, evaluations, config.output / "grpo.svg")
    return Trained(evaluations, totals)


def _records(folder: Path, done: int) -> Records:
    updates = JsonLinesFile(folder / "updates.jsonl", Update, done)
    if (last := updates[-1].step if updates else 0) != done:
        raise ConfigError(
            f"{folder}/updates.jsonl must have the {done} updates of run.pt, got {last}: change "
            "output"
        )
    # Without an update there is no run.pt that says whose evaluation there is.
    evaluations = JsonLinesFile(folder / "evaluations.jsonl", StepEvaluation, done or -1)
    return Records(updates, evaluations)


def _check_steps(schedule: ScheduleSettings, done: int) -> None:
    many = schedule.updates_per_batch
    if (schedule.steps - done) % many:
        raise ConfigError(
            f"steps must exceed the {done} updates made by a multiple of the {many} of a batch "
            f"(passes times mini_batches), got {schedule.steps}"
        )


def _sampler(
    config: GRPOConfig,
    model: ModelConfig,
    run: Run,
    version: int,
    device: torch.device,
) -> Sampler:
    """Start the sampler with the run's weights, which are version `version`."""
    sampling, weights = config.sampling, run.weights()
    if sampling.sampler == "torch":
        copy = SRM(model)
        copy.load_state_dict(weights)
        return TorchSampler(copy, device, run.precision, version)
    engine = EngineConfig(
        model=config.model,
        device=config.device,
        dtype=sampling.dtype,
        num_slots=config.data.questions * sampling.rollouts,
        max_waiting=max(100_000, sampling.rollouts, config.evaluations.evaluation_samples),
    )
    # It loads MAX, which the sampler of torch does without.
    module = import_module("srm.training.grpo.engine_sampler")
    made: Sampler = module.engine_sampler(model, weights, engine, version, sampling.gpu_memory)
    return made


def _schedule(config: GRPOConfig) -> Schedule:
    settings = config.schedule
    derived = {
        "warmup_steps": math.ceil(settings.warmup_share * settings.steps),
        "decline": "cosine",
        "tensorboard": config.tensorboard,
        "wandb": config.wandb,
    }
    return build(Schedule, msgspec.structs.asdict(settings) | derived)


def _objective(
    settings: ObjectiveSettings, sampling: SamplingSettings, updates_per_batch: int
) -> Objective:
    correction = settings.correction
    if correction == "auto":
        correction = "truncate" if sampling.ahead else "none"
        correction = "clip" if updates_per_batch > 1 else correction
    derived = {"correction": correction, "temperature": sampling.temperature}
    derived["max_tokens"] = sampling.max_tokens
    return build(Objective, msgspec.structs.asdict(settings) | derived)
