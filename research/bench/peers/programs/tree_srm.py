"""A tree of samples of our engine through its Python API, beside independent samples."""

from __future__ import annotations

from research.bench.peers.programs.timing import measure_tree, random_prompts, read_task
from srm import Engine, SamplingParams, Tree

task = read_task()
(prompt,) = random_prompts(task, 1)
form = Tree(depth=task["depth"], node_tokens=task["node_tokens"])
sizes = {"num_slots": max(task["concurrency"]), "prefix_slots": 2**form.depth}
with Engine(task["model"], dtype=task["dtype"], max_waiting=1_000_000, **sizes) as llm:

    def grow() -> int:
        grown = llm.tree(prompt, form, SamplingParams(ignore_eos=True))
        return sum(len(node.token_ids) for node in grown)

    def sample(count: int, tokens: int) -> int:
        params = SamplingParams(n=count, max_tokens=tokens, ignore_eos=True)
        (made,) = llm.generate([prompt], params)
        return sum(len(completion.token_ids) for completion in made.completions)

    measure_tree(task, grow, sample)
