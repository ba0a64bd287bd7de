"""Settings of `srm train grpo`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from engine.config import DEMO_MODEL
from engine.messages import MAX_TEMPERATURE
from training.loop import Precision
from training.settings import check_numbers

LEAST_TEMPERATURE = 1e-3
"""Logits divided by less overflow."""


class GRPOConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm train grpo`; the defaults are the paper's recipe for GSM8K."""

    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json; what training begins with, and
    the reference."""
    output: Path = Path("runs/grpo")
    """Folder of the run and of the new model; a run that is there goes on."""
    train: tuple[Path, ...] = ()
    """Files of JSON lines with question and answer; empty: generated word problems."""
    evaluation: tuple[Path, ...] = ()
    """Such files for evaluation; empty: held-out word problems, or none where `train` has files."""
    reward: str = "training.questions.rewards:gsm8k_strict"
    """`module:function` or `file.py:function` of completion and question; 1 or more is good."""
    steps: int = 200
    """Updates in all, those of a run that goes on included; each has rollouts of its own."""
    questions: int = 8
    """Questions of one update."""
    rollouts: int = 50
    """Completions that are sampled of each question."""
    group_size: int = 16
    """Rollouts of each question that are learned from, up to half of them good; 0: all."""
    pool: bool = False
    """Whether the group is one of all questions together, as in the published code."""
    in_order: bool = False
    """Whether a group has the first rollouts, as in the published code, and not random ones."""
    temperature: float = 0.7
    """Of the sampling, and of the log-probabilities that are learned."""
    top_p: float = 0.9
    """Of the sampling."""
    max_tokens: int = 256
    """Longest completion in tokens."""
    kl_weight: float = 0.04
    """How much the distance from the reference counts (β); 0: no reference."""
    ahead: bool = False
    """Whether the rollouts of the next update are sampled during this one, by weights that are one
    update older."""
    correction: Literal["auto", "none", "truncate", "clip"] = "auto"
    """What makes up for rollouts of other weights: nothing, truncated importance weights of tokens,
    or PPO's clipped ones. auto: `truncate` with `ahead`, else none."""
    clip_range: float = 0.2
    """Of `correction` = clip: how far a token's weight may be from 1."""
    most_weight: float = 2.0
    """Most weight of a token whose probability has grown since it was sampled."""
    learning_rate: float = 2e-5
    """Peak learning rate: reached after the warm-up, then falling to 0 along a cosine."""
    warmup_share: float = 0.1
    """Part of the updates over which the learning rate rises."""
    weight_decay: float = 0.1
    """Of AdamW."""
    clip_norm: float = 0.1
    """Largest norm of all gradients together; longer ones are shortened to it."""
    micro_batch_tokens: int = 8_192
    """Most tokens that are computed at once, padding included, which bounds memory; of a row that
    is longer, those of one row."""
    evaluate_every: int = 50
    """Updates between two evaluations; 0: none."""
    evaluation_questions: int = 100
    """The first so many questions are evaluated on; 0: all of `evaluation`."""
    evaluation_samples: int = 64
    """Completions of each of them, sampled as rollouts are."""
    save_every: int = 50
    """Updates between two saves of the run."""
    precision: Precision = "bfloat16"
    """Of the products in training; weights, sums and states stay float32."""
    sampler: Literal["engine", "torch"] = "engine"
    """What samples; `torch` is there to measure the engine against."""
    dtype: Literal["auto", "float32", "bfloat16", "float8"] = "auto"
    """Of the engine that samples, as `srm serve` has it."""
    device: Literal["cpu", "gpu"] = "cpu"
    """What trains and samples."""
    gpu_memory: float = 0.3
    """Share of a GPU's free memory that the engine reserves; training has the rest."""
    tensorboard: bool = False
    """Whether rewards are written for TensorBoard too, into `tensorboard` of the folder."""
    seed: int = 0
    """Of questions, sampling and choice."""
    threads: int = 0
    """CPU threads of training; 0 is as many as torch chooses."""

    def __post_init__(self) -> None:
        least = "steps questions max_tokens micro_batch_tokens evaluation_samples most_weight"
        also = {"rollouts": 2, "evaluation_questions": 0, "kl_weight": 0}
        check_numbers(self, dict.fromkeys(least.split(), 1) | also)
        if not LEAST_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature must be {LEAST_TEMPERATURE} … {MAX_TEMPERATURE:g}, got "
                f"{self.temperature}"
            )
        for name in ("top_p", "clip_range", "gpu_memory"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {getattr(self, name)}")
        if not 0 <= self.warmup_share <= 1:
            raise ValueError(f"warmup_share must lie in [0, 1], got {self.warmup_share}")
        most = self.rollouts * (self.questions if self.pool else 1)
        if self.group_size and not 2 <= self.group_size <= most:
            raise ValueError(
                f"group_size must be 0 or 2 … {most}, the rollouts it is chosen from, got "
                f"{self.group_size}"
            )
        if not (self.evaluation_questions or self.evaluation or self.train):
            raise ValueError("evaluation_questions must be at least 1 of generated problems, got 0")

    @property
    def rows(self) -> int:
        """Rollouts that one update learns from."""
        if not self.group_size:
            return self.rollouts * self.questions
        return self.group_size * (1 if self.pool else self.questions)
