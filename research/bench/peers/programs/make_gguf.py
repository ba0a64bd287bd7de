"""A GGUF file of random weights for llama.cpp: a Llama of float32, or a Mamba 2.

Large matrices of Mamba 2 are bfloat16, with which a prompt takes three quarters of the time.

The task: `shape`, `output` (the file), `tokenizer` (tokenizer.json, which goes into it).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from research.bench.peers.programs.timing import read_task

Tensors = dict[str, Any]

_SCALE = 0.02
_LARGE = 2**16
_RNG = np.random.default_rng(0)


def _random(*shape: int) -> Any:
    return _RNG.standard_normal(shape, np.float32) * np.float32(_SCALE)


def _describe(writer: Any, shape: dict[str, Any]) -> None:
    width, heads = shape["d_model"], shape["num_heads"]
    writer.add_name(f"random {shape['kind']} {width}")
    writer.add_context_length(shape["n_ctx"])
    writer.add_embedding_length(width)
    writer.add_block_count(shape["num_layers"])
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape["kind"] == "mamba2":
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(shape["kernel"])
        writer.add_ssm_inner_size(2 * width)
        writer.add_ssm_state_size(shape["state_size"])
        writer.add_ssm_time_step_rank(2 * width // shape["head_size"])
        writer.add_ssm_group_count(1)
        return
    writer.add_feed_forward_length(4 * width)
    writer.add_head_count(heads)
    writer.add_head_count_kv(heads)
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(10_000.0)


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


def _mamba(shape: dict[str, Any]) -> Tensors:
    width, inner = shape["d_model"], 2 * shape["d_model"]
    heads, mixed = inner // shape["head_size"], inner + 2 * shape["state_size"]
    return {
        "attn_norm.weight": np.ones(width, np.float32),
        "ssm_in.weight": _random(inner + mixed + heads, width),
        "ssm_conv1d.weight": _random(mixed, shape["kernel"]),
        "ssm_conv1d.bias": _random(mixed),
        "ssm_dt.bias": _random(heads),
        "ssm_a": -np.exp(_random(heads, 1)),
        "ssm_d": np.ones((heads, 1), np.float32),
        "ssm_norm.weight": np.ones((1, inner), np.float32),
        "ssm_out.weight": _random(width, inner),
    }


task = read_task()
shape = task["shape"]
writer = gguf.GGUFWriter(task["output"], shape["kind"])
_describe(writer, shape)
_add_tokenizer(writer, json.loads(Path(task["tokenizer"]).read_text()), shape["vocab_size"])
width, vocab_size = shape["d_model"], shape["vocab_size"]
tensors: Tensors = {
    "token_embd.weight": _random(vocab_size, width),
    "output_norm.weight": np.ones(width, np.float32),
    "output.weight": _random(vocab_size, width),
}
for layer in range(shape["num_layers"]):
    made = _mamba(shape) if shape["kind"] == "mamba2" else _llama(width)
    for name, values in made.items():
        tensors[f"blk.{layer}.{name}"] = values
for name, values in tensors.items():
    is_narrow = shape["kind"] == "mamba2" and values.size > _LARGE
    kind = gguf.GGMLQuantizationType.BF16 if is_narrow else gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
