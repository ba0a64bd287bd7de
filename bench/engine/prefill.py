"""`srm bench prefill`: prompt tokens a second, next to decoded tokens a second.

Measures prefill by the length of the prompt, for one prompt and for as many as fill a step, as a
fraction of the GEMM peak; a prompt's token does not pass the output head, so its operations are not
counted. Next to it is the engine's decode rate with as many rows as there are tokens.

Then it times one prompt, from the request to its first sampled token, in three ways: through the
engine, which prefills all but the last token at once; token by token as decode rows, head and
sampling included, which is how a recurrence without a parallel form reads; and token by token as
prefill rows, which need no head. The last two are handmade steps of the same graph, launched ahead,
so their time includes no scheduling; the first does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench.engine.batches import decode_rows, prefill_rows
from bench.engine.counts import prefill_bytes
from bench.engine.decode import measure_decode, random_tokens, seconds_per_step, settings_for
from bench.engine.models import BenchConfig, check_sizes, measure_models
from bench.peaks.rates import byte_cells, peak_line, peak_tables, rate_cells, share
from bench.peaks.torch_side import plot_record
from engine.config import Dtype, ModelConfig
from engine.device.runner import ModelRunner
from engine.messages import SamplingParams
from engine.process.engine import Engine
from engine.records import write_record
from engine.settings import load
from engine.steps.batch import Batch
from engine.weights.checkpoint import load_checkpoint
from engine.weights.weights import Weights


class PrefillBenchConfig(BenchConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench prefill`."""

    prompt_lengths: tuple[int, ...] = (1, 4, 16, 64, 256, 512)
    """Tokens of a prompt; cut to the context of a model."""
    step_tokens: int = 2_048
    """Tokens of a step of many prompts."""
    prompt_tokens: int = 500
    """Length of the prompt that is also fed token by token; cut to the context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes("prompt_lengths", self.prompt_lengths)
        if self.step_tokens < max(self.prompt_lengths):
            raise ValueError(
                f"step_tokens must be at least the longest of prompt_lengths, got "
                f"{self.step_tokens}"
            )
        if self.prompt_tokens < 2:
            raise ValueError(f"prompt_tokens must be at least 2, got {self.prompt_tokens}")


def main(argv: list[str]) -> int:
    """Measure, write a record and its plot, print its tables."""
    config = load(PrefillBenchConfig, argv, prog="srm bench prefill")
    command = " ".join(["srm bench prefill", *argv])
    record = measure_models(config, command, lambda path: _measure_model(path, config))
    plot_record("prefill", write_record(record, "prefill", markdown(record), config.output))
    return 0


def _measure_model(path: Path, config: PrefillBenchConfig) -> dict[str, Any]:
    weights = load_checkpoint(path)
    return {
        "config": msgspec.to_builtins(weights.config),
        "flops_per_token": weights.config.flops_per_token,
        "prefill_flops_per_token": weights.config.prefill_flops_per_token,
        "runs": [
            {"dtype": dtype} | _measure_engine(weights, dtype, config) for dtype in config.dtypes
        ],
    }


def _measure_engine(weights: Weights, dtype: Dtype, config: PrefillBenchConfig) -> dict[str, Any]:
    model = weights.config
    runner = ModelRunner(weights, settings_for(config, dtype, config.step_tokens))
    lengths = sorted({min(length, model.n_ctx) for length in config.prompt_lengths})
    sizes = [(length, prompts) for length in lengths for prompts in _counts(length, config)]
    entry = {
        "prefill": [_measure_prefill(model, runner, dtype, *size, config) for size in sizes],
        "decode": [
            measure_decode(model, runner, tokens, config)
            for tokens in sorted({length * prompts for length, prompts in sizes})
        ],
        "prompt": _measure_prompt(model, runner, dtype, config),
    }
    runner.close()
    return entry


def _counts(length: int, config: PrefillBenchConfig) -> list[int]:
    """Return the numbers of prompts of that length in a step: one, and as many as fill it."""
    return sorted({1, config.step_tokens // length})


def _measure_prefill(
    model: ModelConfig,
    runner: ModelRunner,
    dtype: Dtype,
    length: int,
    prompts: int,
    config: PrefillBenchConfig,
) -> dict[str, Any]:
    """Measure prompt tokens a second of steps of whole prompts."""
    batch = prefill_rows(random_tokens(model, prompts, length))
    rates = [
        batch.num_tokens / seconds_per_step(runner, batch, config.seconds)
        for _ in range(config.repetitions)
    ]
    return {
        "prompt_tokens": length,
        "prompts": prompts,
        "bytes": prefill_bytes(model, dtype, batch.num_tokens, prompts),
        "tokens_per_s": median(rates),
        "raw": rates,
    }


def _measure_prompt(
    model: ModelConfig, runner: ModelRunner, dtype: Dtype, config: PrefillBenchConfig
) -> dict[str, Any]:
    """Measure seconds from one prompt to its first sampled token in three ways, in turns."""
    (prompt,) = random_tokens(model, 1, min(config.prompt_tokens, model.n_ctx))
    engine = Engine(model, runner, settings_for(config, dtype, config.step_tokens))
    last = [decode_rows(prompt[-1:], len(prompt) - 1)]
    by_decoding = [decode_rows(prompt[i : i + 1], i) for i in range(len(prompt) - 1)] + last
    by_prefilling = [prefill_rows(prompt[None, i : i + 1], i) for i in range(len(prompt) - 1)]
    ways: dict[str, Callable[[], object]] = {
        "engine_s": lambda: engine.generate([prompt.tolist()], SamplingParams(max_tokens=1)),
        "decode_rows_s": lambda: _run(runner, by_decoding),
        "prefill_rows_s": lambda: _run(runner, by_prefilling + last),
    }
    raw: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(config.repetitions):
        for way, run in ways.items():
            started = time.perf_counter()
            run()
            raw[way].append(time.perf_counter() - started)
    return {"prompt_tokens": len(prompt), "raw": raw} | {
        way: median(seconds) for way, seconds in raw.items()
    }


def _run(runner: ModelRunner, batches: list[Batch]) -> None:
    for launched in [runner.launch(batch) for batch in batches]:
        launched.wait()


def markdown(record: dict[str, Any]) -> str:
    """Render the record as tables."""
    runs = [(model, run) for model in record["models"] for run in model["runs"]]
    lines = [
        f"{peak_line(record)} Tokens a second are medians; raw "
        "numbers are in the JSON file. Prefill is steps of whole prompts, without the output head, "
        "which is not counted; decode is the whole engine with sampling at temperature 1, in a "
        "batch of as many sequences as the step of prompts has tokens.",
        "",
        "| model | dtype | prompt | prompts | tok/s | GFLOP/s | of the peak | GB/s "
        "| of the peak | decode of the GEMM peak |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(record, model, run, entry) for model, run in runs for entry in run["prefill"]),
        "",
        "One prompt, from the request to its first sampled token. *prefilled*: by the engine, all "
        "but the last token in one step. *by tokens*: the same step graph, a token a step, "
        "launched ahead by hand without a scheduler; as decode rows every step has the output head "
        "and samples, as prefill rows none but the last has.",
        "",
        "| model | dtype | prompt | prefilled | by tokens, decode rows | prefill rows "
        "| times as fast |",
        "|---|---|---|---|---|---|---|",
        *(_prompt_row(model, run) for model, run in runs),
        "",
        *peak_tables(record),
    ]
    return "\n".join(lines) + "\n"


def _row(
    record: dict[str, Any], model: dict[str, Any], run: dict[str, Any], entry: dict[str, Any]
) -> str:
    dtype, tokens = run["dtype"], entry["prompt_tokens"] * entry["prompts"]
    cells = rate_cells(record, dtype, entry["tokens_per_s"], model["prefill_flops_per_token"])
    (decode,) = (one for one in run["decode"] if one["batch_size"] == tokens)
    decoded = share(record, dtype, decode["tokens_per_s"], model["flops_per_token"])
    name = f"{model['name']} | {dtype} | {entry['prompt_tokens']} | {entry['prompts']}"
    moved = byte_cells(record, entry.get("bytes"), tokens / entry["tokens_per_s"])
    return f"| {name} | {cells} | {moved} | {decoded} |"


def _prompt_row(model: dict[str, Any], run: dict[str, Any]) -> str:
    prompt = run["prompt"]
    ways = ("engine_s", "decode_rows_s", "prefill_rows_s")
    engine, decode_s, prefill_s = (prompt[way] for way in ways)
    return (
        f"| {model['name']} | {run['dtype']} | {prompt['prompt_tokens']} | {engine * 1e3:.1f} ms "
        f"| {decode_s * 1e3:.0f} ms | {prefill_s * 1e3:.0f} ms "
        f"| {decode_s / engine:.1f}, {prefill_s / engine:.1f} |"
    )
