"""`srm train grpo`: samples rollouts with the engine, rewards them and learns from them, in turn or
at the same time."""

from __future__ import annotations

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from importlib import import_module
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.errors import ConfigError
from srm.engine.settings import build
from srm.engine.tokenizer_file import read_tokenizer
from srm.engine.weights.checkpoint import read_model
from srm.training.checkpoint import copy_text_files, load_model, save_model
from srm.training.events import check_events
from srm.training.grpo.asked import questions
from srm.training.grpo.asking import Asking, RolloutBatch, rows_of
from srm.training.grpo.config import (
    GRPOConfig,
    ObjectiveSettings,
    SamplingSettings,
    ScheduleSettings,
)
from srm.training.grpo.learner import Learner
from srm.training.grpo.objective import Objective, Sums
from srm.training.grpo.record import JsonLinesFile, RunTimes, StepEvaluation, Update, plot, summary
from srm.training.grpo.rollouts import Sampler
from srm.training.grpo.torch_sampler import TorchSampler
from srm.training.loop import Run, Schedule
from srm.training.model import SRM
from srm.training.processes import processes, stop_asked
from srm.training.questions.rewards import load_reward
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
    check_events(config.tensorboard)
    torch.manual_seed(config.seed)
    if config.threads:
        torch.set_num_threads(config.threads)
    base, reward = read_model(config.model), load_reward(config.data.reward)
    tokenizer = read_tokenizer(config.model / "tokenizer.json")
    n_ctx, max_tokens = base.config.n_ctx, config.sampling.max_tokens
    asked = questions(config.data, config.evaluations, config.seed, tokenizer, n_ctx, max_tokens)
    with processes(config.device) as own, own.alone_in(config.output):
        if own.count > 1:
            raise ConfigError(f"srm train grpo runs in one process, got {own.count} of torchrun")
        source = {"model": base.fingerprint, "questions": asked.source}
        model = load_model(config.model)
        schedule = _schedule(config.schedule, config.tensorboard)
        run = Run(model, schedule, config.output, own, source, select_fixed(config))
        reference = load_model(config.model) if config.objective.kl_weight else None
        learner = Learner(
            run,
            reference,
            _objective(config.objective, config.sampling),
            own.device,
            run.precision,
            config.schedule.micro_batch_tokens,
        )
        done = len(run.losses.steps)
        sampler = _sampler(config, base.config, run, done + 1, own.device)
        with closing(sampler):
            asking = Asking(config.sampling, config.seed, asked, tokenizer, reward, sampler)
            updates = JsonLinesFile(config.output / "updates.jsonl", Update, done)
            if len(updates) < done:
                raise ConfigError(
                    f"{config.output}/updates.jsonl must have the {done} updates of run.pt, got "
                    f"{len(updates)}: change output"
                )
            evaluations = JsonLinesFile(config.output / "evaluations.jsonl", StepEvaluation, done)
            alternate(config, run, learner, asking, updates, evaluations)
        copy_text_files(config.model, config.output)
        save_model(base.config, run.weights(), config.output)
    totals = summary(updates)
    write_whole(config.output / "summary.json", msgspec.json.encode(totals))
    plot(updates, evaluations, config.output / "grpo.svg")
    return Trained(evaluations, totals)


def alternate(
    config: GRPOConfig,
    run: Run,
    learner: Learner,
    asking: Asking,
    updates: JsonLinesFile[Update],
    evaluations: JsonLinesFile[StepEvaluation],
) -> None:
    """Make the updates that are left, each from rollouts of its own.

    In turn, these are sampled by the weights that learn from them. With `ahead`, another thread
    samples those of the next update meanwhile, and weights change hands when both are done. A
    signal to stop ends the run after the update under way, with KeyboardInterrupt.
    """
    schedule, samples = config.schedule, config.evaluations.evaluation_samples
    first, say = len(updates), partial(Console(highlight=False).print, soft_wrap=True)
    pending: Future[RolloutBatch] | None = None
    with ThreadPoolExecutor(1, "rollouts") as thread, stop_asked() as asked:
        for done in range(first, schedule.steps + 1):
            started = time.monotonic()
            batch = None if pending is None else pending.result()
            taken = time.monotonic()
            if done > first:
                asking.load(run.weights())
            loaded = time.monotonic()
            if asking.can_evaluate and _is_due(config, evaluations, done):
                earliest = evaluations[0] if evaluations else None
                evaluations.add(asking.evaluate(done, samples, earliest))
                say(_evaluation_line(evaluations[-1]))
                run.tell("pass@1", evaluations[-1].pass_at["1"])
            if done == schedule.steps:
                break
            waited = taken - started
            if batch is None:
                batch, waited = (made := asking.batch(done)), made.seconds
            if config.sampling.ahead and done + 1 < schedule.steps:
                pending = thread.submit(asking.batch, done + 1)
            began = time.monotonic()
            sums = learner.learn(rows_of(batch, config.resampling, config.seed, done))
            learn_s = time.monotonic() - began
            seconds = {"waited_s": waited, "learn_s": learn_s, "load_s": loaded - taken}
            updates.add(_update(config, run, batch, sums, seconds))
            say(_update_line(updates[-1], schedule.steps))
            _tell(run, updates[-1])
            is_last = done + 1 == schedule.steps
            if (done + 1) % schedule.save_every == 0 or is_last or asked.is_set():
                run.save()
                say(f"saved{run.decays}")
            if asked.is_set() and not is_last:
                raise KeyboardInterrupt


def _tell(run: Run, update: Update) -> None:
    """Tell who watches the run's events what an update was like."""
    for name in ("reward", "mixed", "ended", "kl", "gap", "rollout_s", "waited_s"):
        if (value := getattr(update, name)) is not None:
            run.tell(name, value)


def _update(
    config: GRPOConfig, run: Run, batch: RolloutBatch, sums: Sums, seconds: dict[str, float]
) -> Update:
    """Return the record of the update that was just made."""
    return Update(
        step=len(run.losses.steps),
        weights_version=batch.weights_version,
        reward=float(batch.rewards.mean()),
        mixed=batch.mixed,
        ended=batch.ended,
        loss=run.losses.steps[-1],
        kl=sums.kl / sums.tokens if config.objective.kl_weight else None,
        gap=sums.gap / sums.tokens,
        limited=sums.limited / sums.tokens,
        learned_tokens=sums.tokens,
        rollout_tokens=batch.tokens,
        rollout_s=batch.seconds,
        **seconds,
    )


def _update_line(update: Update, steps: int) -> str:
    kl = "" if update.kl is None else f"KL {update.kl:.4f}, "
    return (
        f"update {update.step} of {steps}: reward {update.reward:.3f}, "
        f"{update.mixed:.0%} of questions mixed, {kl}"
        f"sampled {update.rollout_tokens:,} tokens in {update.rollout_s:.1f} s, "
        f"waited {update.waited_s:.1f} s, "
        f"learned {update.learned_tokens:,} in {update.learn_s:.1f} s"
    )


def _evaluation_line(evaluation: StepEvaluation) -> str:
    *_, most = evaluation.pass_at
    pass_at_1, pass_at_most = evaluation.pass_at["1"], evaluation.pass_at[most]
    return (
        f"after {evaluation.step} updates: "
        f"pass@1 {pass_at_1:.4f} ± {evaluation.pass_at_1_error:.4f}, "
        f"gained {evaluation.gain:+.4f} ± {evaluation.gain_error:.4f}, "
        f"pass@{most} {pass_at_most:.4f}"
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


def _schedule(settings: ScheduleSettings, tensorboard: bool) -> Schedule:
    derived = {
        "warmup_steps": math.ceil(settings.warmup_share * settings.steps),
        "decline": "cosine",
        "tensorboard": tensorboard,
    }
    return build(Schedule, msgspec.structs.asdict(settings) | derived)


def _objective(settings: ObjectiveSettings, sampling: SamplingSettings) -> Objective:
    correction = settings.correction
    if correction == "auto":
        correction = "truncate" if sampling.ahead else "none"
    derived = {"correction": correction, "temperature": sampling.temperature}
    return build(Objective, msgspec.structs.asdict(settings) | derived)


def _is_due(config: GRPOConfig, evaluations: JsonLinesFile[StepEvaluation], done: int) -> bool:
    """Whether an evaluation after so many updates is wanted, and not there yet."""
    every, last = config.evaluations.evaluate_every, config.schedule.steps
    is_new = done not in {evaluation.step for evaluation in evaluations}
    return bool(every) and (done % every == 0 or done == last) and is_new
