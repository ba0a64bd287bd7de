"""Has questions completed and rewarded, and chooses the rollouts to learn from.

With `redraws`, questions whose rollouts all have one reward are replaced by others (dynamic
sampling of DAPO, https://arxiv.org/abs/2503.14476, section 3.2).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from srm.training.grpo.asked import Asked, Questions
from srm.training.grpo.config import SamplingSettings, ScheduleSettings
from srm.training.grpo.objective import RolloutRow
from srm.training.grpo.record import StepEvaluation, evaluated
from srm.training.grpo.resampling import GOOD, Floats, Ints, Resampling, advantages, chosen
from srm.training.grpo.rollouts import Rollout, RolloutSampling, Sampler
from srm.training.instruments.record import Sample
from srm.training.questions.reward_process import RewardProcess

_SAMPLING, _CHOICE, _EVALUATION, _ORDER = 1, 2, 3, 4
"""Random streams; each batch has its own of each, so that a run resumes exactly."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """The rollouts of one batch, rewarded, of all questions that were drawn for it."""

    asked: list[Asked]
    rollouts: list[list[Rollout]]
    each_reward: Floats  # f64[questions, rollouts, functions]
    rewards: Floats  # f64[questions, rollouts]
    learnable: Ints
    """The questions to learn from, as indices."""
    draws: int
    """Number of times that questions were drawn."""
    seconds: float
    """Seconds taken to sample, decode and reward the rollouts."""

    @property
    def weights_version(self) -> int:
        """The version of the weights that sampled them."""
        return self.rollouts[0][0].weights_version

    @property
    def mixed(self) -> float:
        """Fraction of the questions that have both good and bad rollouts."""
        good = (self.rewards >= GOOD).mean(axis=1)
        return float(((good > 0) & (good < 1)).mean())

    @property
    def ended(self) -> float:
        """Fraction of the rollouts that ended with a token, not at the length limit."""
        return float(np.mean([rollout.is_ended for own in self.rollouts for rollout in own]))

    @property
    def entropy(self) -> float:
        """Mean of -log p over all tokens, in nats."""
        logprobs = [rollout.logprobs for own in self.rollouts for rollout in own]
        return -float(np.concatenate(logprobs).mean())

    @property
    def length(self) -> float:
        """Mean tokens of a rollout."""
        return self.tokens / self.rewards.size

    @property
    def tokens(self) -> int:
        """Number of sampled tokens."""
        return sum(len(rollout.token_ids) for own in self.rollouts for rollout in own)


class Asking:
    """A run's questions, the sampler that completes them, and the reward function."""

    def __init__(
        self,
        settings: SamplingSettings,
        seed: int,
        asked: Questions,
        tokenizer: Tokenizer,
        reward: RewardProcess,
        sampler: Sampler,
    ) -> None:
        self._settings, self._seed = settings, seed
        self._asked, self._tokenizer = asked, tokenizer
        self._reward, self._sampler = reward, sampler

    def batch(self, drawn: int) -> RolloutBatch:
        """Return the next rewarded rollouts; `drawn` is how often questions were drawn before.

        Where there are too few questions to learn from after the last draw, others make up for
        them. Raises ConfigError if the reward function fails.
        """
        started = time.monotonic()
        asked: list[Asked] = []
        rollouts: list[list[Rollout]] = []
        each: list[Floats] = []
        for draw in range(drawn, drawn + 1 + self._settings.redraws):
            questions = self._asked.train[draw]
            more, rewards = self._rewarded(questions, self._settings.rollouts, _SAMPLING, draw)
            asked, rollouts = asked + questions, rollouts + more
            each.append(rewards)
            summed = self._reward.sum(each_reward := np.concatenate(each))
            is_mixed = np.ptp(summed, axis=1) > 0
            if is_mixed.sum() >= len(questions):
                break
        order = np.argsort(~is_mixed, kind="stable")[: len(questions)]
        seconds = time.monotonic() - started
        return RolloutBatch(
            asked, rollouts, each_reward, summed, np.sort(order), len(each), seconds
        )

    def evaluate(self, step: int, count: int, first: StepEvaluation | None) -> StepEvaluation:
        """Evaluate the sampler's weights after `step` updates by `count` completions of each
        question, with the same seed every time."""
        rollouts, rewards = self._rewarded(self._asked.evaluation, count, _EVALUATION, 0)
        right = (self._reward.sum(rewards) >= GOOD).sum(axis=1).tolist()
        return evaluated(step, rollouts[0][0].weights_version, count, right, first)

    def examples(self, batch: RolloutBatch) -> list[Sample]:
        """Return the best and the worst rollout of the first question to learn from."""
        question = batch.learnable[0]
        rewards = batch.rewards[question]
        prompt = self._tokenizer.decode(batch.asked[question].token_ids)
        samples = []
        for place in (rewards.argmax(), rewards.argmin()):
            ids = batch.rollouts[question][place].token_ids.tolist()
            samples.append(Sample(prompt, self._tokenizer.decode(ids), float(rewards[place])))
        return samples

    @property
    def can_evaluate(self) -> bool:
        """Whether there are questions for evaluation."""
        return bool(self._asked.evaluation)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Have the sampler use these weights from now on."""
        self._sampler.load(weights)

    def _rewarded(
        self, asked: list[Asked], count: int, stream: int, index: int
    ) -> tuple[list[list[Rollout]], Floats]:
        settings = self._settings
        sampling = RolloutSampling(
            n=count,
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=int(_seeds(self._seed, stream, index).generate_state(1, np.uint64)[0]),
        )
        rollouts = self._sampler.sample([reply.token_ids for reply in asked], sampling)
        rewards = []
        for reply, own in zip(asked, rollouts, strict=True):
            ids = [rollout.token_ids.tolist() for rollout in own]
            texts = self._tokenizer.decode_batch(ids, skip_special_tokens=True)
            rewards.append(self._reward.rewards(texts, reply.question))
        return rollouts, np.stack(rewards)


def rows_of(
    batch: RolloutBatch, rules: Resampling, scale: bool, seed: int, index: int
) -> list[RolloutRow]:
    """Choose the rollouts to learn from; `index` is the number of updates before. `scale` is
    whether advantages are divided by a deviation."""
    random = np.random.default_rng(_seeds(seed, _CHOICE, index))
    table = batch.rewards[batch.learnable]
    rewards = table.ravel()
    rollouts = [
        (batch.asked[place], sample)
        for place in batch.learnable
        for sample in batch.rollouts[place]
    ]
    rows = []
    for group in chosen(table, rules, random):
        for place, advantage in zip(group, advantages(rewards[group], scale), strict=True):
            asked, rollout = rollouts[place]
            rows.append(
                RolloutRow(asked.token_ids, rollout.token_ids, rollout.logprobs, float(advantage))
            )
    return rows


def updates_of(
    rows: Sequence[RolloutRow], schedule: ScheduleSettings, seed: int, index: int
) -> Iterator[Sequence[RolloutRow]]:
    """Yield the rows of each update that a batch makes; `index` is the number of updates before
    them."""
    random = np.random.default_rng(_seeds(seed, _ORDER, index))
    for _ in range(schedule.passes):
        if schedule.mini_batches == 1:
            yield rows
            continue
        for part in np.array_split(random.permutation(len(rows)), schedule.mini_batches):
            yield [rows[place] for place in part]


def _seeds(seed: int, stream: int, index: int) -> np.random.SeedSequence:
    return np.random.SeedSequence((seed, stream, index))
