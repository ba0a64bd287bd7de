"""A model of random weights as transformers saves it: Llama, Mamba-1 or RWKV-4.

The task: `kind`, `shape`, `output` (the folder). The tokenizer is copied beside it by others.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from research.bench.peers.programs.timing import read_task

task = read_task()
torch.manual_seed(0)
shape = task["shape"]
width = shape["d_model"]
shared: dict[str, Any] = {
    "hidden_size": width,
    "num_hidden_layers": shape["num_layers"],
    "vocab_size": shape["vocab_size"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
model: Any
if task["kind"] == "llama":
    config = transformers.LlamaConfig(
        intermediate_size=4 * width,
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_heads"],
        max_position_embeddings=shape["n_ctx"],
        rms_norm_eps=1e-5,
        **shared,
    )
    model = transformers.LlamaForCausalLM(config)
elif task["kind"] == "mamba":
    model = transformers.MambaForCausalLM(transformers.MambaConfig(state_size=16, **shared))
else:
    config = transformers.RwkvConfig(
        attention_hidden_size=width,
        intermediate_size=4 * width,
        context_length=shape["n_ctx"],
        **shared,
    )
    model = transformers.RwkvForCausalLM(config)
model.save_pretrained(task["output"])
