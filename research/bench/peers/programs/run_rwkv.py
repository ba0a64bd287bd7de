"""The `rwkv` package of RWKV's authors, on an RWKV-7; its API runs one sequence at a time."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from research.bench.peers.programs.timing import Prompts, measure, read_task

os.environ |= {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0"}  # read when imported

from rwkv.model import RWKV

task = read_task()
torch.set_num_threads(task["threads"])
narrow = {"float32": "fp32", "bfloat16": "bf16"}[task["dtype"]]
model = RWKV(model=task["model"].removesuffix(".pth"), strategy=f"cpu {narrow}")


def complete(prompt: list[int], num_tokens: int) -> int:
    logits, state = model.forward(prompt, None)
    for _ in range(num_tokens - 1):
        logits, state = model.forward([int(logits.argmax())], state)
    return num_tokens


def prepare(prompts: Prompts) -> Callable[[int], int]:
    def generate(num_tokens: int) -> int:
        with torch.inference_mode():
            return sum(complete(prompt, num_tokens) for prompt in prompts)

    return generate


measure(task, prepare)
