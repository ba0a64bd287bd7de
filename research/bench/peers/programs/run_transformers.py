"""Hugging Face transformers: `generate` of all prompts at once, for any model that it loads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from research.bench.peers.programs.timing import Prompts, measure, read_task

task = read_task()
transformers.logging.set_verbosity_error()
torch.set_num_threads(task["threads"])
dtype = getattr(torch, task["dtype"])
model: Any = transformers.AutoModelForCausalLM.from_pretrained(task["model"], dtype=dtype)
model.eval()
model.generation_config.eos_token_id = None  # else it stops there
model.generation_config.pad_token_id = 0


def prepare(prompts: Prompts) -> Callable[[int], int]:
    ids = torch.tensor(prompts)
    mask = torch.ones_like(ids)

    def generate(num_tokens: int) -> int:
        with torch.inference_mode():
            generated = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                use_cache=True,
                min_new_tokens=num_tokens,
                max_new_tokens=num_tokens,
            )
        return int(generated[:, ids.shape[1] :].numel())

    return generate


measure(task, prepare)
