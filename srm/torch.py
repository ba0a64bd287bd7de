"""An SRM's token mixer as a layer of any model of torch.

It is called as the layers of flash-linear-attention are, and keeps its state in their caches:
https://github.com/fla-org/flash-linear-attention/blob/main/fla/layers/gla.py
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from srm.engine.config import ModelConfig
from srm.training.huggingface.mixers_srm import TokenMixer
from srm.training.huggingface.units_srm import CHUNK, Places, Units, split_documents


class MixerCache(list[dict[str, Any]]):
    """States of layers, by `layer_idx`. `FLACache` of flash-linear-attention stands in for it."""

    def update(self, *, layer_idx: int, offset: int, **state: Any) -> MixerCache:  # noqa: ARG002
        """Set a layer's state."""
        self += [{} for _ in range(layer_idx + 1 - len(self))]
        self[layer_idx] = state
        return self


class MixerLayer(TokenMixer):
    """y_t = α · Σ_{s≤t} λ^(t-s) · x_s + β in each head (paper eq. 1-4), between two projections.

    A call without a cache is parallel. One of several tokens works in chunks, and one of a token
    after a cache's state is a step of the recurrence. All give the same y.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int = 4,
        n_ctx: int = 2048,
        *,
        chunk_size: int = CHUNK,
        layer_idx: int = 0,
        **variant: Any,
    ) -> None:
        """`hidden_size` is d_model. α and β belong to positions, of which there are `n_ctx`.
        `variant` are `mixer`, `use_projections`, `decay`, `decay_constant` and `kernel_size` of a
        model's `config.json`. Each layer of a model needs a `layer_idx` of its own.

        Tokens that one matrix spans are `chunk_size`, at least 2; from the sequence's length on it
        is the parallel form, whose memory grows with the square. Raises ValueError.
        """
        if chunk_size < 2:
            raise ValueError(f"chunk_size must be at least 2, got {chunk_size}")
        shape = {"d_model": hidden_size, "num_heads": num_heads, "n_ctx": n_ctx}
        shape |= {"num_layers": 1, "vocab_size": 2}
        super().__init__(msgspec.convert({**shape, **variant}, ModelConfig))
        self.chunk_size, self.layer_idx = chunk_size, layer_idx

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, None, Any]:
        """Mix [rows, length, hidden_size]; return it, no attentions, and the cache.

        `attention_mask`, whose last `length` columns are read, is 0 at padding, where y is 0.
        `cu_seqlens` i[sequences + 1] are the ends of sequences packed in one row, from 0 on.
        `past_key_values` begins empty; after a call with `use_cache` it has the states f32[rows,
        units, hidden_size] and numbers of tokens i64[rows] of this layer. Raises ValueError for
        what does not go together, and where a sequence would have more than `n_ctx` tokens.
        """
        rows, length, _ = hidden_states.shape
        if not rows or not length:
            raise ValueError(f"hidden_states must have a token, got {list(hidden_states.shape)}")
        if output_attentions:
            raise ValueError("output_attentions must be false: a recurrence has no attentions")
        if use_cache and past_key_values is None:
            raise ValueError("past_key_values must be a cache where use_cache is true")
        if cu_seqlens is not None:
            if attention_mask is not None or past_key_values is not None or rows != 1:
                raise ValueError("cu_seqlens must stand without mask and cache, with one row")
            y, _ = super().forward(hidden_states, self._packed(cu_seqlens, length))
            return y, None, past_key_values
        order = None
        lengths = torch.full((rows,), length, device=hidden_states.device)
        if attention_mask is not None:
            got = [*attention_mask.shape]
            if len(got) != 2 or got[0] != rows or got[1] < length:
                raise ValueError(f"attention_mask must be [{rows}, {length}], got {got}")
            mask = attention_mask[:, -length:].bool()
            lengths = mask.sum(1)
            order = (
                (~mask)
                .to(torch.int8)
                .argsort(dim=1, stable=True)[..., None]
                .expand_as(hidden_states)
            )
            hidden_states = hidden_states.where(mask[..., None], 0)
            hidden_states = hidden_states.gather(1, order)  # tokens first, then padding
        before, positions = None, torch.zeros_like(lengths)
        state = None
        if past_key_values is not None and len(past_key_values) > self.layer_idx:
            state = past_key_values[self.layer_idx].get("recurrent_state")
        if has_state := state is not None:
            before, positions = state
            if len(before) != rows:
                raise ValueError(f"the cache has {len(before)} rows, hidden_states {rows}")
            before = before.transpose(0, 1)
        elif use_cache:
            shape = self.config.units_per_layer, rows, self.config.d_model
            before = hidden_states.new_zeros(shape, dtype=torch.float32)
        ends = positions + lengths
        self._check_length(int(ends.max()) if has_state or order is not None else length)
        columns = torch.arange(length, device=hidden_states.device)
        inside = (positions[:, None] + columns).clamp(max=self.config.n_ctx - 1)
        is_simple = not has_state and order is None
        places = Places(slice(length) if is_simple else inside, chunk=self.chunk_size)
        if order is not None:
            places.lengths = lengths
        y, states = super().forward(hidden_states, places, before)
        if order is not None:
            y = y * (columns < lengths[:, None])[..., None]
            y = torch.zeros_like(y).scatter(1, order, y)
        if use_cache and states is not None:
            state = states.transpose(0, 1), ends
            past_key_values.update(recurrent_state=state, layer_idx=self.layer_idx, offset=length)
        return y, None, past_key_values

    def mix(self, x: Tensor, units: Units) -> Tensor:
        """Mix projected x [rows, length, H, e], in float32 at least, under autocast too."""
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            return super().mix(wide, units).to(x.dtype)

    def _packed(self, cu_seqlens: Tensor, length: int) -> Places:
        if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
            raise ValueError(f"cu_seqlens must be two integers or more, got {cu_seqlens.tolist()}")
        sizes = torch.diff(cu_seqlens)
        if int(cu_seqlens[0]) or int(cu_seqlens[-1]) != length or (sizes < 0).any():
            raise ValueError(f"cu_seqlens must rise from 0 to {length}, got {cu_seqlens.tolist()}")
        self._check_length(int(sizes.max()))
        is_first = torch.zeros(1, length, dtype=torch.bool, device=cu_seqlens.device)
        is_first[0, cu_seqlens[:-1][sizes > 0].long()] = True
        return split_documents(is_first, self.chunk_size)

    def _check_length(self, length: int) -> None:
        if length > (n_ctx := self.config.n_ctx):
            raise ValueError(f"a sequence must have at most n_ctx = {n_ctx} tokens, got {length}")
