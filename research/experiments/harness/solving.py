"""Draws answers to problems from models, and counts the right ones."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from typing import Literal

import torch

from research.experiments.harness.result_cache import Numbers
from research.experiments.tasks.tasks import PosedProblem, SolvingTask
from srm.engine.config import EngineConfig
from srm.progress import show_progress
from srm.training.baselines.transformer import Transformer
from srm.training.baselines.transformer_sampler import TransformerSampler
from srm.training.grpo.engine_sampler import engine_sampler
from srm.training.grpo.rollouts import Rollout, RolloutSampling, Sampler
from srm.training.model import SRM, LanguageModel
from srm.training.precision import choose_precision

SamplingDtype = Literal["float32", "bfloat16"]
Device = Literal["cpu", "gpu"]
SLOTS = 2_048
"""Samples that run at once."""
APART = 16
"""Prompts that run side by side differ by fewer tokens. Answers have as much room as the longest
of them leaves."""
CLOCKS = {"cpu": time.process_time, "gpu": time.monotonic}
"""The clock of what a device does."""


def open_sampler(
    model: LanguageModel,
    most: int,
    dtype: SamplingDtype,
    warming: Sequence[int],
    end: int,
    device: Device = "cpu",
) -> Sampler:
    """Return what samples up to `most` answers at once, to the token `end`: our engine in this
    process, or for a Transformer our loop in torch. On a GPU torch runs the engine's steps too, and
    nothing is compiled. The prompt `warming` is answered first."""
    if isinstance(model, Transformer):
        place = "cpu" if device == "cpu" else "cuda"
        sampler: Sampler = TransformerSampler(model, end, getattr(torch, dtype), place)
    else:
        assert isinstance(model, SRM)
        engine = EngineConfig(
            device="cpu" if device == "cpu" else "torch:cuda",
            dtype=dtype,
            num_slots=SLOTS,
            max_waiting=max(100_000, most),
        )
        sampler = engine_sampler(model.config, model.state_dict(), engine, 1, 0.0)
    sampler.sample([warming], RolloutSampling(1, 8, 1.0, 1.0, 0))  # not timed
    return sampler


def training_dtype(device: Device = "cpu") -> SamplingDtype:
    """Return the precision that training takes on this processor or GPU."""
    place = "cpu" if device == "cpu" else "cuda"
    return "bfloat16" if choose_precision("auto", place) == "bfloat16" else "float32"


def side_by_side(problems: Sequence[PosedProblem], most: int) -> Iterator[list[int]]:
    """Yield the places of problems, up to `most` at once, the shortest prompts first."""
    lengths = [len(problem.ids) for problem in problems]
    order = sorted(range(len(problems)), key=lengths.__getitem__)
    for _, similar in groupby(order, lambda place: lengths[place] // APART):
        places = [*similar]
        for begin in range(0, len(places), most):
            yield places[begin : begin + most]


def ids_of(rollout: Rollout) -> tuple[int, ...]:
    return tuple(rollout.token_ids.tolist())


def draw_answers(
    model: LanguageModel, task: SolvingTask, samples: int, seed: int, device: Device = "cpu"
) -> Numbers:
    """Return the right samples of each problem, their tokens, and what drawing them took in the
    precision of training; equal answers are judged once, and judging is not timed. On a GPU the
    clock's seconds stand for the processor's."""
    dtype, clock = training_dtype(device), CLOCKS[device]
    problems = task.problems
    right, tokens, wall, processor = [0] * len(problems), 0, 0.0, 0.0
    opened = closing(open_sampler(model, samples, dtype, problems[0].ids, task.end, device))
    with opened as sampler, show_progress("drawing", len(problems)) as tell:
        count = 0
        for places in side_by_side(problems, max(1, SLOTS // samples)):
            some = [problems[place] for place in places]
            room = min(problem.room for problem in some)
            begun = time.monotonic(), clock()
            sampling = RolloutSampling(samples, room, 1.0, 1.0, (seed + count) % 2**64)
            rollouts = sampler.sample([problem.ids for problem in some], sampling)
            drawn = [Counter(map(ids_of, own)) for own in rollouts]
            wall += time.monotonic() - begun[0]
            processor += clock() - begun[1]
            for place, problem, answers in zip(places, some, drawn, strict=True):
                tokens += sum(len(ids) * times for ids, times in answers.items())
                right[place] = sum(answers[ids] for ids in answers if problem.is_right(ids))
            count += len(places)
            tell(count, f"{count} of {len(problems)} problems")
    took = {"seconds": wall, "processor_seconds": processor, "tokens": tokens}
    return {"right": right, "samples": samples, "dtype": dtype, **took}
