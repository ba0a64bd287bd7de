"""The loop of `srm train grpo`: rollouts and updates, in turn or at the same time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

from rich.console import Console

from srm.errors import SRMError
from srm.training.grpo.asking import Asking, RolloutBatch, rows_of, updates_of
from srm.training.grpo.config import GRPOConfig
from srm.training.grpo.learner import Learner
from srm.training.grpo.objective import Sums
from srm.training.grpo.record import JsonLinesFile, StepEvaluation, Update
from srm.training.loop import Run
from srm.training.processes import stop_asked

Result = TypeVar("Result")

_LOGGED = ("reward", "mixed", "ended", "entropy", "length", "kl", "gap", "rollout_s", "waited_s")
"""Members of an update that the run's log has too."""


class Records(NamedTuple):
    """The files with a line for each batch and for each evaluation."""

    updates: JsonLinesFile[Update]
    evaluations: JsonLinesFile[StepEvaluation]


def alternate(
    config: GRPOConfig,
    run: Run,
    learner: Learner,
    asking: Asking,
    records: Records,
) -> None:
    """Make the updates that are left, those of a batch from rollouts of its own.

    In turn, these are sampled by the weights that learn from them. With `ahead`, another thread
    samples the next batch meanwhile, and weights change hands when both are done, unless no time is
    left for that. A signal to stop ends the run after the batch under way, with KeyboardInterrupt.
    """
    schedule, updates = config.schedule, records.updates
    first, many = len(run.losses.steps), schedule.updates_per_batch
    drawn = sum(update.draws for update in updates)
    pending: Future[RolloutBatch] | None = None
    batch_s = 0.0
    with ThreadPoolExecutor(1, "rollouts") as thread, stop_asked() as asked:
        for done in range(first, schedule.steps + 1, many):
            started = time.monotonic()
            batch = None if pending is None else _saved_first(run, pending.result)
            pending = None
            taken = time.monotonic()
            if done > first:
                asking.load(run.weights())
            loaded = time.monotonic()
            if asking.can_evaluate and _is_due(config, records.evaluations, done, run.is_over):
                with run.timed("evaluation"):
                    _evaluate(config, run, asking, records.evaluations)
            if run.is_over:
                break
            began = run.clock()
            waited = taken - started
            if batch is None:
                made = _saved_first(run, partial(asking.batch, drawn))
                batch, waited = made, made.seconds
            drawn += batch.draws
            is_followed = done + many < schedule.steps and run.has_time(2 * batch_s)
            if config.sampling.ahead and is_followed:
                pending = thread.submit(asking.batch, drawn)
            times = {"waited_s": waited, "load_s": loaded - taken}
            updates.add(_learned(config, run, learner, batch, times))
            _say(_update_line(updates[-1], schedule.steps))
            batch_s = run.clock() - began
            run.end_by_clock(batch_s)
            is_stopped = asked.is_set()
            if run.save_if_due(is_stopped, many):
                for sample in asking.examples(batch):
                    run.show(sample)
                _say(f"saved{run.notes}")
            if is_stopped and not run.is_over:
                raise KeyboardInterrupt
    run.write_model()


def _learned(
    config: GRPOConfig, run: Run, learner: Learner, batch: RolloutBatch, times: dict[str, float]
) -> Update:
    """Make the updates of a batch; write what they were like into the log and return it."""
    began, done, scale = time.monotonic(), len(run.losses.steps), config.objective.scale_advantages
    rows, sums = rows_of(batch, config.resampling, scale, config.seed, done), Sums()
    for some in updates_of(rows, config.schedule, config.seed, done):
        sums.add(learner.learn(some))
    times["learn_s"] = time.monotonic() - began
    update = _update(config, run, batch, sums, times)
    for name in _LOGGED:
        if (value := getattr(update, name)) is not None:
            run.tell(name, value)
    run.tell_speed(sums.inputs, update.learn_s, flop=8 if config.objective.kl_weight else 6)
    return update


def _evaluate(
    config: GRPOConfig, run: Run, asking: Asking, evaluations: JsonLinesFile[StepEvaluation]
) -> None:
    """Evaluate the sampler's weights, which are the run's."""
    earliest = evaluations[0] if evaluations else None
    samples, done = config.evaluations.evaluation_samples, len(run.losses.steps)
    evaluations.add(_saved_first(run, partial(asking.evaluate, done, samples, earliest)))
    _say(_evaluation_line(evaluations[-1]))
    run.tell("pass@1", evaluations[-1].pass_at["1"])
    run.flush()


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
        loss=_finite(run.losses.steps[-1]),
        kl=_finite(sums.kl / sums.tokens) if config.objective.kl_weight else None,
        gap=_finite(sums.gap / sums.tokens),
        limited=sums.limited / sums.tokens,
        learned_tokens=sums.tokens,
        rollout_tokens=batch.tokens,
        rollout_s=batch.seconds,
        draws=batch.draws,
        entropy=batch.entropy,
        length=batch.length,
        each_reward=batch.each_reward.mean(axis=(0, 1)).tolist(),
        **seconds,
    )


def _finite(value: float) -> float | None:
    """Return a value of an update that may have been skipped, as JSON has it."""
    return value if math.isfinite(value) else None


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


def _is_due(
    config: GRPOConfig, evaluations: JsonLinesFile[StepEvaluation], done: int, is_last: bool
) -> bool:
    """Whether an evaluation after so many updates is wanted, and not there yet."""
    every = config.evaluations.evaluate_every
    is_new = done not in {evaluation.step for evaluation in evaluations}
    is_time = bool(every) and (done % every < config.schedule.updates_per_batch or is_last)
    return is_time and is_new
