"""Results of the Python API: completions as arrays, and as text where that is asked for.

A completion is a view of the bytes that the engine made; its text is made when it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from srm.engine.messages import FinishReason, Output
from srm.engine.steps.batch import F32, I32

Decode = Callable[[I32], str | None]
"""Decodes token ids to text; None for a model without a tokenizer."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Log-probabilities of tokens, and the likeliest tokens in their places."""

    logprobs: F32
    """f32[tokens]"""
    ranks: I32
    """i32[tokens], of a prompt's: 1 is the likeliest; of a completion's there are none."""
    top_ids: I32
    """i32[tokens, k], k alternatives asked for, the likeliest first; -1 where there are no more."""
    top_logprobs: F32
    """f32[tokens, k]: log-probabilities of `top_ids`."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One sample of a prompt."""

    prompt: int
    """Index of the prompt that it completes, from 0, in the order given."""
    index: int
    """Index of the sample among those of the prompt, 0 … n - 1."""
    token_ids: I32
    """i32[tokens], read-only; includes the token that ended it."""
    finish_reason: FinishReason
    """`stop`: a token ended it. `length`: max_tokens or the context did. `error`: the model's
    output was not finite, and nothing was sampled from it."""
    scores: TokenScores | None
    """Scores of its tokens, if `logprobs` asked for them."""
    decode: Decode = field(repr=False)

    @property
    def text(self) -> str | None:
        """The text without the token that ended it and without special tokens; None for a model
        without a tokenizer. Decoded anew each time."""
        ids = self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids
        return self.decode(ids)

    @property
    def logprobs(self) -> F32 | None:
        """f32[tokens], if asked for."""
        return None if self.scores is None else self.scores.logprobs


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """A prompt and its completions, by index."""

    prompt_token_ids: I32
    """i32[tokens], read-only."""
    completions: list[Completion]
    prompt_scores: TokenScores | None = None
    """Scores of the prompt's tokens from `prompt_logprobs_start` on, never of the first, if
    `prompt_logprobs` asked for them."""


def token_scores(whole: Output) -> TokenScores:
    """Return the scores of an Output."""
    count = len(whole.token_ids) // 4
    shape = (count, len(whole.top_ids) // (4 * max(count, 1)))
    return TokenScores(
        logprobs=np.frombuffer(whole.logprobs, np.float32),
        ranks=np.frombuffer(whole.ranks, np.int32),
        top_ids=np.frombuffer(whole.top_ids, np.int32).reshape(shape),
        top_logprobs=np.frombuffer(whole.top_logprobs, np.float32).reshape(shape),
    )
