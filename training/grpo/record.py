"""What a run writes down: a line for each update and each evaluation, and a picture of both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import matplotlib as mpl
import msgspec
import numpy as np
from matplotlib import pyplot as plt

from engine.errors import UNDECODABLE, ConfigError
from training.statistics.coverage import Tally, pass_table, standard_errors
from training.text.whole_files import write_whole

KS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192)
"""The values of k for pass@k, up to the number of samples."""


class Dated(msgspec.Struct, frozen=True):
    """What has its place in a run."""

    step: int
    """Updates made until then, that of an Update included."""


class Update(Dated, frozen=True):
    """One update; times in seconds."""

    weights_version: int
    """That of its rollouts. In turn it is `step`, the weights before the update."""
    reward: float
    """Mean over all rollouts."""
    mixed: float
    """Share of questions with good and other rollouts."""
    ended: float
    """Share of rollouts that a token ended, and not their length."""
    loss: float
    kl: float | None
    """Mean over the tokens that were learned from, of k3, in nats; None without a reference."""
    gap: float
    """Mean over the tokens that were learned from, of the difference between the log-probabilities
    of trainer and sampler, in nats."""
    limited: float
    """Share of these tokens whose weight was truncated or clipped."""
    learned_tokens: int
    rollout_tokens: int
    rollout_s: float
    """Spent to sample, decode and reward the rollouts."""
    waited_s: float
    """Of it, while nothing else was done."""
    learn_s: float
    load_s: float
    """Spent to hand the weights before this update over to the sampler."""


class Evaluation(Dated, frozen=True):
    """Samples of questions that are not trained on."""

    weights_version: int
    samples: int
    """Of each question."""
    right: list[int]
    """How many of each question's were."""
    pass_at: dict[str, float]
    """pass@k by k, without bias, mean over questions."""
    pass_at_1_error: float
    """Standard error of pass@1 over questions."""
    gain: float
    """pass@1 less that of the first evaluation."""
    gain_error: float
    """Standard error of `gain`, by the differences of the same questions."""


class Summary(msgspec.Struct, frozen=True):
    """The times of a whole run, interruptions left out."""

    updates: int
    rollout_tokens_per_s: float
    """While sampling."""
    learned_tokens_per_s: float
    """While learning: tokens of completions, whose prompts are computed too."""
    waiting_share: float
    """Of the time of waiting, learning and handing over, that of waiting for rollouts."""
    overlap_share: float
    """Of the time that sampling took, that in which the trainer worked too."""


def evaluated(
    step: int, weights_version: int, samples: int, right: list[int], first: Evaluation | None
) -> Evaluation:
    """Make the record of an evaluation; `first` is that of the run, None if this is it."""
    ks = [k for k in KS if k <= samples]
    table = pass_table([Tally(samples, count) for count in right], ks)
    rates = table[:, 0]
    gains = rates - (rates if first is None else np.array(first.right) / first.samples)
    rate_error, gain_error = standard_errors(np.stack([rates, gains], axis=1)).tolist()
    return Evaluation(
        step=step,
        weights_version=weights_version,
        samples=samples,
        right=right,
        pass_at={str(k): float(mean) for k, mean in zip(ks, table.mean(axis=0), strict=True)},
        pass_at_1_error=rate_error,
        gain=float(gains.mean()),
        gain_error=gain_error,
    )


def summary(updates: Sequence[Update]) -> Summary:
    """Return the run's rates; there is one update at least."""
    rollout, waited, learn, load = (
        sum(getattr(one, name) for one in updates)
        for name in ("rollout_s", "waited_s", "learn_s", "load_s")
    )
    return Summary(
        updates=len(updates),
        rollout_tokens_per_s=sum(one.rollout_tokens for one in updates) / rollout,
        learned_tokens_per_s=sum(one.learned_tokens for one in updates) / learn,
        waiting_share=waited / (waited + learn + load),
        overlap_share=1 - waited / rollout,
    )


Line = TypeVar("Line", bound=Dated)


class Lines(list[Line]):
    """Lines of a file of JSON lines, which is written as they come."""

    def __init__(self, path: Path, kind: type[Line], most: int) -> None:
        """Read those of at most `most` updates; others, of a run that was cut off, are dropped.

        Raises ConfigError if the file is damaged.
        """
        self._path = path
        try:
            lines = path.read_bytes().splitlines() if path.exists() else []
            super().__init__(msgspec.json.decode(line, type=kind) for line in lines)
        except UNDECODABLE as error:
            raise ConfigError(f"{path} is damaged: remove it or change output: {error}") from None
        self[:] = [line for line in self if line.step <= most]

    def add(self, line: Line) -> None:
        """Append a line, in the file too."""
        self.append(line)
        write_whole(self._path, b"".join(msgspec.json.encode(one) + b"\n" for one in self))


def plot(updates: Sequence[Update], evaluations: Sequence[Evaluation], path: Path) -> None:
    """Plot reward, pass@1 with its standard error, and KL in nats per token, by updates."""
    mpl.use("svg")  # no display needed
    with mpl.rc_context({"svg.hashsalt": "srm"}):  # the same picture for the same numbers
        figure, (top, bottom) = plt.subplots(2, sharex=True, figsize=(7, 5), height_ratios=(3, 1))
        steps = [one.step for one in updates]
        top.plot(steps, [one.reward for one in updates], linewidth=0.8, label="reward of rollouts")
        if evaluations:
            top.errorbar(
                [one.step for one in evaluations],
                [one.pass_at["1"] for one in evaluations],
                [one.pass_at_1_error for one in evaluations],
                marker=".",
                capsize=2,
                label="pass@1 of other questions",
            )
        top.legend()
        kl = [(one.step, one.kl) for one in updates if one.kl is not None]
        bottom.plot([step for step, _ in kl], [value for _, value in kl], linewidth=0.8)
        bottom.set(xlabel="updates", ylabel="KL (nats per token)")
        for axes in (top, bottom):
            axes.grid(linewidth=0.3)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
