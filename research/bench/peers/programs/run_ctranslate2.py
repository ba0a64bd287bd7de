"""CTranslate2's generator, with all prompts in one batch. It knows tokens by their text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ctranslate2

from research.bench.peers.programs.timing import Prompts, measure, read_task

task = read_task()
generator = ctranslate2.Generator(
    task["model"],
    device="cpu",
    compute_type=task["dtype"],
    inter_threads=1,
    intra_threads=task["threads"],
)
names = json.loads((Path(task["model"]) / "vocabulary.json").read_text())


def prepare(prompts: Prompts) -> Callable[[int], int]:
    texts = [[names[token] for token in prompt] for prompt in prompts]

    def generate(num_tokens: int) -> int:
        generated = generator.generate_batch(
            texts,
            max_batch_size=0,
            min_length=num_tokens,
            max_length=num_tokens,
            sampling_topk=1,
            beam_size=1,
            include_prompt_in_result=False,
            end_token=[],
        )
        return sum(len(generation.sequences_ids[0]) for generation in generated)

    return generate


measure(task, prepare)
