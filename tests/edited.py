"""What biases, penalties and bans mean, from a request's parameters and in plain Python.

Nothing of how the engine hands them to a device is used here: see `engine/edits.py` for that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from engine.messages import SamplingParams

F64 = npt.NDArray[np.float64]


def edited(
    logits: F64, params: SamplingParams, eos: int, prompt: list[int], sampled: list[int]
) -> F64:
    """The logits f64[V] that the token after `prompt` and `sampled` is drawn from."""
    new = [float(x) for x in logits]
    for token in range(len(new)):
        new[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in sampled:
            if new[token] > 0:
                new[token] /= params.repetition_penalty
            else:
                new[token] *= params.repetition_penalty
        count = sampled.count(token)
        new[token] -= params.frequency_penalty * count
        new[token] -= params.presence_penalty if count else 0.0
        if is_banned(token, params, eos, sampled):
            new[token] = -np.inf
    return np.array(new)


def is_banned(token: int, params: SamplingParams, eos: int, sampled: list[int]) -> bool:
    """Whether the token may not follow `sampled`."""
    if params.allowed_token_ids and token not in params.allowed_token_ids:
        return True
    if len(sampled) < params.min_tokens and token in (eos, *params.stop_token_ids):
        return True
    after = (*sampled, token)
    return any(after[-len(word) :] == word for word in params.bad_words)


def wanted(vocab_size: int) -> st.SearchStrategy[dict[str, Any]]:
    """Fields of SamplingParams that edit logits; half the time none."""
    # Few tokens, so that what is asked for happens.
    some = st.integers(0, min(vocab_size, 8) - 1) | st.integers(0, vocab_size - 1)
    fields = st.fixed_dictionaries(
        {},
        optional={
            "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
            "frequency_penalty": st.sampled_from([-0.7, 0.25, 2.0]),
            "repetition_penalty": st.sampled_from([0.5, 1.3, 50.0]),
            "logit_bias": st.dictionaries(
                some, st.sampled_from([-100.0, -1.5, 3.0, 7.0]), max_size=4
            ),
            "allowed_token_ids": st.lists(some, min_size=3, max_size=9).map(tuple),
            "bad_words": st.lists(
                st.lists(some, min_size=1, max_size=4).map(tuple), max_size=5
            ).map(tuple),
            "min_tokens": st.integers(0, 6),
        },
    )
    return st.just({}) | fields
