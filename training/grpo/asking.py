"""Has questions completed and rewarded, and chooses the rollouts to learn from."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from srm.training.grpo.asked import Asked, Questions
from srm.training.grpo.config import SamplingSettings
from srm.training.grpo.objective import RolloutRow
from srm.training.grpo.record import StepEvaluation, evaluated
from srm.training.grpo.resampling import GOOD, Floats, Resampling, advantages, chosen
from srm.training.grpo.rollouts import Rollout, RolloutSampling, Sampler
from srm.training.questions.rewards import Reward, rewarded

_SAMPLING, _CHOICE, _EVALUATION = 1, 2, 3
"""Random streams; each update has its own of each, so that a run resumes exactly."""


@dataclass(frozen=True, slots=True, eq=False)
class RolloutBatch:
    """The rollouts of one update, rewarded."""

    asked: list[Asked]
    rollouts: list[list[Rollout]]
    rewards: Floats  # f64[questions, rollouts]
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
        reward: Reward,
        sampler: Sampler,
    ) -> None:
        self._settings, self._seed = settings, seed
        self._asked, self._tokenizer = asked, tokenizer
        self._reward, self._sampler = reward, sampler

    def batch(self, index: int) -> RolloutBatch:
        """Return the rewarded rollouts of the update that `index` updates precede. Raises
        ConfigError if the reward function fails."""
        started = time.monotonic()
        asked = self._asked.train[index]
        rollouts, rewards = self._rewarded(asked, self._settings.rollouts, _SAMPLING, index)
        return RolloutBatch(asked, rollouts, rewards, time.monotonic() - started)

    def evaluate(self, step: int, count: int, first: StepEvaluation | None) -> StepEvaluation:
        """Evaluate the sampler's weights after `step` updates by `count` completions of each
        question, with the same seed every time."""
        rollouts, rewards = self._rewarded(self._asked.evaluation, count, _EVALUATION, 0)
        right = (rewards >= GOOD).sum(axis=1).tolist()
        return evaluated(step, rollouts[0][0].weights_version, count, right, first)

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
        rewards = np.empty((len(asked), count))
        for number, (reply, own) in enumerate(zip(asked, rollouts, strict=True)):
            ids = [rollout.token_ids.tolist() for rollout in own]
            texts = self._tokenizer.decode_batch(ids, skip_special_tokens=True)
            rewards[number] = [rewarded(self._reward, text, reply.question) for text in texts]
        return rollouts, rewards


def rows_of(batch: RolloutBatch, rules: Resampling, seed: int, index: int) -> list[RolloutRow]:
    """Choose the rollouts to learn from; `index` is the number of updates before."""
    random = np.random.default_rng(_seeds(seed, _CHOICE, index))
    rewards = batch.rewards.ravel()
    pairs = zip(batch.asked, batch.rollouts, strict=True)
    rollouts = [(asked, sample) for asked, own in pairs for sample in own]
    rows = []
    for group in chosen(batch.rewards, rules, random):
        for place, advantage in zip(group, advantages(rewards[group]), strict=True):
            asked, rollout = rollouts[place]
            rows.append(
                RolloutRow(asked.token_ids, rollout.token_ids, rollout.logprobs, float(advantage))
            )
    return rows


def _seeds(seed: int, stream: int, index: int) -> np.random.SeedSequence:
    return np.random.SeedSequence((seed, stream, index))
