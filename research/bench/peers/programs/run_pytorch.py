"""The model in plain PyTorch (`research/bench/model/recurrence.py`), as who wrote it would run it.

All sequences stand at one position; a prompt is fed token by token, as in the published code, and
its tokens but the last do not go through the output head.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from research.bench.model.recurrence import Recurrence
from research.bench.peers.programs.timing import Prompts, measure, read_task
from srm.training.checkpoint import load_model

task = read_task()
torch.set_num_threads(task["threads"])
model = Recurrence(load_model(Path(task["model"])), getattr(torch, task["dtype"]))
positions = torch.arange(task["shape"]["n_ctx"])[:, None]


def prepare(prompts: Prompts) -> Callable[[int], int]:
    ids = torch.tensor(prompts).T

    def generate(num_tokens: int) -> int:
        with torch.inference_mode():
            state = model.empty_state(len(prompts))
            for tokens, position in zip(ids[:-1], positions, strict=False):
                model.run_layers(tokens, state, position)
            tokens = ids[-1]
            for step in range(num_tokens):
                position = positions[len(ids) - 1 + step]
                tokens = model.logits(tokens, state, position).argmax(-1)
        return len(prompts) * num_tokens

    return generate


measure(task, prepare)
