"""Samples from a Transformer in plain torch, with keys and values kept.

A `Sampler` of training/grpo/. A prompt is fed once, however many samples it has; prompts of about
the same length and their samples run side by side, and rows that have ended are dropped. There is
no server around it and nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn import functional as F

from srm.training.baselines.transformer import Transformer, TransformerBlock, rotated
from srm.training.grpo.rollouts import Rollout, RolloutSampling, cut_rollouts

ROWS = 2_048
"""Most samples that run side by side."""
KEPT = 0.75
"""Ended rows are dropped once fewer than this share of the rows still run."""


class TransformerSampler:
    """Samples from a copy of a model on a device, whose weights become `dtype`; a sample ends with
    token `end`."""

    def __init__(
        self, model: Transformer, end: int, dtype: torch.dtype, device: str = "cpu"
    ) -> None:
        self._model = deepcopy(model).to(device, dtype).eval()
        self._device = device
        self._end = end
        self._version = 1

    def sample(
        self, prompts: Sequence[Sequence[int]], sampling: RolloutSampling
    ) -> list[list[Rollout]]:
        """Raises ValueError for a temperature or a top_p that is not 1."""
        if (sampling.temperature, sampling.top_p) != (1.0, 1.0):
            raise ValueError(f"temperature and top_p must be 1, got {sampling}")
        random = torch.Generator(self._device).manual_seed(sampling.seed)
        rollouts: list[list[Rollout]] = [[] for _ in prompts]
        for places in _side_by_side(prompts, max(1, ROWS // sampling.n)):
            some = [prompts[place] for place in places]
            for begin in range(0, sampling.n, ROWS):
                count = min(ROWS, sampling.n - begin)
                completions = self._complete(some, count, sampling.max_tokens, random)
                for row, rollout in enumerate(completions):
                    rollouts[places[row // count]].append(rollout)
        return rollouts

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self._model.load_state_dict(tensors)
        self._version += 1

    def close(self) -> None:
        del self._model

    @torch.inference_mode()
    def _complete(
        self, prompts: Sequence[Sequence[int]], count: int, most: int, random: torch.Generator
    ) -> list[Rollout]:
        """Return `count` completions of each prompt, of at most `most` tokens.

        Prompts end in the same column, and what stands before shorter ones is not looked at: a
        rotated query and a rotated key only know the gap between them.
        """
        longest = max(map(len, prompts))
        padded = [[self._end] * (longest - len(prompt)) + [*prompt] for prompt in prompts]
        lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=self._device)
        places = torch.arange(longest + most, device=self._device)
        is_seen = (places >= longest - lengths)[:, None, None]
        before = places[:longest, None]
        seen = is_seen[..., :longest] & (places[:longest] <= before) | (places[:longest] == before)
        caches = [_Cache(block) for block in self._blocks()]
        logits = self._next(torch.tensor(padded, device=self._device), caches, seen)
        logits, is_seen = logits.repeat_interleave(count, 0), is_seen.repeat_interleave(count, 0)
        for cache in caches:
            cache.expand(count, most)
        rows = torch.arange(len(logits), device=self._device)
        is_running = torch.ones_like(rows, dtype=torch.bool)
        tokens = torch.full((len(logits), most), self._end, device=self._device)
        logprobs = torch.zeros(len(logits), most, device=self._device)
        for place in range(most):
            probabilities = logits.float().softmax(-1)
            drawn = torch.multinomial(probabilities, 1, generator=random)
            logprobs[rows, place] = probabilities.gather(1, drawn)[:, 0].log()
            ids = drawn[:, 0].where(is_running, self._end)
            tokens[rows, place] = ids
            is_running = ids != self._end
            share = float(is_running.float().mean())
            if place + 1 == most or not share:
                break
            if share < KEPT:
                rows, ids = rows[is_running], ids[is_running]
                for cache in caches:
                    cache.select(is_running)
                is_seen, is_running = is_seen[is_running], is_running[is_running]
            logits = self._next(ids[:, None], caches, is_seen[..., : longest + place + 1])
        return cut_rollouts(tokens.cpu(), logprobs.cpu(), self._end, self._version)

    def _blocks(self) -> Iterator[TransformerBlock]:
        for block in self._model.mixer_blocks:
            assert isinstance(block, TransformerBlock)
            yield block

    def _next(self, ids: Tensor, caches: Sequence[_Cache], seen: Tensor) -> Tensor:
        """Feed ids [rows, length], which look at the places where `seen`, bool[rows, 1, 1 or
        length, places], is True; return the logits [rows, vocab] behind the last of them."""
        x = self._model.input_layer(ids)
        for cache in caches:
            x = cache.block(x, seen)
        logits: Tensor = self._model.output_layer(self._model.norm(x[:, -1]))
        return logits


class _Cache:
    """Keys and values of a block, f[rows, heads, length, e], and how many of them are filled."""

    def __init__(self, block: TransformerBlock) -> None:
        self._block = block
        self._filled = 0
        self._keys = self._values = torch.empty(0)

    def block(self, x: Tensor, seen: Tensor) -> Tensor:
        """Map x [rows, length, d], which follows what was fed before, as the block does."""
        block, attention = self._block, self._block.attention
        begin, end = self._filled, self._filled + x.shape[1]
        parts = attention.queries_keys_values(block.token_norm(x)).chunk(3, dim=-1)
        queries, keys, values = (
            part.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for part in parts
        )
        queries, keys = rotated(queries, begin), rotated(keys, begin)
        if begin:
            self._keys[:, :, begin:end], self._values[:, :, begin:end] = keys, values
        else:
            self._keys, self._values = keys, values
        self._filled = end
        y = F.scaled_dot_product_attention(
            queries, self._keys[:, :, :end], self._values[:, :, :end], seen
        )
        x = x + attention.out(y.transpose(1, 2).flatten(2))
        gate, up = block.gate_up(block.channel_norm(x)).chunk(2, dim=-1)
        inner: Tensor = block.down(F.silu(gate) * up)
        return x + inner

    def expand(self, rows: int, more: int) -> None:
        """Use each row for as many, with room for more tokens."""
        self._keys, self._values = (
            F.pad(part, (0, 0, 0, more)).repeat_interleave(rows, 0)
            for part in (self._keys, self._values)
        )

    def select(self, is_kept: Tensor) -> None:
        """Drop the other rows."""
        self._keys, self._values = self._keys[is_kept], self._values[is_kept]


def _side_by_side(prompts: Sequence[Sequence[int]], most: int) -> Iterator[list[int]]:
    """Yield the places of the prompts, up to `most` of about the same length at once."""
    places = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    for begin in range(0, len(places), most):
        yield places[begin : begin + most]
