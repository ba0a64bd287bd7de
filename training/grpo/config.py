"""Settings of `srm train grpo`, in groups: each part of a run is handed its own."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from srm.engine.config import DEMO_MODEL, find_model
from srm.engine.messages import MAX_TEMPERATURE
from srm.training.grpo.resampling import Resampling
from srm.training.questions.questions import check_prompt
from srm.training.settings import MOST_FLOAT, UpdateSettings, check_numbers

LossMean = Literal["completion", "batch", "max_tokens"]

LEAST_TEMPERATURE = 1e-3
"""Least sampling temperature; dividing logits by less overflows."""


def _check_shares(group: msgspec.Struct, *names: str) -> None:
    for name in names:
        if not 0 < getattr(group, name) <= 1:
            raise ValueError(f"{name} must lie in (0, 1], got {getattr(group, name)}")


class DataSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where questions come from, and how good their answers are."""

    train: tuple[Path, ...] = ()
    """Files of JSON lines with question and answer; empty: generated word problems."""
    evaluation: tuple[Path, ...] = ()
    """Files like those of `train` for evaluation; empty: held-out word problems, or no evaluation
    where `train` has files."""
    prompt: str = ""
    """Text to complete, in which `{question}` stands for the question; empty: that of GSM8K."""
    reward: str = "srm.training.questions.rewards:gsm8k_strict"
    """Reward function of completion and question, as `module:function` or `file.py:function`, or
    several with commas, which are added; a reward of 1 or more is good."""
    reward_weights: tuple[float, ...] = ()
    """Factors of the rewards in their sum, in the order of `reward`; empty: 1 each."""
    reward_limit_s: float = 60.0
    """Most seconds that the reward of a completion may take."""
    questions: int = 8
    """Questions of one update."""

    def __post_init__(self) -> None:
        check_numbers(self, {"questions": 1, "reward_limit_s": 1})
        check_prompt(self.prompt)
        names, weights, _ = self.rewards
        if len(names) != len(weights):
            raise ValueError(
                f"reward_weights must be as many as reward has functions, {len(names)}, got "
                f"{len(weights)}"
            )
        if not all(abs(weight) <= MOST_FLOAT for weight in self.reward_weights):
            raise ValueError(
                f"reward_weights must be numbers of at most {MOST_FLOAT:g} either way, got "
                f"{self.reward_weights}"
            )

    @property
    def rewards(self) -> tuple[list[str], tuple[float, ...], float]:
        """The names of the reward functions, their weights and the limit of their time."""
        names = self.reward.split(",")
        return names, self.reward_weights or (1.0,) * len(names), self.reward_limit_s


class SamplingSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How rollouts are sampled, and by what."""

    rollouts: int = 50
    """Completions sampled for each question."""
    temperature: float = 0.7
    """Temperature of the sampling and of the log-probabilities that are learned."""
    top_p: float = 0.9
    """Top-p of the sampling."""
    max_tokens: int = 256
    """Longest completion in tokens."""
    redraws: int = 0
    """Most times that other questions are asked in place of those whose rollouts all have one
    reward, which teach nothing (dynamic sampling of DAPO, arXiv 2503.14476)."""
    ahead: bool = False
    """Whether the next update's rollouts are sampled during the current update, by weights one
    update older."""
    sampler: Literal["engine", "torch"] = "engine"
    """Sampler of the rollouts; `torch` is a plain one to measure the engine against."""
    dtype: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    """Dtype of the engine that samples, as in `srm serve`."""
    gpu_memory: float = 0.3
    """Fraction of a GPU's free memory that the engine reserves; the rest is for training."""

    def __post_init__(self) -> None:
        check_numbers(self, {"rollouts": 2, "max_tokens": 1, "redraws": 0})
        if not LEAST_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature must be {LEAST_TEMPERATURE} … {MAX_TEMPERATURE:g}, got "
                f"{self.temperature}"
            )
        _check_shares(self, "top_p", "gpu_memory")


class ObjectiveSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is learned from the rollouts."""

    kl_weight: float = 0.04
    """Weight of the KL divergence from the reference (β); 0: no reference."""
    correction: Literal["auto", "none", "truncate", "clip"] = "auto"
    """Correction for rollouts sampled by older weights: none, truncated importance weights of
    tokens, or clipped ones (PPO, arXiv 1707.06347). auto: `clip` with several updates a batch,
    `truncate` with `ahead`, else `none`."""
    clip_low: float = 0.2
    """With `correction` = clip, how far a token's importance weight may fall below 1."""
    clip_high: float = 0.2
    """With `correction` = clip, how far it may rise above 1; DAPO has 0.28."""
    most_weight: float = 2.0
    """Largest importance weight of a token whose probability has grown since it was sampled."""
    scale_advantages: bool = True
    """Whether advantages are divided by the standard deviation of their group's rewards; false as
    in Dr. GRPO (arXiv 2503.20783)."""
    loss_mean: LossMean = "completion"
    """Number of tokens that a completion's loss is divided by: `completion`, its own; `batch`, the
    mean of the update (DAPO); `max_tokens`, the most it may have (Dr. GRPO)."""

    def __post_init__(self) -> None:
        check_numbers(self, {"kl_weight": 0, "most_weight": 1, "clip_high": 0})
        _check_shares(self, "clip_low")


class ScheduleSettings(UpdateSettings, frozen=True):
    """How many updates there are, and how each is made."""

    steps: int = 200
    """Total updates, including those that a resumed run has made."""
    passes: int = 1
    """Times that each batch of rollouts is learned from (μ of GRPO, arXiv 2402.03300)."""
    mini_batches: int = 1
    """Parts of a batch, drawn anew for each pass, that are each an update of their own."""
    learning_rate: float = 2e-5
    """Peak learning rate: reached after the warm-up, then falling to 0 along a cosine."""
    warmup_share: float = 0.1
    """Fraction of the updates over which the learning rate rises."""
    micro_batch_tokens: int = 8_192
    """Most tokens computed at once, padding included, which bounds memory; a longer row is computed
    alone."""
    save_every: int = 50
    keep_every: int = 50

    def __post_init__(self) -> None:
        least = ("steps", "passes", "mini_batches", "micro_batch_tokens")
        check_numbers(self, dict.fromkeys(least, 1))
        if not 0 <= self.warmup_share <= 1:
            raise ValueError(f"warmup_share must lie in [0, 1], got {self.warmup_share}")

    @property
    def updates_per_batch(self) -> int:
        """Updates that learn from the same rollouts."""
        return self.passes * self.mini_batches


class EvaluationSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often and on how much the model is evaluated."""

    evaluate_every: int = 50
    """Updates between two evaluations; 0: none."""
    evaluation_questions: int = 100
    """Number of questions to evaluate on, the first ones; 0: all of `evaluation`."""
    evaluation_samples: int = 64
    """Completions of each evaluation question, sampled like rollouts."""

    def __post_init__(self) -> None:
        check_numbers(self, {"evaluation_questions": 0, "evaluation_samples": 1})


class GRPOConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm train grpo`; the defaults are the paper's recipe for GSM8K."""

    model: Path = DEMO_MODEL
    """Folder of the model that training begins with, which is also the reference: config.json,
    model.safetensors, tokenizer.json."""
    output: Path = Path("runs/grpo")
    """Folder of the run and of the new model; an existing run is resumed."""
    device: Literal["cpu", "gpu"] = "cpu"
    """Device that trains and samples."""
    threads: int = 0
    """CPU threads for training; 0: torch chooses."""
    seed: int = 0
    """Seed of the questions, of the sampling and of the choice of rollouts."""
    tensorboard: bool = False
    """Whether rewards are also written for TensorBoard, into the folder `tensorboard` of
    `output`."""
    wandb: bool = False
    """Whether rewards are also sent to Weights & Biases; variables `WANDB_…` say where."""
    data: DataSettings = DataSettings()
    sampling: SamplingSettings = SamplingSettings()
    resampling: Resampling = Resampling()
    objective: ObjectiveSettings = ObjectiveSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    evaluations: EvaluationSettings = EvaluationSettings()

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "model", find_model(self.model))
        check_numbers(self, {})
        size, data = self.resampling.group_size, self.data
        most = self.sampling.rollouts * (data.questions if self.resampling.pool else 1)
        if size and not 2 <= size <= most:
            raise ValueError(
                f"group_size must be 0 or 2 … {most}, the rollouts it is chosen from, got {size}"
            )
        if self.schedule.mini_batches > self.rows:
            raise ValueError(
                f"mini_batches must be at most the {self.rows} rollouts of a batch, got "
                f"{self.schedule.mini_batches}"
            )
        if self.sampling.redraws and self.resampling.pool:
            raise ValueError(
                f"redraws must be 0 with pool, whose group is all questions, got "
                f"{self.sampling.redraws}"
            )
        if not (self.evaluations.evaluation_questions or data.evaluation or data.train):
            raise ValueError("evaluation_questions must be at least 1 of generated problems, got 0")

    @property
    def rows(self) -> int:
        """Rollouts that are learned from, of each batch."""
        if not self.resampling.group_size:
            return self.sampling.rollouts * self.data.questions
        return self.resampling.group_size * (1 if self.resampling.pool else self.data.questions)
