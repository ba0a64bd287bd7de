"""A tree of samples of vLLM by its cache of prefixes, beside independent samples.

Each child is a request whose prompt is all tokens up to its parent's last; a level is one batch.
"""

from __future__ import annotations

from vllm import LLM, SamplingParams

from research.bench.peers.programs.timing import measure_tree, random_prompts, read_task

BLOCK = 32
"""Tokens of a block of the cache, the fewest on a CPU; only whole blocks are found again."""


def run() -> None:
    """Measure; a function, for vLLM's processes import this file."""
    task = read_task()
    (prompt,) = random_prompts(task, 1)
    llm = LLM(
        task["model"],
        dtype=task["dtype"],
        max_model_len=task["shape"]["n_ctx"],
        max_num_seqs=max(task["concurrency"]),
        block_size=BLOCK,
        enforce_eager=True,
        enable_prefix_caching=True,
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": own} for own in prompts]
        return [
            list(reply.outputs[0].token_ids)
            for reply in llm.generate(asked, params, use_tqdm=False)
        ]

    def grow() -> int:
        level, tokens = [prompt], 0
        for _ in range(task["depth"]):
            level = [own for own in level for _ in range(2)]
            made = generate(level, task["node_tokens"])
            level = [[*own, *new] for own, new in zip(level, made, strict=True)]
            tokens += sum(map(len, made))
        return tokens

    measure_tree(
        task, grow, lambda count, tokens: sum(map(len, generate(count * [prompt], tokens)))
    )


if __name__ == "__main__":
    run()
