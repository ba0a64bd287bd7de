"""A checkpoint of random weights for the `rwkv` package: an RWKV-7.

The task: `shape`, `output` (the .pth file). Heads of 64, low ranks of 64.
"""

from __future__ import annotations

import torch

from research.bench.peers.programs.timing import read_task

HEAD, RANK = 64, 64


def _random(*shape: int) -> torch.Tensor:
    return 0.02 * torch.randn(*shape)


def _norm(name: str, width: int) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}


task = read_task()
torch.manual_seed(0)
shape = task["shape"]
width, vocab_size = shape["d_model"], shape["vocab_size"]
tensors = {"emb.weight": _random(vocab_size, width), "head.weight": _random(vocab_size, width)}
tensors |= _norm("ln_out", width)
for layer in range(shape["num_layers"]):
    block = f"blocks.{layer}"
    norms = ("ln1", "ln2", "att.ln_x", *(("ln0",) if layer == 0 else ()))
    for name in norms:
        tensors |= _norm(f"{block}.{name}", width)
    vectors = ("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "w0", "a0", "v0", "k_k", "k_a")
    for name in vectors:
        tensors[f"{block}.att.{name}"] = _random(1, 1, width)
    for name in "wavg":
        tensors[f"{block}.att.{name}1"] = _random(width, RANK)
        tensors[f"{block}.att.{name}2"] = _random(RANK, width)
    tensors[f"{block}.att.r_k"] = _random(width // HEAD, HEAD)
    for name in ("receptance", "key", "value", "output"):
        tensors[f"{block}.att.{name}.weight"] = _random(width, width)
    tensors[f"{block}.ffn.x_k"] = _random(1, 1, width)
    tensors[f"{block}.ffn.key.weight"] = _random(4 * width, width)
    tensors[f"{block}.ffn.value.weight"] = _random(width, 4 * width)
torch.save(tensors, task["output"])
