"""A Llama of random weights as transformers saves it.

The task: `shape`, `output` (the folder). The tokenizer is copied beside it by others.
"""

from __future__ import annotations

import torch
import transformers

from research.bench.peers.programs.timing import read_task

task = read_task()
torch.manual_seed(0)
shape = task["shape"]
width = shape["d_model"]
config = transformers.LlamaConfig(
    hidden_size=width,
    num_hidden_layers=shape["num_layers"],
    vocab_size=shape["vocab_size"],
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=2,
    tie_word_embeddings=False,
    intermediate_size=4 * width,
    num_attention_heads=shape["num_heads"],
    max_position_embeddings=shape["n_ctx"],
    rms_norm_eps=1e-5,
)
transformers.LlamaForCausalLM(config).save_pretrained(task["output"])
