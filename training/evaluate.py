"""`srm evaluate`: greedy accuracy and pass@k on held-out problems, sampled by the engine."""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
from tokenizers import Tokenizer

from engine.config import DEMO_MODEL, EngineConfig
from engine.device.runner import ModelRunner
from engine.messages import Output, SamplingParams
from engine.process.engine import Engine
from engine.weights.checkpoint import load_checkpoint
from training.checkpoint import read_tokenizer
from training.problems.drawn import problems
from training.problems.problem import Problem, reward
from training.settings import check_numbers
from training.statistics.coverage import pass_at_k

COMPLETION_TOKENS = 96
"""Greater than the length of any solution."""
KS = (1, 10, 100, 1_000, 10_000)
"""The values of k for pass@k, up to the number of samples."""


class EvaluateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm evaluate`."""

    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json."""
    problems: int = 200
    """Held-out problems to solve."""
    samples: int = 1_000
    """Completions of each problem, besides the greedy one; the largest k of pass@k."""
    temperature: float = 1.0
    """Of the samples; the greedy completion has none."""
    seed: int = 0
    """Of the problems and of the sampling."""

    def __post_init__(self) -> None:
        check_numbers(self, {"problems": 1, "samples": 1, "temperature": 0})


class Evaluation(msgspec.Struct, frozen=True):
    """The result of `srm evaluate`; written as JSON."""

    model: str
    fingerprint: str
    problems: int
    samples: int
    temperature: float
    greedy: float
    pass_at: dict[str, float]
    """pass@k by k."""
    pass_at_1_by_kind: dict[str, float]
    generated_tokens: int
    seconds: float


def evaluate(config: EvaluateConfig) -> Evaluation:
    """Sample every held-out problem `samples` times, and once greedily."""
    weights = load_checkpoint(config.model)
    tokenizer = read_tokenizer(config.model / "tokenizer.json")
    engine_config = EngineConfig(model=config.model)
    engine = Engine(weights.config, ModelRunner(weights, engine_config), engine_config)
    drawn = list(islice(problems("held-out", config.seed), config.problems))
    prompts = [tokenizer.encode(problem.prompt).ids for problem in drawn]

    greedily = SamplingParams(max_tokens=COMPLETION_TOKENS, temperature=0.0)
    greedy = engine.generate(prompts, greedily)
    started, wanted = time.monotonic(), {"n": config.samples, "seed": config.seed}
    drawing = msgspec.structs.replace(greedily, temperature=config.temperature, **wanted)
    sampled = engine.generate(prompts, drawing)
    seconds = time.monotonic() - started

    right = count_right(tokenizer, drawn, sampled)
    rates: dict[str, list[float]] = {}
    for problem, count in sorted(zip(drawn, right, strict=True), key=lambda one: one[0].kind):
        rates.setdefault(problem.kind, []).append(count / config.samples)
    return Evaluation(
        model=config.model.name,
        fingerprint=weights.fingerprint,
        problems=config.problems,
        samples=config.samples,
        temperature=config.temperature,
        greedy=sum(count_right(tokenizer, drawn, greedy)) / len(drawn),
        pass_at={
            str(k): float(np.mean([pass_at_k(config.samples, c, k) for c in right]))
            for k in KS
            if k <= config.samples
        },
        pass_at_1_by_kind={kind: float(np.mean(found)) for kind, found in rates.items()},
        generated_tokens=sum(len(o.token_ids) // 4 for outputs in sampled for o in outputs),
        seconds=seconds,
    )


def count_right(
    tokenizer: Tokenizer, drawn: list[Problem], outputs: list[list[Output]]
) -> list[int]:
    """Count the right completions of each problem."""
    counts = []
    for problem, samples in zip(drawn, outputs, strict=True):
        ids = [np.frombuffer(output.token_ids, "<i4").tolist() for output in samples]
        texts = tokenizer.decode_batch(ids, skip_special_tokens=True)
        counts.append(int(sum(reward(problem, text) for text in texts)))
    return counts
