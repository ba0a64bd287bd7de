"""The Structured Recurrent Mixer in torch: one set of parameters, two forms. The oracle.

`forward()` works in parallel over the sequence; `step()` is the same function as a recurrence over
a state of plain sums. The blocks are those of the class for `transformers`. Parameter names are
those of the published checkpoints (blbadger/mrm), so files move between the two without renaming.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from srm.engine.config import ModelConfig
from srm.training.huggingface.mixers_srm import Block, Linear, stacked_units
from srm.training.huggingface.units_srm import (
    CHUNK,
    Places,
    RunUnit,
    Unit,
    place_units,
    split_documents,
)


class LanguageModel(nn.Module):
    """What the training loop trains: ids int64 [batch, length] -> logits [batch, length, vocab]."""

    config: msgspec.Struct
    """Sizes of the model; a saved run can only be resumed by a model of the same sizes."""
    mixer_blocks: nn.ModuleList
    """The blocks, which are divided among processes when training is sharded."""
    checkpoint_activations = False
    """Whether the backward pass computes each block again, of which its inputs alone are kept."""

    def run_block(self, block: nn.Module, *inputs: Any) -> Any:
        """Return what a block makes of its inputs."""
        if not self.checkpoint_activations:
            return block(*inputs)
        # Blocks draw nothing at random, and a CUDA graph that is captured has no such state.
        return checkpoint(block, *inputs, use_reentrant=False, preserve_rng_state=False)


class BlockModel(LanguageModel):
    """ids -> embedding -> blocks -> norm -> logits, by an output layer of its own."""

    def __init__(
        self,
        config: msgspec.Struct,
        sizes: tuple[int, int],
        blocks: Iterator[nn.Module],
        norm: nn.Module | None = None,
    ) -> None:
        """`sizes` are the vocabulary's and the width. Blocks are made behind the embedding: what is
        drawn at random comes in the order of the layers."""
        super().__init__()
        self.config = config
        self.input_layer = nn.Embedding(*sizes)
        self.mixer_blocks = nn.ModuleList(blocks)
        self.norm = norm or nn.Identity()
        self.output_layer: nn.Linear = Linear(sizes[1], sizes[0], bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Map ids int64 [batch, length] to logits [batch, length, vocab]."""
        x = self.input_layer(ids)
        for block in self.mixer_blocks:
            x = self.run_block(block, x)
        logits: Tensor = self.output_layer(self.norm(x))
        return logits


class SRM(BlockModel):
    """ids -> embedding -> blocks -> logits. No final norm, tied weights or position encoding."""

    config: ModelConfig
    separator: int | None = None
    """Token that begins a document, each of which `forward` computes as if it stood alone; None: a
    row is one."""
    run_unit: RunUnit | None = None
    """What runs the units of token mixers forward, as `units_triton.run_unit`; None: torch."""

    def __init__(self, config: ModelConfig) -> None:
        blocks = (Block(config) for _ in range(config.num_layers))
        super().__init__(config, (config.vocab_size, config.d_model), blocks)

    def forward(self, ids: Tensor, chunk: int = CHUNK) -> Tensor:
        """Map ids int64 [batch, length ≤ n_ctx] to logits [batch, length, vocab].

        One matrix of a token mixer spans `chunk` tokens; with chunk ≥ length it is the published
        form, whose time and memory grow with length² (paper eq. 1-4).
        """
        x = self.input_layer(ids)
        places = Places(slice(ids.shape[1]), chunk=chunk)
        if self.separator is not None:
            places = split_documents(ids == self.separator, chunk)
        places.run = self.run_unit
        placed = self._place_units(places, x, ids.shape[1])
        for block, units in zip(self.mixer_blocks, placed, strict=True):
            x, _ = self.run_block(block, x, places, None, units)
        return F.linear(x, self.output_layer.weight)

    def _place_units(self, places: Places, x: Tensor, length: int) -> Sequence[list[Unit] | None]:
        """Place the units of all blocks at once, which takes a GPU half the launches, as
        `place_units` does; None where blocks are sharded: each has its scalars only while it
        runs."""
        if isinstance(self.mixer_blocks[0], FSDPModule):
            return [None] * len(self.mixer_blocks)
        mixers = [cast(Block, block).token_mixing_layer for block in self.mixer_blocks]
        is_narrow = self.config.use_projections and torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if is_narrow else x.dtype
        if not length:  # a step is computed as its state is kept
            dtype = torch.promote_types(dtype, torch.float32)
        return place_units(stacked_units(mixers), places, length, dtype)

    def step(self, ids: Tensor, state: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Feed one token per sequence: ids int64 [batch], all at `position` 0 … n_ctx - 1.

        state [layers, units, batch, d], zeros before position 0. Returns logits [batch, vocab] and
        the new state.
        """
        x, ends = self.input_layer(ids[:, None]), []
        places = Places(slice(position, position + 1))
        placed = self._place_units(places, x, 0)
        for block, before, units in zip(self.mixer_blocks, state, placed, strict=True):
            x, after = block(x, places, before, units)
            ends.append(after)
        return self.output_layer(x[:, 0]), torch.stack(ends)

    def empty_state(self, batch: int) -> Tensor:
        """Return the state before the first token: zeros [layers, units, batch, d], dtype and
        device of the parameters."""
        config = self.config
        return self.output_layer.weight.new_zeros(
            config.num_layers, config.units_per_layer, batch, config.d_model
        )
