"""`srm bench samples`: very many samples of one prompt, in one request, and their pass@k.

Every prompt must be fed once, whatever `samples` is; otherwise the benchmark stops. Time is that of
the engine, from the request to its last sample; texts and rewards come after.
"""

from __future__ import annotations

import resource
import time
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import msgspec
from prometheus_client import REGISTRY
from tokenizers import Tokenizer

from bench.frame import Record, Settings, run, table
from engine.config import DEMO_MODEL, EngineConfig
from engine.device.runner import ModelRunner
from engine.device.state_pool import slot_bytes
from engine.messages import SamplingParams
from engine.process.engine import Engine
from engine.settings import build
from engine.weights.checkpoint import load_checkpoint
from training.evaluate import COMPLETION_TOKENS, KS, count_right, load_tokenizer, pass_at_k
from training.tasks import Problem, problems


class SamplesBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench samples`."""

    model: Path = DEMO_MODEL
    """Folder with config.json, model.safetensors and tokenizer.json."""
    device: Literal["cpu", "gpu"] = "cpu"
    """What the model runs on: the processor, or the first GPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Weights and activations; auto is float32 on a processor, bfloat16 (all there is) on a GPU."""
    problems: int = 4
    """Held-out problems, each a request of its own, one after the other."""
    samples: int = 100_000
    """Completions asked for in each request."""
    seed: int = 0
    """Of the problems and of the sampling."""


def main(argv: list[str]) -> int:
    """Measure, write a record and its plot, print its table."""
    return run(SamplesBenchConfig, argv, "samples", measure, markdown)


def measure(config: SamplesBenchConfig) -> Record:
    """Return the run of each problem, and the process's memory."""
    served = {name: getattr(config, name) for name in ("model", "device", "dtype")}
    settings = build(EngineConfig, served | {"max_waiting": max(config.samples, 100_000)})
    weights, tokenizer = load_checkpoint(config.model), load_tokenizer(config.model)
    runner = ModelRunner(weights, settings)
    drawn = list(islice(problems("held-out", config.seed), config.problems))
    warm = SamplingParams(n=runner.num_slots, max_tokens=2)  # every page of the pool is touched
    Engine(weights.config, runner, settings).generate([[weights.config.bos_token_id]], warm)
    loaded_bytes, runs = most_memory(), []
    for number, problem in enumerate(drawn):
        engine = Engine(weights.config, runner, settings)  # with an empty cache
        runs.append(sample(engine, tokenizer, problem, config.samples, config.seed + number))
    runner.close()
    return {
        "model": msgspec.to_builtins(weights.config),
        "fingerprint": weights.fingerprint,
        "dtype": settings.compute_dtype,
        "num_slots": runner.num_slots,
        "pool_bytes": (runner.num_slots + settings.prefix_slots) * slot_bytes(weights.config),
        "most_memory_before_bytes": loaded_bytes,
        "most_memory_bytes": most_memory(),
        "runs": runs,
    }


def sample(
    engine: Engine, tokenizer: Tokenizer, problem: Problem, samples: int, seed: int
) -> dict[str, Any]:
    """Measure a request for so many completions; its prompt must be new to `engine`."""
    prompt = tokenizer.encode(problem.prompt).ids
    params = SamplingParams(max_tokens=COMPLETION_TOKENS, n=samples, temperature=1.0, seed=seed)
    fed, steps, started = _prefilled(), engine.num_steps, time.perf_counter()
    (outputs,) = engine.generate([prompt], params)
    seconds = time.perf_counter() - started
    prefilled = _prefilled() - fed
    # The last token of a prompt is fed with each sample.
    assert prefilled == len(prompt) - 1, f"{prefilled} of {len(prompt)} tokens were prefilled"
    (right,) = count_right(tokenizer, [problem], [outputs])
    tokens = sum(len(output.token_ids) // 4 for output in outputs)
    return {
        "kind": problem.kind,
        "question": problem.question,
        "prompt_tokens": len(prompt),
        "prefilled_tokens": prefilled,
        "steps": engine.num_steps - steps,
        "generated_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "samples": len(outputs),
        "distinct": len({output.token_ids for output in outputs}),
        "right": right,
        "pass_at": {str(k): pass_at_k(samples, right, k) for k in KS if k <= samples},
    }


def _prefilled() -> int:
    """Return the prompt tokens that all engines of this process have fed so far."""
    return int(REGISTRY.get_sample_value("srm_engine_prefill_tokens_total") or 0)


def most_memory() -> int:
    """Return the peak memory of this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # Linux counts in KiB


def markdown(record: Record) -> list[str]:
    """Render the record as two tables."""
    runs = record["runs"]
    ks = list(runs[0]["pass_at"])
    names = ("pool_bytes", "most_memory_bytes", "most_memory_before_bytes")
    pool, most, before = (f"{record[name] / 1e9:.2f} GB" for name in names)
    means = [f"{mean(run['pass_at'][k] for run in runs):.4f}" for k in ks]
    return [
        f"{runs[0]['samples']:,} samples of each problem in one request, temperature 1, "
        f"{record['dtype']}, {record['num_slots']:,} slots in a pool of {pool}. The process had "
        f"{most} at most, {before} before the first request.",
        "",
        *table(
            "problem | prompt tokens | prefilled | seconds | tokens | tok/s | distinct samples",
            (
                f"{number}. {run['kind']} | {run['prompt_tokens']} | {run['prefilled_tokens']} "
                f"| {run['seconds']:.1f} | {run['generated_tokens']:,} "
                f"| {run['tokens_per_s']:,.0f} | {run['distinct']:,}"
                for number, run in enumerate(runs, 1)
            ),
        ),
        "",
        *table(
            " | ".join(["problem", "right", *(f"pass@{int(k):,}" for k in ks)]),
            [
                f"{number}. {run['kind']} | {run['right']:,} | "
                + " | ".join(f"{run['pass_at'][k]:.4f}" for k in ks)
                for number, run in enumerate(runs, 1)
            ]
            + [" | ".join(["mean", f"{mean(run['right'] for run in runs):,.0f}", *means])],
        ),
    ]
