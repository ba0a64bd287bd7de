"""Input tokens of `srm bench precision` (problems, a model's samples, random), and its answers.

Tokens are int64 [T, B]: B sequences of a whole context each, the same for the same seed.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.model.rounded import Precision, RoundedModel
from engine.config import ModelConfig
from engine.weights.weights import Weights
from training.data import encode
from training.tasks import Problem, problems
from training.tokenizer import END_ID

ANSWER_TOKENS = 96
"""Greater than the length of any solution."""


def random_tokens(shape: ModelConfig, count: int, seed: int) -> Tensor:
    """Return uniformly random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, shape.vocab_size, (shape.n_ctx, count), generator=generator)


def problem_tokens(shape: ModelConfig, tokenizer: Tokenizer, count: int, seed: int) -> Tensor:
    """Return held-out problems with their solutions, concatenated."""
    ids: list[int] = []
    stream = problems("held-out", seed)
    while len(ids) < count * shape.n_ctx:
        ids += encode(tokenizer, [next(stream)])[0]
    return torch.tensor(ids[: count * shape.n_ctx]).view(count, shape.n_ctx).T


def sampled_tokens(weights: Weights, count: int, seed: int) -> Tensor:
    """Return texts that the model samples at temperature 1 in float32, concatenated."""
    shape = weights.config
    generator = torch.Generator().manual_seed(seed)
    model = RoundedModel(weights, Precision())
    state = model.empty_state(count)
    ids = torch.full((shape.n_ctx, count), shape.bos_token_id)
    for position in range(shape.n_ctx - 1):
        logits = model.run(ids[position : position + 1], state, position)[0]
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids[position + 1] = chosen[:, 0]
    return ids


def answers(
    model: RoundedModel, shape: ModelConfig, tokenizer: Tokenizer, drawn: list[Problem]
) -> list[str]:
    """Return the greedy completion of each problem; all are decoded together, token by token."""
    prompts = [encoding.ids for encoding in tokenizer.encode_batch([p.prompt for p in drawn])]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    length = min(shape.n_ctx, int(lengths.max()) + ANSWER_TOKENS)
    ids = torch.full((length, len(prompts)), END_ID)
    for i, prompt in enumerate(prompts):
        ids[: len(prompt), i] = torch.tensor(prompt)
    state, has_ended = model.empty_state(len(prompts)), torch.zeros(len(prompts), dtype=torch.bool)
    fed, position = 0, int(lengths.min())
    while position < length and not has_ended.all():
        likeliest = model.run(ids[fed:position], state, fed)[-1].argmax(-1)
        is_answer = lengths <= position
        ids[position] = torch.where(is_answer & ~has_ended, likeliest, ids[position])
        has_ended |= is_answer & (ids[position] == END_ID)
        fed, position = position, position + 1
    rows = zip(ids.T.tolist(), prompts, strict=True)
    return tokenizer.decode_batch([row[len(prompt) :] for row, prompt in rows])
