"""Scores and greedy texts of the demo model, computed by the torch model in float64."""

from __future__ import annotations

from functools import cache

import torch
from tokenizers import Tokenizer

from srm.engine.config import DEMO_MODEL
from srm.training.checkpoint import load_model
from srm.training.model import SRM

TOLERANCE = 1e-4
"""Largest absolute difference of a log-probability, or of a sum of them."""


@cache
def model() -> SRM:
    return load_model(DEMO_MODEL).double()


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def scores(prompt: list[int], rest: list[int], temperature: float = 1) -> tuple[list[float], bool]:
    """The log-probability of each token of `rest`, and whether each is the likeliest."""
    with torch.no_grad():
        logits = model()(torch.tensor([prompt + rest]))[0][len(prompt) - 1 : -1]
    logprobs, chosen = (logits / temperature).log_softmax(-1), torch.tensor(rest)
    results: list[float] = logprobs[torch.arange(len(rest)), chosen].tolist()
    return results, bool((logprobs.argmax(-1) == chosen).all())


def greedy(prompt: list[int], num_tokens: int, stops: tuple[str, ...]) -> str:
    """The likeliest text, up to a stop string, the end of text or so many tokens."""
    tokens, text = list(prompt), ""
    while len(tokens) < len(prompt) + num_tokens:
        with torch.no_grad():
            tokens.append(int(model()(torch.tensor([tokens]))[0][-1].argmax()))
        text = tokenizer().decode(tokens[len(prompt) :])
        if results := [text.index(stop) for stop in stops if stop in text]:
            return text[: min(results)]
        if tokens[-1] == model().config.eos_token_id:
            break
    return text
