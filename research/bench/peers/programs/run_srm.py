"""Our engine through its Python API, in one process: the prompts, or as many samples of one.

`one_prompt` in the task has all sequences be samples of the first prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from research.bench.peers.programs.timing import Prompts, measure, read_task
from srm import Engine, SamplingParams
from srm.engine.python.offline import GenerateProgress

task = read_task()
slots = max(task["concurrency"])
with Engine(task["model"], dtype=task["dtype"], num_slots=slots, max_waiting=2 * slots) as llm:

    def prepare(prompts: Prompts) -> Callable[[int], int]:
        def generate(num_tokens: int) -> int:
            n = len(prompts) if task["one_prompt"] else 1
            params = SamplingParams(
                n=n,
                max_tokens=num_tokens,
                temperature=1.0 if task["one_prompt"] else 0.0,
                ignore_eos=True,
            )
            most = 0

            def look(progress: GenerateProgress) -> None:
                nonlocal most
                most = max(most, progress.running)

            generated = llm.generate(prompts[:1] if n > 1 else prompts, params, on_progress=look)
            if n > 1 and num_tokens == task["output_tokens"] and most < n:
                raise SystemExit(f"{most} sequences at most ran of {n}")
            return sum(
                len(completion.token_ids) for each in generated for completion in each.completions
            )

        return generate

    measure(task, prepare)
