"""`srm train grpo`: samples rollouts with the engine, rewards them and learns from them, in turn or
at the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import NamedTuple

import msgspec
import torch
from rich.console import Console
from torch import Tensor

from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.settings import build
from engine.weights.checkpoint import read_model
from training.checkpoint import copy_text_files, load_model, read_tokenizer, save_model
from training.events import check_events
from training.grpo.asked import questions
from training.grpo.asking import Asking, Batch, rows_of
from training.grpo.config import GRPOConfig
from training.grpo.learner import Learner
from training.grpo.objective import Objective
from training.grpo.record import Evaluation, Lines, Summary, Update, plot, summary
from training.grpo.rollouts import Sampler, engine_sampler
from training.grpo.torch_sampler import TorchSampler
from training.loop import Run, Schedule
from training.model import SRM
from training.processes import processes, stop_asked
from training.questions.rewards import load_reward
from training.settings import kept
from training.text.whole_files import write_whole


class Trained(NamedTuple):
    """The records of a run."""

    evaluations: list[Evaluation]
    summary: Summary


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
    base, reward = read_model(config.model), load_reward(config.reward)
    tokenizer = read_tokenizer(config.model / "tokenizer.json")
    asked = questions(config, base.config, tokenizer)
    with processes(config.device) as own, own.alone_in(config.output):
        if own.count > 1:
            raise ConfigError(f"srm train grpo runs in one process, got {own.count} of torchrun")
        source = {"model": base.fingerprint, "questions": asked.source}
        model, schedule = load_model(config.model), _schedule(config)
        run = Run(model, schedule, config.output, own, source, kept(config))
        reference = load_model(config.model) if config.kl_weight else None
        learner = Learner(
            run,
            reference,
            _objective(config),
            own.device,
            config.precision,
            config.micro_batch_tokens,
        )
        done = len(run.losses.steps)
        sampler = _sampler(config, base.config, run.weights(), done + 1, own.device)
        with closing(sampler):
            asking = Asking(config, asked, tokenizer, reward, sampler)
            updates = Lines(config.output / "updates.jsonl", Update, done)
            if len(updates) < done:
                raise ConfigError(
                    f"{config.output}/updates.jsonl must have the {done} updates of run.pt, got "
                    f"{len(updates)}: change output"
                )
            evaluations = Lines(config.output / "evaluations.jsonl", Evaluation, done)
            alternate(config, run, learner, asking, updates, evaluations)
        copy_text_files(config.model, config.output)
        save_model(base.config, run.weights(), config.output)
    found = summary(updates)
    write_whole(config.output / "summary.json", msgspec.json.encode(found))
    plot(updates, evaluations, config.output / "grpo.svg")
    return Trained(evaluations, found)


def alternate(
    config: GRPOConfig,
    run: Run,
    learner: Learner,
    asking: Asking,
    updates: Lines[Update],
    evaluations: Lines[Evaluation],
) -> None:
    """Make the updates that are left, each from rollouts of its own.

    In turn, these are sampled by the weights that learn from them. With `ahead`, another thread
    samples those of the next update meanwhile, and weights change hands when both are done. A
    signal to stop ends the run after the update under way, with KeyboardInterrupt.
    """
    first, say = len(updates), partial(Console(highlight=False).print, soft_wrap=True)
    pending: Future[Batch] | None = None
    with ThreadPoolExecutor(1, "rollouts") as thread, stop_asked() as asked:
        for done in range(first, config.steps + 1):
            started = time.monotonic()
            batch = None if pending is None else pending.result()
            taken = time.monotonic()
            if done > first:
                asking.load(run.weights())
            loaded = time.monotonic()
            is_due = _is_due(config, done) and asking.can_evaluate
            if is_due and done not in {one.step for one in evaluations}:
                evaluations.add(asking.evaluate(done, evaluations[0] if evaluations else None))
                say(_evaluation_line(evaluations[-1]))
                run.tell("pass@1", evaluations[-1].pass_at["1"])
            if done == config.steps:
                break
            waited = taken - started
            if batch is None:
                batch = asking.batch(done)
                waited = batch.seconds
            if config.ahead and done + 1 < config.steps:
                pending = thread.submit(asking.batch, done + 1)
            began = time.monotonic()
            sums = learner.learn(rows_of(batch, config, done))
            updates.add(
                Update(
                    step=done + 1,
                    weights_version=batch.weights_version,
                    reward=float(batch.rewards.mean()),
                    mixed=batch.mixed,
                    ended=batch.ended,
                    loss=run.losses.steps[-1],
                    kl=sums.kl / sums.tokens if config.kl_weight else None,
                    gap=sums.gap / sums.tokens,
                    limited=sums.limited / sums.tokens,
                    learned_tokens=sums.tokens,
                    rollout_tokens=batch.tokens,
                    rollout_s=batch.seconds,
                    waited_s=waited,
                    learn_s=time.monotonic() - began,
                    load_s=loaded - taken,
                )
            )
            say(_update_line(updates[-1], config.steps))
            for name in ("reward", "mixed", "ended", "kl", "gap", "rollout_s", "waited_s"):
                if (value := getattr(updates[-1], name)) is not None:
                    run.tell(name, value)
            is_last = done + 1 == config.steps
            if (done + 1) % config.save_every == 0 or is_last or asked.is_set():
                run.save()
            if asked.is_set() and not is_last:
                raise KeyboardInterrupt


def _update_line(one: Update, steps: int) -> str:
    kl = "" if one.kl is None else f"KL {one.kl:.4f}, "
    return (
        f"update {one.step} of {steps}: reward {one.reward:.3f}, {one.mixed:.0%} of questions "
        f"mixed, {kl}sampled {one.rollout_tokens:,} tokens in {one.rollout_s:.1f} s, "
        f"waited {one.waited_s:.1f} s, learned {one.learned_tokens:,} in {one.learn_s:.1f} s"
    )


def _evaluation_line(one: Evaluation) -> str:
    *_, most = one.pass_at
    return (
        f"after {one.step} updates: pass@1 {one.pass_at['1']:.4f} ± {one.pass_at_1_error:.4f}, "
        f"gained {one.gain:+.4f} ± {one.gain_error:.4f}, pass@{most} {one.pass_at[most]:.4f}"
    )


def _sampler(
    config: GRPOConfig,
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    version: int,
    device: torch.device,
) -> Sampler:
    """Start the sampler with these weights, which are version `version`."""
    if config.sampler == "torch":
        copy = SRM(model)
        copy.load_state_dict(weights)
        return TorchSampler(copy, device, config.precision, version)
    engine = EngineConfig(
        model=config.model,
        device=config.device,
        dtype=config.dtype,
        num_slots=config.questions * config.rollouts,
        max_waiting=max(100_000, config.rollouts, config.evaluation_samples),
    )
    return engine_sampler(model, weights, engine, version, config.gpu_memory)


def _schedule(config: GRPOConfig) -> Schedule:
    derived = {
        "warmup_steps": math.ceil(config.warmup_share * config.steps),
        "decline": "cosine",
        "evaluate_every": 0,
    }
    return build(Schedule, msgspec.structs.asdict(config) | derived)


def _objective(config: GRPOConfig) -> Objective:
    correction = config.correction
    if correction == "auto":
        correction = "truncate" if config.ahead else "none"
    return build(Objective, msgspec.structs.asdict(config) | {"correction": correction})


def _is_due(config: GRPOConfig, done: int) -> bool:
    every = config.evaluate_every
    return bool(every) and (done % every == 0 or done == config.steps)
