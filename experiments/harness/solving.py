"""Draws answers to countdown puzzles and counts the right ones: of models, and at random."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import chain
from typing import Literal

import numpy as np
import torch

from experiments.harness.result_cache import Numbers
from srm.engine.config import EngineConfig
from srm.engine.progress import show_progress
from srm.training.baselines.transformer import Transformer
from srm.training.baselines.transformer_sampler import TransformerSampler
from srm.training.grpo.engine_sampler import engine_sampler
from srm.training.grpo.rollouts import RolloutSampling, Sampler
from srm.training.model import SRM, LanguageModel
from srm.training.precision import choose_precision
from srm.training.problems import countdown
from srm.training.problems.countdown import SIZES, Countdown, draw_split

SamplingDtype = Literal["float32", "bfloat16"]
SLOTS = 2_048
"""Samples that run at once."""
WARMING = Countdown((25, 3, 7, 4), 64)
"""A puzzle for what a first step takes."""


def open_sampler(model: LanguageModel, most: int, dtype: SamplingDtype) -> Sampler:
    """Return what samples up to `most` answers at once: our engine in this process, or for a
    Transformer our loop in torch."""
    if isinstance(model, Transformer):
        sampler: Sampler = TransformerSampler(model, countdown.EOS, getattr(torch, dtype))
    else:
        assert isinstance(model, SRM)
        engine = EngineConfig(dtype=dtype, num_slots=SLOTS, max_waiting=max(100_000, most))
        sampler = engine_sampler(model.config, model.state_dict(), engine, 1, 0.0)
    sampler.sample([prompt_ids(WARMING)], RolloutSampling(1, 8, 1.0, 1.0, 0))  # not timed
    return sampler


def training_dtype() -> SamplingDtype:
    """Return the precision that training takes on this processor."""
    return "bfloat16" if choose_precision("auto", "cpu") == "bfloat16" else "float32"


def draw_answers(
    model: LanguageModel, problems: Sequence[Countdown], samples: int, seed: int
) -> Numbers:
    """Return the right samples of each problem, their tokens, and what drawing them took; equal
    answers are judged once, and judging is not timed.

    SRM draws in float32, as in all results so far, a Transformer in the precision of training.
    """
    dtype: SamplingDtype = "float32" if isinstance(model, SRM) else training_dtype()
    right, tokens, wall, processor = [], 0, 0.0, 0.0
    shown = show_progress("drawing", len(problems))
    with closing(open_sampler(model, samples, dtype)) as sampler, shown as tell:
        for place, problem in enumerate(problems):
            prompt = prompt_ids(problem)
            longest = countdown.LONGEST - len(prompt)
            begun = time.monotonic(), time.process_time()
            sampling = RolloutSampling(samples, longest, 1.0, 1.0, seed + place)
            (rollouts,) = sampler.sample([prompt], sampling)
            drawn = Counter(tuple(rollout.token_ids.tolist()) for rollout in rollouts)
            wall += time.monotonic() - begun[0]
            processor += time.process_time() - begun[1]
            tokens += sum(len(ids) * count for ids, count in drawn.items())
            right.append(sum(count for ids, count in drawn.items() if is_right(problem, ids)))
            tell(place + 1, f"{place + 1} of {len(problems)} problems")
    took = {"seconds": wall, "processor_seconds": processor, "tokens": tokens}
    return {"right": right, "samples": samples, "dtype": dtype, **took}


def draw_puzzles(random: np.random.Generator, count: int, is_held_out: bool) -> list[Countdown]:
    """Draw puzzles of four, five and six numbers in turn that are, or are not, held out."""
    each = -(-count // len(SIZES))
    by_size = (draw_split(random, each, size, False, is_held_out).problems for size in SIZES)
    return list(chain.from_iterable(zip(*by_size, strict=True)))[:count]


def draw_random(problems: Sequence[Countdown], samples: int, seed: int) -> list[int]:
    """Combine the numbers of each problem at random; return how often that makes the target."""
    right = []
    for place, problem in enumerate(problems):
        random, drawn, solved = np.random.default_rng((seed, place)), 0, 0
        while drawn < samples:
            count = min(100_000, samples - drawn)
            rows = np.tile(np.array(problem.numbers), (count, 1))
            solved += int((countdown.combine(random, rows, False).target == problem.target).sum())
            drawn += count
        right.append(solved)
    return right


def prompt_ids(problem: Countdown) -> list[int]:
    """Return the ids of a problem's prompt, from the begin token."""
    return [countdown.BOS, *countdown.parse_ids(problem.prompt)]


def is_right(problem: Countdown, ids: Sequence[int]) -> bool:
    """Whether an answer has ended and is right."""
    if not ids or ids[-1] != countdown.EOS:
        return False
    return countdown.is_solved(problem, " ".join(countdown.VOCABULARY[token] for token in ids[:-1]))
