"""`srm bench until`: what a request costs that ends at its first right sample, by its first wave.

Which samples are right is drawn, with each probability of `right`. What is computed is counted by
the scheduler that engines have, on results that are made up: lengths are geometric, with a slot for
each of n samples. The seconds are an engine's with a model, of whose samples some are called right;
first waves take turns there, and 0 starts all at once. Server and sockets are left out: a sample is
known to be right in the step that ends it, and a step is always under way meanwhile.

A budget of tokens for all prompts is set beside equal parts of it: samples of each problem of a
record are right as often as there, and their lengths are geometric with its mean.
"""

from __future__ import annotations

import heapq
import math
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
import numpy as np

from research.bench.frame import Record, Settings, note, run, table
from research.bench.host.load import MODEL, PROMPT_LENGTH
from srm.engine.config import EngineConfig
from srm.engine.device.libc import keep_freed_memory
from srm.engine.device.runner import ModelRunner
from srm.engine.early_stop import EarlyStop, SharedBudget
from srm.engine.messages import Request, SamplingParams
from srm.engine.process.engine import Engine
from srm.engine.python.tokenizer import FolderTokenizer
from srm.engine.scheduler.scheduler import Scheduler
from srm.engine.steps.batch import I64, Bool, StepResult
from srm.engine.weights.checkpoint import load_checkpoint
from srm.loadtest.records import RECORDS, ROOT

END, OTHER = 1, 2
"""Tokens that are made up: one that ends a sample, and one that does not."""
LENGTH = 10
"""Mean length of made-up samples, in tokens."""
TIMED = 0.0003
"""Probability that a sample is right where seconds are measured."""
MOST_SAMPLES = 300_000
"""About how many all requests of a count need."""
PUZZLE = "482 of 97 3 5 12"
SHARED_SEEDS = 3
"""Draws of the problems' samples, which share a budget."""
NO_INDICES = np.empty(0, np.int32)


class UntilBenchConfig(Settings, frozen=True, forbid_unknown_fields=True):
    """Settings of `srm bench until`."""

    first_waves: tuple[int, ...] = (32, 64, 128)
    """Samples that start at first; two more start for each that has ended."""
    right: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003)
    """Probabilities that a sample is right."""
    samples: int = 10_000
    """Samples that are asked for."""
    seeds: int = 1_000
    """Requests of which each count is the mean; fewer where they need many samples."""
    passk: Path = RECORDS / "2026-11-30-0eb5290f-passk-regex-written.json"
    """Record of `srm evaluate passk` whose problems share a budget."""
    budgets: tuple[int, ...] = (50_000, 200_000, 800_000)
    """Tokens of a budget."""
    repetitions: int = 10
    """Requests that are timed, each with every first wave."""
    model: Path = ROOT / "models/countdown"
    """Checkpoint whose samples are timed."""
    cache_dir: Path = EngineConfig().cache_dir
    """Folder where compiled graphs are kept between runs."""


def main(argv: list[str]) -> int:
    """Measure, write a record, print its tables."""
    return run(UntilBenchConfig, argv, "until", measure, markdown)


def measure(config: UntilBenchConfig) -> Record:
    """Return the counts of each probability and first wave, and the times of each first wave."""
    counted = [
        note({"right": right, "first_wave": wave} | _count(config, right, wave))
        for right in config.right
        for wave in config.first_waves
    ]
    return {"counted": counted, "timed": _time(config), "shared": _share(config)}


def _count(config: UntilBenchConfig, right: float, wave: int) -> dict[str, float]:
    """Return mean numbers of tokens and samples over the seeds."""
    n = config.samples
    settings = EngineConfig(num_slots=n, prefix_slots=1, max_step_rows=n, max_step_tokens=2 * n)
    scheduler = Scheduler(MODEL, settings)
    needed, computed, samples = [], [], []
    for seed in range(min(config.seeds, math.ceil(MOST_SAMPLES * right))):
        rng = np.random.default_rng([seed, int(1e6 * right)])
        lengths = np.minimum(rng.geometric(1 / LENGTH, config.samples), MODEL.n_ctx // 2)
        is_right = rng.random(config.samples) < right
        end = int(is_right.argmax()) + 1 if is_right.any() else config.samples
        samples.append(end)
        needed.append(int(lengths[:end].sum()))
        computed.append(_compute(scheduler, lengths, is_right, wave))
    ratios = np.array(computed) / np.array(needed)
    return {
        "seeds": len(samples),
        "samples": float(np.mean(samples)),
        "needed": float(np.mean(needed)),
        "computed": float(np.mean(computed)),
        "mean_ratio": float(ratios.mean()),
    }


def _compute(scheduler: Scheduler, lengths: I64, is_right: Bool, wave: int) -> int:
    """Return how many tokens are computed of samples of these lengths."""
    n = len(lengths)
    prompt = np.full(PROMPT_LENGTH, OTHER, "<i4").tobytes()
    params = SamplingParams(n=n, max_tokens=MODEL.n_ctx, stop_token_ids=(END,))
    draw = EarlyStop[None](n, 1, wave)
    scheduler.add(Request("", prompt, params, first_wave=draw.start_below))
    first_id = scheduler.registry.by_id[""].first_id
    computed, landing = 0, scheduler.schedule()
    while landing is not None:
        launched = scheduler.schedule()  # as engines do, before the step before is completed
        computed += landing.num_decode
        indices = landing.sequence_ids - first_id
        ended = landing.positions - PROMPT_LENGTH + 2 == lengths[indices]
        tokens = np.where(ended, END, OTHER).astype(np.int32)
        scheduler.complete(landing, StepResult(tokens, np.zeros(len(tokens), np.float32)))
        _add(scheduler, draw, indices[ended].tolist(), is_right)
        landing = launched or scheduler.schedule()
    scheduler.latencies.publish(is_idle=True)
    return computed


def _add(
    engine: Engine | Scheduler, draw: EarlyStop[None], ended: list[int], is_right: Bool
) -> None:
    """Note which samples have ended; stop those not needed, and let others start."""
    end = draw.end
    for index in ended:
        draw.add_sample(index, bool(is_right[index]), None)
    if draw.end < end:
        engine.stop("", NO_INDICES, draw.end)
    if ended:
        engine.start_below("", draw.start_below)


class Made(NamedTuple):
    """A sample that is made up."""

    num_tokens: int
    matched: bool


def _share(config: UntilBenchConfig) -> list[dict[str, Any]]:
    """Return how many problems are solved with each budget and seed, shared and in equal parts."""
    problems = msgspec.json.decode(config.passk.read_bytes())["problems"]
    rates = np.array([problem["right"] / problem["drawn"] for problem in problems])
    means = np.array([problem["completion_tokens"] / problem["drawn"] for problem in problems])
    n = min(problem["drawn"] for problem in problems)
    cases = []
    for budget, seed in product(config.budgets, range(SHARED_SEEDS)):
        rng = np.random.default_rng([seed])
        is_right = rng.random((len(rates), n)) < rates[:, None]
        lengths = rng.geometric(1 / np.maximum(means, 1)[:, None], is_right.shape)
        before = lengths.cumsum(1) - lengths
        equal = (is_right & (before < budget / len(rates))).any(1)
        solved, spent, computed = _spend(budget, lengths, is_right)
        case = {"budget": budget, "seed": seed, "equal": int(equal.sum()), "shared": solved}
        cases.append(note(case | {"spent": spent, "computed": computed}))
    return cases


def _spend(budget: int, lengths: I64, is_right: Bool) -> tuple[int, int, int]:
    """Return problems solved, tokens of samples in the reply, and tokens computed: a token of each
    sample that runs in a step."""
    draws = [EarlyStop[Made](lengths.shape[1], 1) for _ in lengths]
    order = SharedBudget(draws, budget)
    now = solved = spent = computed = 0
    started, running = [0] * len(draws), list[tuple[int, int, int]]()
    while True:
        for prompt, below in order.start_more().items():
            for index in range(started[prompt], below):
                heapq.heappush(running, (now + int(lengths[prompt, index]), prompt, index))
            started[prompt] = max(started[prompt], below)
        if not running:
            return solved, spent, computed
        now = running[0][0]
        while running and running[0][0] == now:
            _, prompt, index = heapq.heappop(running)
            length = int(lengths[prompt, index])
            computed += length
            made = Made(length, bool(is_right[prompt, index]))
            certain = draws[prompt].add_sample(index, made.matched, made)
            for sample in order.spend(prompt, certain):
                solved, spent = solved + sample.matched, spent + sample.num_tokens
        for end, prompt, index in running:
            if index >= draws[prompt].end:  # it is stopped, and has computed a part
                computed += int(lengths[prompt, index]) - (end - now)
        running = [each for each in running if each[2] < draws[each[1]].end]
        heapq.heapify(running)


def _time(config: UntilBenchConfig) -> list[dict[str, Any]]:
    """Return seconds and tokens of each request, with each first wave."""
    keep_freed_memory()
    weights = load_checkpoint(config.model)
    settings = EngineConfig(
        model=config.model, num_slots=config.samples, prefix_slots=1, cache_dir=config.cache_dir
    )
    runner = ModelRunner(weights, settings)
    engine = Engine(weights.config, runner, settings)
    (prompt,) = FolderTokenizer(config.model).encode([PUZZLE])
    timed = []
    waves = (0, *config.first_waves)
    for seed in range(-1, config.repetitions):  # the first one warms up
        is_right = np.random.default_rng(seed + 1).random(config.samples) < TIMED
        params = SamplingParams(n=config.samples, max_tokens=64, seed=seed + 1)
        for turn in range(len(waves)):
            wave = waves[(turn + seed) % len(waves)]
            before, began = engine.scheduler.latencies.num_sampled, time.perf_counter()
            draw = EarlyStop[None](config.samples, 1, wave or config.samples)
            engine.add(Request("", prompt.tobytes(), params, first_wave=draw.start_below))
            while engine.has_work:
                ended = [output.index for output in engine.step_overlapped()]
                _add(engine, draw, ended, is_right)
            seconds = time.perf_counter() - began
            tokens = engine.scheduler.latencies.num_sampled - before
            entry = {"seed": seed, "first_wave": wave, "seconds": seconds, "tokens": tokens}
            if seed >= 0:
                timed.append(note(entry))
    runner.close()
    return timed


def markdown(record: Record) -> list[str]:
    """Render the record as tables."""
    settings, counted, timed = record["settings"], record["counted"], record["timed"]
    waves = settings["first_waves"]
    rows = []
    for right in settings["right"]:
        cases = [case for case in counted if case["right"] == right]
        cells = [
            f"{case['computed'] / case['needed']:.2f} | {case['mean_ratio']:.2f} "
            f"| {case['computed'] / LENGTH:,.0f}"
            for case in cases
        ]
        first = f"{right:g} | {cases[0]['seeds']:,} | {cases[0]['samples']:,.0f}"
        rows.append(" | ".join([first, *cells]))
    heads = [f"ratio, {wave} | mean of ratios | samples computed" for wave in waves]
    times = {
        wave: [entry["seconds"] for entry in timed if entry["first_wave"] == wave]
        for wave in (0, *waves)
    }
    by_budget = [
        " | ".join(
            [f"{budget:,}"]
            + [
                ", ".join(f"{case[way]:,}" for case in record["shared"] if case["budget"] == budget)
                for way in ("equal", "shared", "spent", "computed")
            ]
        )
        for budget in settings["budgets"]
    ]
    return [
        f"Samples of a request for {settings['samples']:,} that ends at the first right one, by "
        "its first wave, which 2 more follow for each that ends. A ratio is of tokens computed "
        "to those of the samples needed, of all seeds together or the mean of the seeds' own. "
        "Samples computed are tokens by the mean length.",
        "",
        *table(" | ".join(["p that a sample is right", "seeds", "samples needed", *heads]), rows),
        "",
        f"Model {Path(settings['model']).name}, p = {TIMED:g}, "
        f"{settings['repetitions']} requests with each first wave in turns; first wave 0 starts "
        "all at once.",
        "",
        *table(
            "first wave | tokens | median s | to all at once: of the sums | median",
            (
                f"{wave} | {sum(e['tokens'] for e in timed if e['first_wave'] == wave):,} "
                f"| {median(own):.3f} | {sum(own) / sum(times[0]):.2f} "
                f"| {median(np.divide(own, times[0])):.2f}"
                for wave, own in times.items()
            ),
        ),
        "",
        f"Problems of {Path(settings['passk']).stem} solved by a budget for all, by seed: in equal "
        "parts, and shared by `until.budget`; and the tokens of the reply "
        "and all that were computed.",
        "",
        *table("tokens | equal parts | shared | tokens spent | tokens computed", by_budget),
    ]
