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

from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from research.bench.engine.counts import prefill_bytes
from research.bench.engine.decode import (
    decode_rows,
    in_turns,
    measure_decode,
    prefill_rows,
    random_tokens,
    seconds_per_step,
    settings_for,
)
from research.bench.engine.models import BenchConfig, measure_models
from research.bench.frame import Record, run, table
from research.bench.peaks.rates import (
    byte_cells,
    peak_line,
    peak_tables,
    rate_cells,
    runs_of,
    share,
)
from srm.engine.config import Dtype, ModelConfig
from srm.engine.device.runner import ModelRunner
from srm.engine.messages import SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.steps.batch import Batch
from srm.engine.weights.checkpoint import load_checkpoint
from srm.engine.weights.weights import Weights


class PrefillBenchConfig(BenchConfig, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench prefill`."""

    prompt_lengths: tuple[int, ...] = (1, 4, 16, 64, 256, 512)
    """Prompt lengths in tokens, cut to the model's context."""
    step_tokens: int = 2_048
    """Tokens in a step of many prompts."""
    prompt_tokens: int = 500
    """Length of the prompt that is also fed token by token, cut to the model's context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.step_tokens < max(self.prompt_lengths):
            raise ValueError(
                f"step_tokens must be at least the longest of prompt_lengths, got "
                f"{self.step_tokens}"
            )
        if self.prompt_tokens < 2:
            raise ValueError(f"prompt_tokens must be at least 2, got {self.prompt_tokens}")


def main(argv: list[str]) -> int:
    """Measure, write a record and its plot, print its tables."""
    return run(PrefillBenchConfig, argv, "prefill", measure, markdown)


def measure(config: PrefillBenchConfig) -> Record:
    """Return each model's rates, and the peaks."""
    return measure_models(config, lambda path: _measure_model(path, config))


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
    settings = settings_for(config, dtype, config.step_tokens)
    runner = ModelRunner(weights, settings, config.variants)
    lengths = sorted({min(length, model.n_ctx) for length in config.prompt_lengths})
    sizes = [  # one prompt, and as many as fill a step
        (length, prompts)
        for length in lengths
        for prompts in sorted({1, config.step_tokens // length})
    ]
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

    def launch(batches: list[Batch]) -> None:
        for launched in [runner.launch(batch) for batch in batches]:
            launched.wait()

    ways = {
        "engine_s": lambda: engine.generate([prompt.tolist()], SamplingParams(max_tokens=1)),
        "decode_rows_s": lambda: launch(by_decoding),
        "prefill_rows_s": lambda: launch(by_prefilling + last),
    }
    return {"prompt_tokens": len(prompt)} | in_turns(ways, config.repetitions)


def markdown(record: Record) -> list[str]:
    """Render the record as tables."""
    runs = runs_of(record)
    return [
        f"{peak_line(record)} Tokens a second are medians; raw "
        "numbers are in the JSON file. Prefill is steps of whole prompts, without the output head, "
        "which is not counted; decode is the whole engine with sampling at temperature 1, in a "
        "batch of as many sequences as the step of prompts has tokens.",
        "",
        *table(
            "model | dtype | prompt | prompts | tok/s | GFLOP/s | of the peak | GB/s "
            "| of the peak | decode of the GEMM peak",
            (_row(record, model, run, entry) for model, run in runs for entry in run["prefill"]),
        ),
        "",
        "One prompt, from the request to its first sampled token. *prefilled*: by the engine, all "
        "but the last token in one step. *by tokens*: the same step graph, a token a step, "
        "launched ahead by hand without a scheduler; as decode rows every step has the output head "
        "and samples, as prefill rows none but the last has.",
        "",
        *table(
            "model | dtype | prompt | prefilled | by tokens, decode rows | prefill rows "
            "| times as fast",
            (_prompt_row(model, run) for model, run in runs),
        ),
        "",
        *peak_tables(record),
    ]


def _row(record: Record, model: Record, run: Record, entry: Record) -> str:
    dtype, tokens = run["dtype"], entry["prompt_tokens"] * entry["prompts"]
    cells = rate_cells(record, dtype, entry["tokens_per_s"], model["prefill_flops_per_token"])
    (decode,) = (record for record in run["decode"] if record["batch_size"] == tokens)
    decoded = share(record, dtype, decode["tokens_per_s"], model["flops_per_token"])
    name = f"{model['name']} | {dtype} | {entry['prompt_tokens']} | {entry['prompts']}"
    moved = byte_cells(record, entry.get("bytes"), tokens / entry["tokens_per_s"])
    return f"{name} | {cells} | {moved} | {decoded}"


def _prompt_row(model: Record, run: Record) -> str:
    prompt = run["prompt"]
    ways = ("engine_s", "decode_rows_s", "prefill_rows_s")
    engine, decode_s, prefill_s = (prompt[way] for way in ways)
    return (
        f"{model['name']} | {run['dtype']} | {prompt['prompt_tokens']} | {engine * 1e3:.1f} ms "
        f"| {decode_s * 1e3:.0f} ms | {prefill_s * 1e3:.0f} ms "
        f"| {decode_s / engine:.1f}, {prefill_s / engine:.1f}"
    )
