"""Results of the Python API: completions as arrays, and as text where that is asked for.

A completion is a view of the bytes that the engine made; its text is made when it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from srm.engine.messages import FinishReason, Output
from srm.engine.steps.batch import F32, I32
from srm.errors import ConfigError

Decode = Callable[[I32], str]
"""Decodes token ids to text. Raises InvalidRequest for a model without a tokenizer."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenScores:
    """Log-probabilities of tokens, and the likeliest tokens in their places."""

    logprobs: F32
    """f32[tokens]"""
    ranks: I32
    """i32[tokens]: 1 is the likeliest; a completion has none where `top_ids` are empty."""
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
    def text(self) -> str:
        """The text without the token that ended it and without special tokens, decoded anew each
        time. Raises InvalidRequest for a model without a tokenizer."""
        ids = self.token_ids[:-1] if self.finish_reason == "stop" else self.token_ids
        return self.decode(ids)

    @property
    def logprobs(self) -> F32 | None:
        """f32[tokens], if asked for."""
        return None if self.scores is None else self.scores.logprobs


@dataclass(frozen=True, slots=True, eq=False)
class CompletionPart:
    """New tokens of one sample."""

    index: int
    """Index of the sample among those of the prompt, 0 … n - 1."""
    token_ids: I32
    """i32[tokens], read-only; includes the token that ended it."""
    text: str
    """The text that they add: a character comes with its last token. Those of a sample, joined, are
    its text; empty for a model without a tokenizer."""
    finish_reason: FinishReason | None
    """As a Completion's, in the sample's last part; None before."""
    scores: TokenScores | None
    """Scores of the tokens, if `logprobs` asked for them."""


@dataclass(frozen=True, slots=True, eq=False)
class Generated:
    """A prompt and its completions, by index."""

    prompt_token_ids: I32
    """i32[tokens], read-only."""
    completions: list[Completion]
    prompt_scores: TokenScores | None = None
    """Scores of the prompt's tokens from `prompt_logprobs_start` on, never of the first, if
    `prompt_logprobs` asked for them."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return the completions as a stream of Arrow, which `pyarrow.table(generated)` and other
        libraries of tables read: `prompt`, `index`, `token_ids`, `finish_reason` and, where they
        were asked for, `logprobs`. Raises ConfigError if pyarrow is not installed."""
        try:
            arrow = import_module("pyarrow")
        except ImportError:
            raise ConfigError(
                "Arrow needs pyarrow, which is not installed: pip install pyarrow"
            ) from None
        made = self.completions
        ends = np.cumsum([0, *(len(completion.token_ids) for completion in made)])

        def lists(arrays: list[I32] | list[F32], kind: Any) -> Any:
            joined = np.concatenate([np.empty(0, kind), *arrays], dtype=kind)
            return arrow.LargeListArray.from_arrays(arrow.array(ends), arrow.array(joined))

        columns = {
            "prompt": arrow.array([completion.prompt for completion in made], "int32"),
            "index": arrow.array([completion.index for completion in made], "int32"),
            "token_ids": lists([completion.token_ids for completion in made], np.int32),
            "finish_reason": arrow.array(
                [completion.finish_reason for completion in made], "string"
            ),
        }
        scores = [each.logprobs for each in made if each.logprobs is not None]
        if scores:
            columns["logprobs"] = lists(scores, np.float32)
        return arrow.table(columns).__arrow_c_stream__(requested_schema)


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
