"""`srm bench prefix`: the time that kept states save for prompts that share a header.

The same prompts, a few hundred tokens of header and a question each, are completed without the
prefix cache, with an empty one, and once more with what that left in it. The record has the time of
each, the prompt tokens fed, and whether every completion was the same.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from bench.frame import Record, Settings, run, table
from engine.config import DEMO_MODEL, EngineConfig, ModelConfig
from engine.device.runner import ModelRunner
from engine.messages import SamplingParams
from engine.process.engine import Engine
from engine.weights.checkpoint import load_checkpoint

QUESTION_TOKENS = (8, 32)
"""Fewest and most tokens of a question."""


class PrefixBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench prefix`."""

    model: Path = DEMO_MODEL
    """Checkpoint to measure; its shape matters, its weights hardly."""
    prompts: int = 1_000
    """Number of prompts, each with a question of its own behind the header."""
    header_tokens: int = 400
    """Number of tokens that all prompts begin with."""
    max_tokens: int = 16
    """Number of tokens sampled for each prompt."""
    repetitions: int = 3
    """Measurements of each figure; the median is reported, the record has all."""


def main(argv: list[str]) -> int:
    """Measure, write a record and its plot, print its table."""
    return run(PrefixBenchConfig, argv, "prefix", measure, markdown, stem="prefix-reuse")


def measure(config: PrefixBenchConfig) -> Record:
    """Return the runs, and whether all completions were the same."""
    weights = load_checkpoint(config.model)
    kept = EngineConfig(prefix_slots=2 * config.prompts + 1)
    fed = msgspec.structs.replace(kept, prefix_cache=False)
    runner = ModelRunner(weights, kept)
    params = SamplingParams(max_tokens=config.max_tokens, ignore_eos=True)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in ("off", "empty", "filled")}
    is_same = True
    _run(Engine(weights.config, runner, fed), _prompts(config, weights.config, 0)[:50], params)
    for repetition in range(config.repetitions):
        prompts = _prompts(config, weights.config, repetition)
        off, on = (Engine(weights.config, runner, one) for one in (fed, kept))
        found = [_run(engine, prompts, params) for engine in (off, on, on)]
        is_same &= len({completions for completions, _ in found}) == 1
        for name, (_, figures) in zip(runs, found, strict=True):
            runs[name].append(figures)
    runner.close()
    model = msgspec.to_builtins(weights.config)
    return {"model": model, "same_completions": is_same, "runs": runs}


def _prompts(config: PrefixBenchConfig, model: ModelConfig, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    header = rng.integers(0, model.vocab_size, config.header_tokens).tolist()
    lengths = rng.integers(*QUESTION_TOKENS, config.prompts, endpoint=True).tolist()
    return [header + rng.integers(0, model.vocab_size, length).tolist() for length in lengths]


def _run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams
) -> tuple[tuple[bytes, ...], dict[str, Any]]:
    """Complete the prompts; return the sampled tokens, and the figures."""
    steps, started = engine.num_steps, time.perf_counter()
    outputs = [output for (output,) in engine.generate(prompts, params)]
    seconds = time.perf_counter() - started
    fed = sum(len(prompt) - 1 for prompt in prompts) - sum(one.cached_tokens for one in outputs)
    figures = {"seconds": seconds, "prefilled_tokens": fed, "steps": engine.num_steps - steps}
    return tuple(output.token_ids for output in outputs), figures


def markdown(record: Record) -> list[str]:
    """Render the record as a table."""
    settings = record["settings"]
    same = "All completions are" if record["same_completions"] else "NOT all completions are"
    middle = {
        name: {figure: median(run[figure] for run in runs) for figure in runs[0]}
        for name, runs in record["runs"].items()
    }
    names = {"off": "off", "empty": "none at first", "filled": "those of the same prompts"}
    return [
        f"{settings['prompts']} prompts of a header of {settings['header_tokens']} tokens and a "
        f"question, {settings['max_tokens']} tokens sampled for each. {same} the same in all "
        "three. Figures are medians; raw numbers are in the JSON file.",
        "",
        *table(
            "kept states | seconds | prompt tokens fed | steps | times as fast",
            (
                f"{names[name]} | {figures['seconds']:.2f} | {figures['prefilled_tokens']:,.0f} "
                f"| {figures['steps']:,.0f} | {middle['off']['seconds'] / figures['seconds']:.1f}"
                for name, figures in middle.items()
            ),
        ),
    ]
