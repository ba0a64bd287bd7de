"""Samples from a Transformer in plain torch, with keys and values kept.

A prompt is fed once, however many samples it has; they run side by side, and rows that have ended
are dropped. There is no server around it and nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from srm.training.baselines.transformer import Transformer, TransformerBlock, rotated

KEPT = 0.75
"""Ended rows are dropped once fewer than this share of the rows still run."""


class TransformerSampler:
    """Takes a model for its own: its weights become `dtype`."""

    def __init__(self, model: Transformer, dtype: torch.dtype) -> None:
        self._model = model.to(dtype).eval()

    @torch.inference_mode()
    def sample(
        self, prompt: Sequence[int], count: int, most: int, end: int, random: torch.Generator
    ) -> list[list[int]]:
        """Return `count` completions of at most `most` tokens at temperature 1, each with the token
        `end` that ended it."""
        caches = [_Cache(block) for block in self._blocks()]
        logits = self._next(torch.tensor([list(prompt)]), caches)
        for cache in caches:
            cache.expand(count, most)
        logits = logits.expand(count, -1)
        rows, is_running = torch.arange(count), torch.ones(count, dtype=torch.bool)
        tokens = torch.full((count, most), end)
        for place in range(most):
            drawn = torch.multinomial(logits.float().softmax(-1), 1, generator=random)[:, 0]
            drawn = drawn.where(is_running, end)
            tokens[rows, place] = drawn
            is_running = drawn != end
            share = float(is_running.float().mean())
            if place + 1 == most or not share:
                break
            if share < KEPT:
                rows, drawn = rows[is_running], drawn[is_running]
                for cache in caches:
                    cache.select(is_running)
                is_running = is_running[is_running]
            logits = self._next(drawn[:, None], caches)
        return [row[: row.index(end) + 1] if end in row else row for row in tokens.tolist()]

    def _blocks(self) -> Iterator[TransformerBlock]:
        for block in self._model.mixer_blocks:
            assert isinstance(block, TransformerBlock)
            yield block

    def _next(self, ids: Tensor, caches: Sequence[_Cache]) -> Tensor:
        """Feed ids [rows, length]; return the logits [rows, vocab] behind the last of them."""
        x = self._model.input_layer(ids)
        for cache in caches:
            x = cache.block(x)
        logits: Tensor = self._model.output_layer(self._model.norm(x[:, -1]))
        return logits


class _Cache:
    """Keys and values of a block, f[rows, heads, length, e], and how many of them are filled."""

    def __init__(self, block: TransformerBlock) -> None:
        self._block = block
        self._filled = 0
        self._keys = self._values = torch.empty(0)

    def block(self, x: Tensor) -> Tensor:
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
        # several tokens are fed only at the beginning, and one sees all before it
        y = F.scaled_dot_product_attention(
            queries, self._keys[:, :, :end], self._values[:, :, :end], is_causal=not begin
        )
        x = x + attention.out(y.transpose(1, 2).flatten(2))
        gate, up = block.gate_up(block.channel_norm(x)).chunk(2, dim=-1)
        inner: Tensor = block.down(F.silu(gate) * up)
        return x + inner

    def expand(self, rows: int, more: int) -> None:
        """Use the only row for as many, with room for more tokens."""
        self._keys, self._values = (
            F.pad(part, (0, 0, 0, more)).repeat(rows, 1, 1, 1)
            for part in (self._keys, self._values)
        )

    def select(self, is_kept: Tensor) -> None:
        """Drop the other rows."""
        self._keys, self._values = self._keys[is_kept], self._values[is_kept]
