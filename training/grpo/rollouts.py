"""Rollouts, which are completions of prompts with their log-probabilities, and what makes them.

A learner needs of a sampler what `Sampler` has and nothing else, so that a server or another engine
can stand there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from torch import Tensor

from srm.engine.steps.batch import F32, I32


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One completion of a prompt."""

    token_ids: I32  # i32[tokens], with the token that ended it
    logprobs: F32  # f32[tokens], after temperature and before top_p
    is_ended: bool
    """Whether a token ended it, not the length limit."""
    weights_version: int
    """Number of the weights that sampled it; the start weights have 1, and each batch adds 1."""


class RolloutSampling(msgspec.Struct, frozen=True):
    """How rollouts of a prompt are sampled, as in SamplingParams; nothing else changes them."""

    n: int
    max_tokens: int
    temperature: float
    top_p: float
    seed: int


class Sampler(Protocol):
    """Completes prompts; its weights are replaced from time to time."""

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: RolloutSampling
    ) -> list[list[Rollout]]:
        """Return `sampling.n` rollouts of each prompt, determined by weights and arguments alone.

        Equal prompts get different rollouts.
        """

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Use these weights from now on, as the next version. Called only while nothing is being
        sampled."""

    def close(self) -> None:
        """Free what it holds."""


def cut_rollouts(
    token_ids: Tensor, logprobs: Tensor, ends: int | Sequence[int], weights_version: int
) -> list[Rollout]:
    """Return rows [n, tokens] as rollouts, each cut behind its first token of `ends`."""
    ids, lps = token_ids.cpu().numpy().astype("<i4"), logprobs.cpu().numpy()
    is_end = np.isin(ids, ends)
    is_ended = np.asarray(is_end.any(1))
    lengths = np.where(is_ended, is_end.argmax(1) + 1, ids.shape[1])
    return [
        Rollout(row[:length], row_lps[:length], bool(is_whole), weights_version)
        for row, row_lps, length, is_whole in zip(ids, lps, lengths, is_ended, strict=True)
    ]
