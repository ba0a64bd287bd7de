"""Writes a Transformer as a Llama's folder, which `transformers` and vLLM load."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from srm.training.baselines.transformer import (
    NORM_EPS,
    ROTATION_BASE,
    Transformer,
    TransformerBlock,
    TransformerShape,
)


def save_llama(
    model: Transformer, folder: Path, n_ctx: int, tokenizer: Tokenizer, ends: tuple[int, int]
) -> None:
    """Write config.json, model.safetensors and the tokenizer's files; `ends` are the begin and end
    tokens. Matrices stay float32."""
    shape = model.config
    assert isinstance(shape, TransformerShape)
    begin, end = ends
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_heads,
        "hidden_act": "silu",
        "max_position_embeddings": n_ctx,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROTATION_BASE,
        "tie_word_embeddings": False,
        "bos_token_id": begin,
        "eos_token_id": end,
        "torch_dtype": "float32",
    }
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.id_to_token(begin),
        "eos_token": tokenizer.id_to_token(end),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(words, indent=2))
    tensors = {name: tensor.detach().contiguous() for name, tensor in _tensors(model)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _tensors(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    yield "model.embed_tokens.weight", model.input_layer.weight
    for place, block in enumerate(model.mixer_blocks):
        assert isinstance(block, TransformerBlock)
        queries, keys, values = block.attention.queries_keys_values.weight.chunk(3)
        gate, up = block.gate_up.weight.chunk(2)
        for name, tensor in {
            "input_layernorm": block.token_norm.weight,
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "self_attn.o_proj": block.attention.out.weight,
            "post_attention_layernorm": block.channel_norm.weight,
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": block.down.weight,
        }.items():
            yield f"model.layers.{place}.{name}.weight", tensor
    assert isinstance(model.norm, nn.RMSNorm)
    yield "model.norm.weight", model.norm.weight
    yield "lm_head.weight", model.output_layer.weight
