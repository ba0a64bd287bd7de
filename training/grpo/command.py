"""`srm train grpo`: samples rollouts with the engine, rewards them and learns from them, in turn or
at the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
from rich.console import Console

from srm.engine.config import EngineConfig, ModelConfig
from srm.engine.errors import ConfigError, SRMError
from srm.engine.settings import build
from srm.engine.tokenizer_file import read_tokenizer
from srm.engine.weights.checkpoint import read_model
from srm.training.checkpoint import copy_text_files, load_model, save_model
from srm.training.events import check_events
from srm.training.grpo.asked import questions
from srm.training.grpo.asking import Asking, RolloutBatch, rows_of, updates_of
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
from srm.training.questions.reward_process import RewardProcess
from srm.training.settings import select_fixed
from srm.training.text.whole_files import write_whole

Result = TypeVar("Result")


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
    base = read_model(config.model)
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
            _objective(config.objective, config.sampling, config.schedule.updates_per_batch),
            own.device,
            run.precision,
            config.schedule.micro_batch_tokens,
        )
        done = len(run.losses.steps)
        _check_steps(config.schedule, done)
        updates = _updates(config.output / "updates.jsonl", done)
        with ExitStack() as open_processes:
            reward = RewardProcess(*config.data.rewards)
            open_processes.callback(reward.close)
            sampler = _sampler(config, base.config, run, len(updates) + 1, own.device)
            open_processes.callback(sampler.close)
            asking = Asking(config.sampling, config.seed, asked, tokenizer, reward, sampler)
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
    """Make the updates that are left, those of a batch from rollouts of its own.

    In turn, these are sampled by the weights that learn from them. With `ahead`, another thread
    samples the next batch meanwhile, and weights change hands when both are done. A signal to stop
    ends the run after the batch under way, with KeyboardInterrupt.
    """
    schedule = config.schedule
    first, many = len(run.losses.steps), schedule.updates_per_batch
    drawn = sum(update.draws for update in updates)
    pending: Future[RolloutBatch] | None = None
    with ThreadPoolExecutor(1, "rollouts") as thread, stop_asked() as asked:
        for done in range(first, schedule.steps + 1, many):
            started = time.monotonic()
            batch = None if pending is None else _saved_first(run, pending.result)
            taken = time.monotonic()
            if done > first:
                asking.load(run.weights())
            loaded = time.monotonic()
            if asking.can_evaluate and _is_due(config, evaluations, done):
                _evaluate(config, run, asking, evaluations)
            if done == schedule.steps:
                break
            waited = taken - started
            if batch is None:
                made = _saved_first(run, partial(asking.batch, drawn))
                batch, waited = made, made.seconds
            drawn += batch.draws
            if config.sampling.ahead and done + many < schedule.steps:
                pending = thread.submit(asking.batch, drawn)
            began = time.monotonic()
            sums = _learned(config, learner, batch, done)
            learn_s = time.monotonic() - began
            seconds = {"waited_s": waited, "learn_s": learn_s, "load_s": loaded - taken}
            updates.add(_update(config, run, batch, sums, seconds))
            _say(_update_line(updates[-1], schedule.steps))
            _tell(run, updates[-1])
            is_last = done + many == schedule.steps
            if (done + many) % schedule.save_every < many or is_last or asked.is_set():
                run.save()
                _say(f"saved{run.decays}")
            if asked.is_set() and not is_last:
                raise KeyboardInterrupt


def _updates(path: Path, done: int) -> JsonLinesFile[Update]:
    updates = JsonLinesFile(path, Update, done)
    if (last := updates[-1].step if updates else 0) != done:
        raise ConfigError(
            f"{path} must have the {done} updates of run.pt, got {last}: change output"
        )
    return updates


def _check_steps(schedule: ScheduleSettings, done: int) -> None:
    many = schedule.updates_per_batch
    if (schedule.steps - done) % many:
        raise ConfigError(
            f"steps must exceed the {done} updates made by a multiple of the {many} of a batch "
            f"(passes times mini_batches), got {schedule.steps}"
        )


def _learned(config: GRPOConfig, learner: Learner, batch: RolloutBatch, done: int) -> Sums:
    """Make the updates of a batch; return the sums over all of them."""
    scale = config.objective.scale_advantages
    rows, sums = rows_of(batch, config.resampling, scale, config.seed, done), Sums()
    for some in updates_of(rows, config.schedule, config.seed, done):
        sums.add(learner.learn(some))
    return sums


def _evaluate(
    config: GRPOConfig, run: Run, asking: Asking, evaluations: JsonLinesFile[StepEvaluation]
) -> None:
    """Evaluate the sampler's weights, which are the run's."""
    earliest = evaluations[0] if evaluations else None
    samples, done = config.evaluations.evaluation_samples, len(run.losses.steps)
    evaluations.add(_saved_first(run, partial(asking.evaluate, done, samples, earliest)))
    _say(_evaluation_line(evaluations[-1]))
    run.tell("pass@1", evaluations[-1].pass_at["1"])


def _saved_first(run: Run, call: Callable[[], Result]) -> Result:
    """Return what a call returns that learns nothing; if it fails, save first what was learned."""
    try:
        return call()
    except SRMError:
        if run.losses.steps:
            run.save()
        raise


def _say(line: str) -> None:
    Console(highlight=False).print(line, soft_wrap=True)


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
        draws=batch.draws,
        each_reward=batch.each_reward.mean(axis=(0, 1)).tolist(),
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


def _is_due(config: GRPOConfig, evaluations: JsonLinesFile[StepEvaluation], done: int) -> bool:
    """Whether an evaluation after so many updates is wanted, and not there yet."""
    every, last = config.evaluations.evaluate_every, config.schedule.steps
    is_new = done not in {evaluation.step for evaluation in evaluations}
    is_time = bool(every) and (done % every < config.schedule.updates_per_batch or done == last)
    return is_time and is_new
