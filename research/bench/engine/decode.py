"""The engine's decode rate, the sampler's part of a step's time, and batches made by hand.

The measured loop has everything that a served token needs (scheduling, the step graph with its
state, sampling at temperature 1, feedback, completion) except HTTP and text. Batches made by hand
are steps to be timed that no scheduler would make, or not alone: row i uses slot i. They keep the
promises of `engine.steps.batch`, except for `unsampled_rows`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from research.bench.engine.models import BenchConfig
from srm.engine.config import Dtype, EngineConfig, ModelConfig
from srm.engine.device.runner import ModelRunner
from srm.engine.messages import Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.scheduler.assembly import FED, FOLLOWING, NOTHING
from srm.engine.steps.batch import I32, NEW_ROW, PREFILL_ROW, Batch
from srm.engine.weights.random_model import random_tensors
from srm.engine.weights.weights import fold


def prefill_rows(token_ids: I32, position: int = 0) -> Batch:
    """Return prompts i32[rows, length], or parts of prompts from `position` on; no output head."""
    rows, length = token_ids.shape
    prefill = np.zeros(1 + rows, PREFILL_ROW)
    prefill["read_slot"][1:] = prefill["write_slot"][1:] = np.arange(rows)
    prefill["position"], prefill["end"] = position, length * np.arange(rows + 1)
    return Batch(
        sequence_ids=np.empty(0, np.int64),
        slots=NOTHING,
        positions=NOTHING,
        ends=np.empty(0, np.bool_),
        new=np.empty(0, NEW_ROW),
        prefill=prefill,
        token_ids=np.append(FED, token_ids),
        scored_ids=np.empty(0, np.int64),
        targets=FOLLOWING,
        score_rows=NOTHING,
        num_top=NOTHING,
        named=NOTHING,
    )


def decode_rows(
    token_ids: I32,
    position: int,
    top_p: float = 1.0,
    slots: I32 | None = None,
) -> Batch:
    """Return one token i32[rows] of every sequence; the next one is sampled at temperature 1.

    All are as a sequence's first row, and say how they sample.
    """
    rows = np.arange(len(token_ids), dtype=np.int32)
    slots = rows if slots is None else slots
    new = np.zeros(len(rows), NEW_ROW)
    new["row"], new["read_slot"], new["token"] = rows, slots, token_ids
    new["sampling"]["temperature"], new["sampling"]["top_p"] = 1, top_p
    new["sampling"]["seed"] = rows
    return replace(
        prefill_rows(np.empty((0, 1), np.int32)),
        sequence_ids=rows.astype(np.int64),
        slots=slots,
        positions=np.full(len(rows), position, np.int32),
        ends=np.zeros(len(rows), np.bool_),
        new=new,
        prefill=np.array([(0, 0, 0, len(rows))], PREFILL_ROW),
    )


def unsampled_rows(token_ids: I32) -> Batch:
    """Return sequences i32[rows] of one token that pass the output head but are not sampled.

    The engine would score a token that passes the head and is not sampled.
    """
    return replace(prefill_rows(token_ids[:, None]), targets=np.zeros(1 + len(token_ids), np.int32))


def settings_for(
    config: BenchConfig, dtype: Dtype, running: int, step_rows: int | None = None
) -> EngineConfig:
    """Return settings of an engine with `running` slots (0: all that fit) and no prefix cache.

    It decodes `step_rows` sequences in a step; None: all of them.
    """
    rows = running if step_rows is None else step_rows
    return EngineConfig(
        device=config.device,
        dtype=dtype,
        product=config.product,
        cache_dir=config.cache_dir,
        num_slots=running,
        prefix_cache=False,
        max_step_rows=rows,
        max_step_tokens=2 * rows,
        max_waiting=max(running, rows),
    )


def random_runner(
    model: ModelConfig, config: BenchConfig, dtype: Dtype, rows: int, slots: int = 0
) -> ModelRunner:
    """Bind random weights of this shape; with as many slots as a step of `rows` needs, or more."""
    weights = fold(model, random_tensors(model), "random")
    settings = settings_for(config, dtype, max(rows, slots), rows)
    return ModelRunner(weights, settings, config.variants)


def measure_decode(
    model: ModelConfig,
    runner: ModelRunner,
    batch_size: int,
    config: BenchConfig,
    *,
    turn_rows: int | None = None,
    top_p: float = 1.0,
) -> dict[str, Any]:
    """Measure tokens a second with `batch_size` sequences running, in consecutive repetitions.

    If there are more than `turn_rows`, they take turns, so many a step.
    """
    rows = min(batch_size, turn_rows or batch_size)
    # Only the scheduler's settings matter: the runner exists already, whatever its dtype.
    engine = Engine(model, runner, settings_for(config, config.dtypes[0], batch_size, rows))
    rates = []
    for repetition in range(config.repetitions):
        tokens, seconds = 0, 0.0
        while seconds < config.seconds:
            engine.add(endless(model, batch_size, repetition, top_p))
            # The pipeline fills, and every sequence has forked.
            for _ in range(2 + -(-batch_size // rows)):
                engine.step_overlapped()
            started, before, taken = time.perf_counter(), engine.num_steps, 0.0
            while engine.has_request("bench") and seconds + taken < config.seconds:
                engine.step_overlapped()
                taken = time.perf_counter() - started
            seconds += taken
            tokens += (engine.num_steps - before) * rows
            engine.abort("bench")
            while engine.has_work:
                engine.step()
        rates.append(tokens / seconds)
    return {
        "batch_size": batch_size,
        "rows": rows,
        "tokens_per_s": median(rates),
        "raw": rates,
    }


def measure_sampler(
    model: ModelConfig, runner: ModelRunner, batch_size: int, config: BenchConfig
) -> dict[str, Any]:
    """Time a step that samples, with top-p off and on, and one that stops at the logits.

    All use the same graph and the same rows; the three take turns step by step, so that other load
    on the machine affects all alike.
    """
    (tokens,) = random_tokens(model, 1, batch_size)
    steps = {
        "unsampled_s": unsampled_rows(tokens),
        "sampled_s": decode_rows(tokens, 0),
        "top_p_s": decode_rows(tokens, 0, top_p=0.9),
    }
    ways = {name: partial(_step, runner, batch) for name, batch in steps.items()}
    least = len(steps) * config.repetitions * config.seconds
    return {"batch_size": batch_size} | in_turns(ways, 2, least)


def in_turns(
    ways: Mapping[str, Callable[[], object]], least: int, seconds: float = 0
) -> dict[str, Any]:
    """Time calls that take turns, so many each and for so long; return raw times and medians."""
    raw: dict[str, list[float]] = {name: [] for name in ways}
    turn, began = 0, time.perf_counter()
    while turn < least or time.perf_counter() - began < seconds:
        turn += 1
        for name, call in ways.items():
            started = time.perf_counter()
            call()
            raw[name].append(time.perf_counter() - started)
    return {"raw": raw} | {name: median(taken) for name, taken in raw.items()}


def _step(runner: ModelRunner, batch: Batch) -> None:
    runner.launch(batch).wait()


def seconds_per_step(runner: ModelRunner, batch: Batch, seconds: float) -> float:
    """Time repeated launches of one step, the next launched ahead, for at least `seconds`."""
    runner.launch(batch).wait()
    under_way, steps, started = runner.launch(batch), 0, time.perf_counter()
    while not steps or time.perf_counter() - started < seconds:
        ahead = runner.launch(batch)
        under_way.wait()
        under_way, steps = ahead, steps + 1
    elapsed = time.perf_counter() - started
    under_way.wait()
    return elapsed / steps


def random_tokens(model: ModelConfig, rows: int, length: int) -> I32:
    """Return random tokens i32[rows, length], the same every time."""
    drawn = np.random.default_rng(0).integers(model.vocab_size, size=(rows, length))
    return drawn.astype(np.int32)


def endless(model: ModelConfig, batch_size: int, seed: int, top_p: float) -> Request:
    """Return a request of so many samples, none of which ends before the context does."""
    return Request(
        id="bench",
        prompt_token_ids=np.zeros(1, "<i4").tobytes(),
        params=SamplingParams(
            n=batch_size,
            max_tokens=model.n_ctx,
            temperature=1.0,
            top_p=top_p,
            ignore_eos=True,
            seed=seed,
        ),
    )
