"""The records of a run: a line for each update and each evaluation, and a plot of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import matplotlib as mpl
import msgspec
import numpy as np
from matplotlib import pyplot as plt

from srm.errors import UNDECODABLE, ConfigError
from srm.files import open_file
from srm.training.statistics.coverage import Tally, pass_table, standard_errors
from srm.training.text.whole_files import replace_file, write_whole

KS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192)
"""The values of k for pass@k, up to the number of samples."""


class Dated(msgspec.Struct, frozen=True):
    """A record with its place in the run."""

    step: int
    """Number of updates made so far; an Update counts its own."""


class Update(Dated, frozen=True, kw_only=True):
    """One batch of rollouts and the updates that learned from it; times in seconds."""

    weights_version: int
    """Version of the weights that sampled the rollouts. Without `ahead` they are those before the
    updates of this batch."""
    reward: float
    """Mean reward of all rollouts."""
    mixed: float
    """Fraction of the questions that have both good and bad rollouts."""
    ended: float
    """Fraction of the rollouts that ended with a token, not at the length limit."""
    loss: float | None
    """Loss of its last update; None if it is not finite, as `kl` and `gap` are then."""
    kl: float | None
    """Mean k3 (estimated KL divergence from the reference) of the tokens learned from, in nats;
    None without a reference."""
    gap: float | None
    """Mean absolute difference between the log-probabilities of trainer and sampler over the tokens
    learned from, in nats."""
    limited: float
    """Fraction of the tokens learned from whose importance weight was truncated or clipped."""
    learned_tokens: int
    rollout_tokens: int
    rollout_s: float
    """Seconds to sample, decode and reward the rollouts."""
    waited_s: float
    """The part of `rollout_s` in which the trainer waited."""
    learn_s: float
    load_s: float
    """Seconds to hand the weights to the sampler before this update."""
    draws: int = 1
    """Number of times that questions were drawn for it."""
    each_reward: list[float] = []
    """Mean of each reward function over all rollouts, unweighted."""
    entropy: float | None = None
    """Mean of -log p over the tokens of all rollouts, in nats: an estimate of the entropy of the
    policy at its temperature, too low where `top_p` cuts."""
    length: float | None = None
    """Mean tokens of a rollout."""


class StepEvaluation(Dated, frozen=True):
    """Samples of questions that are not trained on."""

    weights_version: int
    samples: int
    """Samples of each question."""
    right: list[int]
    """Number of right samples of each question."""
    pass_at: dict[str, float]
    """Unbiased estimate of pass@k for each k, mean over questions."""
    pass_at_1_error: float
    """Standard error of pass@1 over questions."""
    gain: float
    """Difference between this pass@1 and that of the first evaluation."""
    gain_error: float
    """Standard error of `gain`, from the differences question by question."""


class RunTimes(msgspec.Struct, frozen=True):
    """The times of a whole run, interruptions left out."""

    updates: int
    rollout_tokens_per_s: float
    """Sampled tokens per second of sampling."""
    learned_tokens_per_s: float
    """Completion tokens per second of learning; their prompts are computed too but not counted."""
    waiting_share: float
    """Waiting for rollouts as a fraction of the time spent waiting, learning and handing over
    weights."""
    overlap_share: float
    """Fraction of the sampling time in which the trainer worked too."""


def evaluated(
    step: int, weights_version: int, samples: int, right: list[int], first: StepEvaluation | None
) -> StepEvaluation:
    """Make the record of an evaluation; `first` is the run's first one, None if this is the
    first."""
    ks = [k for k in KS if k <= samples]
    table = pass_table([Tally(samples, count) for count in right], ks)
    rates = table[:, 0]
    gains = rates - (rates if first is None else np.array(first.right) / first.samples)
    rate_error, gain_error = standard_errors(np.stack([rates, gains], axis=1)).tolist()
    return StepEvaluation(
        step=step,
        weights_version=weights_version,
        samples=samples,
        right=right,
        pass_at={str(k): float(mean) for k, mean in zip(ks, table.mean(axis=0), strict=True)},
        pass_at_1_error=rate_error,
        gain=float(gains.mean()),
        gain_error=gain_error,
    )


def summary(updates: Sequence[Update]) -> RunTimes:
    """Return the run's rates; at least one update is needed."""
    rollout, waited, learn, load = (
        sum(getattr(update, name) for update in updates)
        for name in ("rollout_s", "waited_s", "learn_s", "load_s")
    )
    return RunTimes(
        updates=len(updates),
        rollout_tokens_per_s=sum(update.rollout_tokens for update in updates) / rollout,
        learned_tokens_per_s=sum(update.learned_tokens for update in updates) / learn,
        waiting_share=waited / (waited + learn + load),
        overlap_share=1 - waited / rollout,
    )


Line = TypeVar("Line", bound=Dated)


class JsonLinesFile(list[Line]):
    """A list kept in a file of JSON lines, which is rewritten at each `add`."""

    def __init__(self, path: Path, kind: type[Line], most: int) -> None:
        """Read the lines of the first `most` updates; later lines, of a run that was cut off, are
        dropped.

        Raises ConfigError if the file is damaged.
        """
        self._path = path
        try:
            if path.exists():
                with open_file(path) as file:
                    super().__init__(msgspec.json.decode(line, type=kind) for line in file)
        except UNDECODABLE as error:
            raise ConfigError(f"{path} is damaged: remove it or change output: {error}") from None
        self[:] = [line for line in self if line.step <= most]

    def add(self, line: Line) -> None:
        """Append a line, also to the file."""
        self.append(line)
        write_whole(self._path, b"".join(msgspec.json.encode(step) + b"\n" for step in self))


def plot(updates: Sequence[Update], evaluations: Sequence[StepEvaluation], path: Path) -> None:
    """Plot reward, pass@1 with its standard error, and KL in nats per token, by updates."""
    mpl.use("svg")  # no display needed
    with mpl.rc_context({"svg.hashsalt": "srm"}):  # the same picture for the same numbers
        figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 5), height_ratios=(3, 1))
        steps = [update.step for update in updates]
        top.plot(
            steps, [update.reward for update in updates], linewidth=0.8, label="reward of rollouts"
        )
        if evaluations:
            top.errorbar(
                [evaluation.step for evaluation in evaluations],
                [evaluation.pass_at["1"] for evaluation in evaluations],
                [evaluation.pass_at_1_error for evaluation in evaluations],
                marker=".",
                capsize=2,
                label="pass@1 of other questions",
            )
        top.legend()
        kl = [(update.step, update.kl) for update in updates if update.kl is not None]
        bottom.plot([step for step, _ in kl], [value for _, value in kl], linewidth=0.8)
        bottom.set(xlabel="updates", ylabel="KL (nats per token)")
        for axes in (top, bottom):
            axes.grid(linewidth=0.3)
        figure.tight_layout()
        with replace_file(path) as partial:
            figure.savefig(partial, format="svg", metadata={"Date": None})
        plt.close(figure)
