"""What biases, penalties and bans mean, from a request's parameters and in plain Python.

Nothing of how the engine hands them to a device is used here: see `engine/steps/token_edits.py` for
that.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from srm.engine.messages import SamplingParams

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
