"""A Structured Recurrent Mixer for `transformers` 5.2 and newer: the model and its cache.

The files of this folder import torch, transformers and each other alone: `srm convert --to
transformers` puts them beside a checkpoint, where `trust_remote_code` runs them. Tensors are named
as in every checkpoint of this project. `training/model.py` has the same blocks.

Positions have weights of their own, so it matters where a sequence begins. Tokens that a mask or
`position_ids` place elsewhere are moved: each sequence becomes a row that begins at column 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from .configuration_srm import CACHE, SRMConfig
from .mixers_srm import Block, Linear, TokenMixer
from .units_srm import Places, Units


class SRMCache:
    """States of the sequences of a batch, each after as many tokens as it has been fed."""

    is_compileable = False
    is_linear = (True,)  # what transformers asks before it cuts inputs itself

    def __init__(self, states: Tensor) -> None:
        self.states = states  # [layers, units, batch, d], float32 or wider
        self.positions = torch.zeros(states.shape[2], dtype=torch.long, device=states.device)
        self.columns = 0
        """Columns of the inputs that were fed, padding included."""

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - transformers passes it
        return self.columns

    def batch_select_indices(self, indices: Tensor) -> None:
        """Have the rows of those numbers, in their order."""
        self.states = self.states.index_select(2, indices.to(self.states.device))
        self.positions = self.positions.index_select(0, indices.to(self.positions.device))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each row so many times, one behind the other."""
        rows = torch.arange(len(self.positions), device=self.positions.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))


@dataclass
class _Layout:
    """Where the tokens of a batch stand once each sequence is a row that begins at column 0."""

    is_token: Tensor  # bool[batch, n]
    is_first: Tensor  # bool[batch, n]: of its sequence, in this call
    row: Tensor  # i64[batch, n]
    column: Tensor  # i64[batch, n]; at padding, that of the last token before it
    lengths: Tensor  # i64[rows]

    def pack(self, x: Tensor) -> Tensor:
        """Move x [batch, n, d] to [rows, length, d]."""
        packed = x.new_zeros(len(self.lengths), int(self.lengths.max()), x.shape[-1])
        return packed.index_put(
            (self.row[self.is_token], self.column[self.is_token]), x[self.is_token]
        )

    def unpack(self, x: Tensor) -> Tensor:
        """Undo `pack`. Padding gets what the last token before it has, so that the next one is
        predicted across it."""
        return x[self.row, self.column]


def _layout(mask: Tensor | None, position_ids: Tensor | None, ids: Tensor) -> _Layout | None:
    """Return None where every row is one sequence without padding. Raises ValueError."""
    if mask is not None:
        if ((mask != 0) & (mask != 1)).any():
            raise ValueError(
                "attention_mask must be 0 or 1 for each token; say by position_ids where packed "
                "sequences begin"
            )
        mask = mask[:, -ids.shape[1] :].bool()
        mask = None if mask.all() else mask
    if mask is None and position_ids is None:
        return None
    is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    if not is_token.any():
        raise ValueError("attention_mask leaves no token")
    count = is_token.cumsum(1)
    is_first = is_token & (count == 1)
    if position_ids is None:
        row = torch.arange(len(ids), device=ids.device)[:, None].expand_as(ids)
        return _Layout(is_token, is_first, row, (count - 1).clamp(min=0), count[:, -1])
    is_first = is_first | (is_token & (position_ids == 0))
    total = is_token.flatten().cumsum(0)
    before = total[is_first.flatten()] - 1
    row = (is_first.flatten().cumsum(0) - 1).clamp(min=0)
    column = (total - 1 - before[row]).clamp(min=0)
    lengths = torch.diff(before, append=total[-1:])
    return _Layout(is_token, is_first, row.view_as(ids), column.view_as(ids), lengths)


class SRMTokenMixer(TokenMixer):
    """Runs its units in float32 at least, under autocast too, and its projections as modules."""

    def mix(self, x: Tensor, units: Units) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(torch.promote_types(x.dtype, torch.float32))
            return super().mix(wide, units).to(x.dtype)

    def _project(self, x: Tensor, projections: Sequence[Any]) -> Tensor:
        return torch.cat([project(x) for project in projections], dim=-1)


class SRMBlock(GradientCheckpointingLayer, Block):
    """A block whose activations need not be kept."""

    make_mixer = SRMTokenMixer


def _check_shapes(
    input_ids: Tensor, mask: Tensor | None, position_ids: Tensor | None, columns: int
) -> None:
    """Raise ValueError where the shapes of the inputs do not fit together."""
    batch, n = input_ids.shape
    if n == 0:
        raise ValueError("input_ids has no token that is new")
    if mask is not None and mask.shape not in {(batch, n), (batch, n + columns)}:
        raise ValueError(
            f"attention_mask must be [{batch}, {n + columns}], got {list(mask.shape)}; say by "
            "position_ids where packed sequences begin"
        )
    if position_ids is not None and position_ids.shape not in {(batch, n), (1, n)}:
        raise ValueError(f"position_ids must be [{batch}, {n}], got {list(position_ids.shape)}")


def _check_arguments(others: dict[str, Any]) -> None:
    """Raise ValueError for arguments that nothing here reads, unless they ask for nothing."""
    unread = [name for name, value in others.items() if value is not None and value is not False]
    if unread:
        raise ValueError(f"the model reads no {', '.join(unread)}")


class _Backbone:
    """The model without its output layer, as trainers call it; has no tensors of its own."""

    _tp_plan = _pp_plan = None

    def __init__(self, model: SRMForCausalLM) -> None:
        self.config = model.config
        self._model = model

    def __call__(self, input_ids: Tensor, **arguments: Any) -> BaseModelOutput:
        asked = {name: arguments.pop(name, None) for name in ("attention_mask", "position_ids")}
        _check_arguments(arguments)
        hidden, _ = self._model.run_blocks(input_ids, **asked)
        return BaseModelOutput(last_hidden_state=hidden)

    def get_input_embeddings(self) -> nn.Module:
        return self._model.input_layer


class SRMForCausalLM(PreTrainedModel, GenerationMixin):
    """ids -> embedding -> blocks -> logits. No final norm, tied weights or position encoding."""

    config_class = SRMConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _is_stateful = True  # a state cannot go back, as assisted generation would have it
    _no_split_modules = ["SRMBlock"]  # noqa: RUF012
    _keep_in_fp32_modules_strict = [  # noqa: RUF012 - in bfloat16 a λ of 0.999 is 1
        *("mixer_heads", "token_mixing_layer.weight", "token_mixing_layer.bias"),
        *("token_mixing_layer.decay_value", "token_mixing_layer.0", "token_mixing_layer.2"),
    ]

    def __init__(self, config: SRMConfig) -> None:
        super().__init__(config)
        self.input_layer = nn.Embedding(config.vocab_size, config.d_model)
        self.mixer_blocks = nn.ModuleList(SRMBlock(config) for _ in range(config.num_layers))
        self.output_layer: nn.Linear = Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: SRMCache | None = None,
        past_key_values: SRMCache | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Map ids [batch, n] to logits [batch, n, vocab]; with `use_cache`, states come with them.

        Sequences may be padded anywhere by `attention_mask`, or packed by `position_ids`, which
        begin at 0 with each. Raises ValueError for one longer than n_ctx.
        """
        _check_arguments(others)
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = self.empty_cache(len(input_ids))
        hidden, layout = self.run_blocks(input_ids, attention_mask, position_ids, cache)
        is_number = isinstance(logits_to_keep, int)
        logits = self.output_layer(
            hidden[:, -logits_to_keep:] if is_number else hidden[:, logits_to_keep]
        )
        loss = None
        if labels is not None:
            if layout is not None:  # nothing predicts a sequence's first token
                labels = labels.masked_fill(layout.is_first, -100)
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})

    def run_blocks(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: SRMCache | None = None,
    ) -> tuple[Tensor, _Layout | None]:
        """Return what the last block gives for each token, [batch, n, d], and where tokens are."""
        if cache is not None and not isinstance(cache, SRMCache):
            raise ValueError(f"{CACHE} must be an SRMCache, got a {type(cache).__name__}")
        _check_shapes(
            input_ids, attention_mask, position_ids, 0 if cache is None else cache.columns
        )
        if cache is None and position_ids is None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        if cache is not None and len(cache.positions) != len(input_ids):
            raise ValueError(
                f"{CACHE} is of {len(cache.positions)} sequences, input_ids of {len(input_ids)}: "
                "batch_repeat_interleave and batch_select_indices make them as many"
            )
        is_fresh = cache is None  # with a cache, a row of the batch is one sequence
        layout = _layout(attention_mask, position_ids if is_fresh else None, input_ids)
        first = None if cache is None else cache.positions
        if layout is not None and first is not None and ((layout.lengths == 0) & (first > 0)).any():
            raise ValueError(
                "attention_mask leaves a sequence of the cache no token in this call: its next one "
                "is predicted by its last one, which was in an earlier call"
            )
        lengths = None if layout is None else layout.lengths
        self._check_positions(position_ids, layout, first, input_ids.shape[1])
        x = self.input_layer(input_ids)
        x = x if layout is None else layout.pack(x)
        positions: slice | Tensor = slice(x.shape[1])
        if first is not None:  # beyond n_ctx is padding of a row
            columns = torch.arange(x.shape[1], device=x.device)
            positions = (first[:, None] + columns).clamp(max=self.config.n_ctx - 1)
        places, ends = Places(positions, lengths=lengths), []
        for number, block in enumerate(self.mixer_blocks):
            before = None if cache is None else cache.states[number]
            x, after = block(x, places, before)
            ends.append(after)
        if cache is not None:
            cache.states = torch.stack(ends)
            cache.positions = cache.positions + (x.shape[1] if lengths is None else lengths)
            cache.columns += input_ids.shape[1]
        return x if layout is None else layout.unpack(x), layout

    def _check_positions(
        self, position_ids: Tensor | None, layout: _Layout | None, first: Tensor | None, n: int
    ) -> None:
        """Raise ValueError for sequences that are too long, or not as position_ids count them."""
        longest = n if first is None else n + int(first.max())
        if layout is not None:
            longest = int((layout.lengths if first is None else layout.lengths + first).max())
        if longest > self.config.n_ctx:
            raise ValueError(
                f"a sequence of {longest} tokens is longer than n_ctx = {self.config.n_ctx}"
            )
        if position_ids is None:
            return
        own = torch.arange(n, device=position_ids.device)[None] if layout is None else layout.column
        own = own if first is None else own + first[:, None]
        differs = own != position_ids
        if (differs if layout is None else differs & layout.is_token).any():
            raise ValueError(
                "position_ids must count the tokens of each sequence from 0 on, or from where a "
                "cache is; packed sequences go without a cache"
            )

    def empty_cache(self, batch: int) -> SRMCache:
        """Return the states before the first token, of as many sequences."""
        config, weight = self.config, self.input_layer.weight
        shape = (config.num_layers, config.units_per_layer, batch, config.d_model)
        wide = torch.promote_types(weight.dtype, torch.float32)
        return SRMCache(torch.zeros(shape, dtype=wide, device=weight.device))

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,  # by this name transformers sees that there are more
    ) -> dict[str, Any]:
        """Return what `generate` calls the model with: of all tokens, those the cache has not."""
        cache = kwargs.get(CACHE)
        is_whole = attention_mask is None or attention_mask.shape[1] == input_ids.shape[1]
        if cache is not None and is_whole:
            input_ids = input_ids[:, cache.columns :]
        return {
            "input_ids": input_ids.contiguous(),
            "attention_mask": attention_mask,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
            CACHE: cache,
        }

    @property
    def base_model(self) -> _Backbone:
        return _Backbone(self)

    def get_decoder(self) -> _Backbone:
        return self.base_model

    def get_input_embeddings(self) -> nn.Module:
        return self.input_layer

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.input_layer = value

    def get_output_embeddings(self) -> nn.Module:
        return self.output_layer

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.output_layer = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _init_weights(self, module: nn.Module) -> None:
        """Give the first values, as the modules do themselves."""
        for name, parameter in module.named_parameters(recurse=False):
            if name == "decay_value":
                init.constant_(parameter, module.initial_decay)
            elif name == "bias":
                init.zeros_(parameter)
            elif isinstance(module, nn.LayerNorm):
                init.ones_(parameter)
            elif isinstance(module, nn.Linear):
                gain = getattr(module, "gain", 1.0)  # a head of another size is none of ours
                init.normal_(parameter, std=gain * module.in_features**-0.5)
            elif name == "weight" and not isinstance(module, nn.Embedding):
                init.constant_(parameter, module.initial_weight)
            else:
                init.normal_(parameter)


SRMConfig.register_for_auto_class()
SRMForCausalLM.register_for_auto_class("AutoModelForCausalLM")
if not __name__.startswith("transformers_modules."):  # imported, and not run from a checkpoint
    AutoConfig.register(SRMConfig.model_type, SRMConfig, exist_ok=True)
    AutoModelForCausalLM.register(SRMConfig, SRMForCausalLM, exist_ok=True)
