"""Draws answers to countdown puzzles and counts the right ones: of models, and at random."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing

import numpy as np
import torch

from experiments.harness.result_cache import Numbers
from srm.engine.config import EngineConfig
from srm.engine.progress import show_progress
from srm.training.baselines.transformer import Transformer
from srm.training.baselines.transformer_sampler import TransformerSampler
from srm.training.grpo.engine_sampler import engine_sampler
from srm.training.grpo.rollouts import RolloutSampling
from srm.training.model import SRM
from srm.training.precision import choose_precision
from srm.training.problems import countdown
from srm.training.problems.countdown import Countdown

SLOTS = 2_048
"""Samples that run at once."""

Draw = Callable[[Countdown, int, int], Iterable[Sequence[int]]]
"""Returns the ids of so many answers, end token included, drawn with a seed."""


def draw_srm(model: SRM, problems: Sequence[Countdown], samples: int, seed: int) -> Numbers:
    """Draw with our engine in this process."""
    config = model.config
    engine = EngineConfig(num_slots=SLOTS, max_waiting=max(100_000, samples))

    with closing(engine_sampler(config, model.state_dict(), engine, 1, 0.0)) as sampler:

        def draw(problem: Countdown, count: int, seed: int) -> Iterable[Sequence[int]]:
            prompt = prompt_ids(problem)
            sampling = RolloutSampling(count, countdown.LONGEST - len(prompt), 1.0, 1.0, seed)
            (rollouts,) = sampler.sample([prompt], sampling)
            return (rollout.token_ids.tolist() for rollout in rollouts)

        draw(problems[0], 1, seed)  # what a first step takes is not timed
        return _counted(draw, problems, samples, seed)


def draw_transformer(
    model: Transformer, problems: Sequence[Countdown], samples: int, seed: int
) -> Numbers:
    """Draw with our own sampler in torch, in the precision that training takes."""
    sampler = TransformerSampler(model, getattr(torch, choose_precision("auto", "cpu")))

    def draw(problem: Countdown, count: int, seed: int) -> Iterable[Sequence[int]]:
        random = torch.Generator().manual_seed(seed)
        for begin in range(0, count, SLOTS):
            yield from sampler.sample(
                prompt_ids(problem),
                min(SLOTS, count - begin),
                countdown.LONGEST - len(prompt_ids(problem)),
                countdown.EOS,
                random,
            )

    return _counted(draw, problems, samples, seed)


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


def _counted(draw: Draw, problems: Sequence[Countdown], samples: int, seed: int) -> Numbers:
    """Return the right samples of each problem, their tokens, and what drawing them took; equal
    answers are judged once, and judging is not timed."""
    right, tokens, wall, processor = [], 0, 0.0, 0.0
    with show_progress("drawing", len(problems)) as tell:
        for place, problem in enumerate(problems):
            begun = time.monotonic(), time.process_time()
            drawn = Counter(map(tuple, draw(problem, samples, seed + place)))
            wall += time.monotonic() - begun[0]
            processor += time.process_time() - begun[1]
            tokens += sum(len(ids) * count for ids, count in drawn.items())
            right.append(sum(count for ids, count in drawn.items() if is_right(problem, ids)))
            tell(place + 1, f"{place + 1} of {len(problems)} problems")
    took = {"seconds": wall, "processor_seconds": processor, "tokens": tokens}
    return {"right": right, "samples": samples, **took}


def is_right(problem: Countdown, ids: Sequence[int]) -> bool:
    """Whether an answer has ended and is right."""
    if not ids or ids[-1] != countdown.EOS:
        return False
    return countdown.is_solved(problem, " ".join(countdown.VOCABULARY[token] for token in ids[:-1]))
