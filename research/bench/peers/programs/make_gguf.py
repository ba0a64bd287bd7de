"""A GGUF file of random weights for llama.cpp: Llama, Mamba-1, Mamba-2 or RWKV-7.

The task: `kind`, `shape`, `output` (the file), `tokenizer` (tokenizer.json, which goes into it).
All matrices are float32. Mamba-2 has the shape that the paper's authors give it: a state of
d_model / 2, 8 heads, one group; RWKV-7 heads of 64 and low ranks of 64.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from research.bench.peers.programs.timing import read_task

Tensors = dict[str, Any]

MAMBA_STATE, MAMBA_CONV = 16, 4
MAMBA2_HEADS = 8
RWKV_HEAD, RWKV_RANK = 64, 64
_SCALE = 0.02
_RNG = np.random.default_rng(0)


def _random(*shape: int) -> Any:
    return _RNG.standard_normal(shape, np.float32) * np.float32(_SCALE)


def _describe(writer: Any, kind: str, shape: dict[str, int]) -> None:
    width = shape["d_model"]
    writer.add_name(f"random {kind} {width}")
    writer.add_context_length(shape["n_ctx"])
    writer.add_embedding_length(width)
    writer.add_block_count(shape["num_layers"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if kind == "llama":
        heads = shape["num_heads"]
        writer.add_feed_forward_length(4 * width)
        writer.add_head_count(heads)
        writer.add_head_count_kv(heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(width // heads)
        writer.add_rope_freq_base(10_000.0)
    elif kind == "rwkv7":
        writer.add_feed_forward_length(4 * width)
        writer.add_head_count(0)
        writer.add_layer_norm_eps(1e-5)
        writer.add_wkv_head_size(RWKV_HEAD)
        writer.add_decay_lora_rank(RWKV_RANK)
        writer.add_iclr_lora_rank(RWKV_RANK)
        writer.add_value_residual_mix_lora_rank(RWKV_RANK)
        writer.add_gate_lora_rank(RWKV_RANK)
        writer.add_token_shift_count(2)
    else:
        is_second = kind == "mamba2"
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_ssm_conv_kernel(MAMBA_CONV)
        writer.add_ssm_inner_size(2 * width)
        writer.add_ssm_state_size(width // 2 if is_second else MAMBA_STATE)
        writer.add_ssm_time_step_rank(MAMBA2_HEADS if is_second else width // 16)
        if is_second:
            writer.add_ssm_group_count(1)
        else:
            writer.add_ssm_dt_b_c_rms(False)


def _add_tokenizer(writer: Any, tokenizer: Any, vocab_size: int) -> None:
    ids = tokenizer["model"]["vocab"]
    names = sorted(ids, key=ids.__getitem__)
    special = {
        added_token["id"] for added_token in tokenizer["added_tokens"] if added_token["special"]
    }
    kinds = gguf.TokenType
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types(
        [kinds.CONTROL if index in special else kinds.NORMAL for index in range(vocab_size)]
    )
    writer.add_token_merges(
        [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    )
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _llama(width: int) -> Tensors:
    projections = ("attn_q", "attn_k", "attn_v", "attn_output")
    return {
        **{f"{name}.weight": _random(width, width) for name in projections},
        "ffn_gate.weight": _random(4 * width, width),
        "ffn_up.weight": _random(4 * width, width),
        "ffn_down.weight": _random(width, 4 * width),
        "attn_norm.weight": np.ones(width, np.float32),
        "ffn_norm.weight": np.ones(width, np.float32),
    }


def _mamba(width: int) -> Tensors:
    inner, rank, state = 2 * width, width // 16, MAMBA_STATE
    return {
        "attn_norm.weight": np.ones(width, np.float32),
        "ssm_in.weight": _random(2 * inner, width),
        "ssm_conv1d.weight": 10 * _random(inner, MAMBA_CONV),
        "ssm_conv1d.bias": np.zeros(inner, np.float32),
        "ssm_x.weight": _random(rank + 2 * state, inner),
        "ssm_dt.weight": _random(inner, rank),
        "ssm_dt.bias": np.full(inner, -4, np.float32),
        "ssm_a": -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1)),
        "ssm_d": np.ones(inner, np.float32),
        "ssm_out.weight": _random(width, inner),
    }


def _mamba2(width: int) -> Tensors:
    inner, state, heads = 2 * width, width // 2, MAMBA2_HEADS
    mixed = inner + 2 * state
    return {
        "attn_norm.weight": np.ones(width, np.float32),
        "ssm_in.weight": _random(inner + mixed + heads, width),
        "ssm_conv1d.weight": 10 * _random(mixed, MAMBA_CONV),
        "ssm_conv1d.bias": np.zeros(mixed, np.float32),
        "ssm_dt.bias": np.full(heads, -4, np.float32),
        "ssm_a": -np.arange(1, heads + 1, dtype=np.float32).reshape(heads, 1),
        "ssm_d": np.ones((heads, 1), np.float32),
        "ssm_norm.weight": np.ones((1, inner), np.float32),
        "ssm_out.weight": _random(width, inner),
    }


def _rwkv7(width: int) -> Tensors:
    entries: Tensors = {}
    for name in ("attn_norm", "attn_norm_2", "time_mix_ln"):
        entries[f"{name}.weight"] = np.ones(width, np.float32)
        entries[f"{name}.bias"] = np.zeros(width, np.float32)
    for name in "wavg":
        if name != "g":
            entries[f"time_mix_{name}0.weight"] = _random(width)
        entries[f"time_mix_{name}1.weight"] = _random(RWKV_RANK, width)
        entries[f"time_mix_{name}2.weight"] = _random(width, RWKV_RANK)
    for name in ("k_k", "k_a", "r_k"):
        entries[f"time_mix_{name}.weight"] = _random(width)
    for name in ("key", "value", "receptance", "output"):
        entries[f"time_mix_{name}.weight"] = _random(width, width)
    return entries | {
        "time_mix_lerp_fused.weight": _random(6, 1, 1, width),
        "channel_mix_lerp_k.weight": _random(1, 1, width),
        "channel_mix_key.weight": _random(4 * width, width),
        "channel_mix_value.weight": _random(width, 4 * width),
    }


task = read_task()
shape, kind = task["shape"], task["kind"]
writer = gguf.GGUFWriter(task["output"], kind)
_describe(writer, kind, shape)
_add_tokenizer(writer, json.loads(Path(task["tokenizer"]).read_text()), shape["vocab_size"])
width, vocab_size = shape["d_model"], shape["vocab_size"]
tensors: Tensors = {
    "token_embd.weight": _random(vocab_size, width),
    "output_norm.weight": np.ones(width, np.float32),
    "output.weight": _random(vocab_size, width),
}
if kind == "rwkv7":
    tensors["output_norm.bias"] = np.zeros(width, np.float32)
    tensors["token_embd_norm.weight"] = np.ones(width, np.float32)
    tensors["token_embd_norm.bias"] = np.zeros(width, np.float32)
make = {"llama": _llama, "mamba": _mamba, "mamba2": _mamba2, "rwkv7": _rwkv7}[kind]
for layer in range(shape["num_layers"]):
    for name, values in make(width).items():
        tensors[f"blk.{layer}.{name}"] = values
for name, values in tensors.items():
    writer.add_tensor(name, values.astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
