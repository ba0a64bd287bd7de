"""Our engine through its Python API, in one process."""

from __future__ import annotations

from collections.abc import Callable

from research.bench.peers.programs.timing import Prompts, measure, read_task
from srm import Engine, SamplingParams

task = read_task()
slots = max(task["concurrency"])
with Engine(task["model"], dtype=task["dtype"], num_slots=slots, max_waiting=2 * slots) as llm:

    def prepare(prompts: Prompts) -> Callable[[int], int]:
        def generate(num_tokens: int) -> int:
            params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
            generated = llm.generate(prompts, params)
            return sum(
                len(completion.token_ids) for each in generated for completion in each.completions
            )

        return generate

    measure(task, prepare)
