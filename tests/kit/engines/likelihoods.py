"""What the numpy engine's model makes of a text, without an engine."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tests.kit.engines.numpy_runner import feed, tiny_weights
from tests.kit.serving import TEXT_MODEL

_WEIGHTS = tiny_weights(config=TEXT_MODEL)


def distributions(tokens: list[int], temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """Log-probabilities of every token in the place after each of these, f64[len(tokens), V]."""
    state = np.zeros((TEXT_MODEL.num_layers, TEXT_MODEL.d_model))
    rows = []
    for position, token in enumerate(tokens):
        logits, state = feed(_WEIGHTS, token, position, state)
        z = logits / temperature
        rows.append(z - z.max() - np.log(np.exp(z - z.max()).sum()))
    return np.array(rows)


def greedy_after(prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens after a prompt, one after the other."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(distributions(tokens)[-1].argmax()))
    return tokens[len(prompt) :]
