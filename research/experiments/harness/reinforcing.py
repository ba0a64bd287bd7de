"""Has a model learn by GRPO from its own answers to countdown puzzles, for so many seconds."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack, closing
from copy import deepcopy
from itertools import chain
from pathlib import Path
from statistics import mean

import msgspec
import numpy as np

from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.solving import open_sampler, training_dtype
from research.experiments.tasks.tasks import draw_puzzles, prompt_ids
from srm.progress import show_progress
from srm.training.grpo.asked import Asked, Questions
from srm.training.grpo.asking import Asking, rows_of
from srm.training.grpo.config import SamplingSettings
from srm.training.grpo.learner import Learner
from srm.training.grpo.objective import Objective
from srm.training.grpo.resampling import Resampling
from srm.training.loop import Run
from srm.training.model import LanguageModel
from srm.training.problems.countdown import EOS, LONGEST, SIZES
from srm.training.problems.countdown_tokenizer import countdown_tokenizer
from srm.training.processes import processes
from srm.training.questions.questions import Question
from srm.training.questions.reward_process import RewardProcess
from srm.training.schedule import Schedule

REWARD, REWARD_LIMIT_S = "srm.training.questions.rewards:countdown", 60.0
LONGEST_ANSWER = LONGEST - (SIZES[-1] + 5)
"""Most tokens that fit behind the longest prompt."""
KL_WEIGHT, CLIP_NORM, MICRO_BATCH_TOKENS = 0.04, 0.1, 8_192
"""As in `srm train grpo`."""
RULES = Objective(
    temperature=1.0,
    kl_weight=KL_WEIGHT,
    correction="none",
    clip_low=0.0,
    clip_high=0.0,
    most_weight=1.0,
    loss_mean="completion",
    max_tokens=LONGEST_ANSWER,
)
OWN_STREAM = 1
"""Part of the seed that keeps these puzzles apart from those of pretraining."""
WARMUP, ENDLESS = 5, 10**9
"""Updates of the warm-up, and so many that the learning rate does not fall behind it: seconds, not
updates, end a run."""


class GRPOSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How models that can answer learn from rewards."""

    grpo_puzzles: int = 32
    """Puzzles of one update."""
    rollouts: int = 50
    """Answers of SRM to each of these."""
    transformer_rollouts: int = 5
    """Answers of the Transformer to each of these."""
    group_size: int = 16
    """Answers to a puzzle that balanced resampling learns from, or one less than there are."""
    grpo_learning_rate: float = 1e-4
    """Learning rate of GRPO: reached after five updates, then constant."""


class PuzzleBatches:
    """The puzzles of each update, none held out; the index is the number of updates before it."""

    def __init__(self, count: int, seed: int) -> None:
        self._count, self._seed = count, seed

    def __getitem__(self, index: int) -> list[Asked]:
        random = np.random.default_rng((self._seed, index, OWN_STREAM))
        puzzles = draw_puzzles(random, self._count, is_held_out=False)
        return [Asked(Question(puzzle.prompt, ""), prompt_ids(puzzle)) for puzzle in puzzles]


def reinforce(
    model: LanguageModel,
    settings: GRPOSettings,
    minutes: float,
    rollouts: int,
    group_size: int,
    seed: int,
) -> Numbers:
    """Train the model in place; return what training took and how rewards went.

    It learns from `rollouts` answers to each puzzle, or from `group_size` of them that are
    resampled; 0: from all. The update that the minutes end in is the last. Processor seconds are
    those of all threads, and leave out what judging takes.
    """
    sampling = SamplingSettings(rollouts, temperature=1.0, top_p=1.0, max_tokens=LONGEST_ANSWER)
    resampling = Resampling(group_size)
    puzzles = Questions(PuzzleBatches(settings.grpo_puzzles, seed), [], "countdown")
    schedule = Schedule(
        steps=ENDLESS,
        learning_rate=settings.grpo_learning_rate,
        warmup_steps=WARMUP,
        weight_decay=0.0,
        save_every=ENDLESS,
        clip_norm=CLIP_NORM,
    )
    dtype = training_dtype()
    reference, budget = deepcopy(model), 60 * minutes
    took: dict[str, list[float]] = {"sampling": [], "learning": []}
    updates: list[tuple[float, float, int]] = []
    with ExitStack() as stack:
        own = stack.enter_context(processes("cpu"))
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        reward = stack.enter_context(closing(RewardProcess([REWARD], [1.0], REWARD_LIMIT_S)))
        most, (first, *_) = rollouts * settings.grpo_puzzles, puzzles.train[0]
        opened = open_sampler(model, most, dtype, first.token_ids, EOS)
        sampler = stack.enter_context(closing(opened))
        run = Run(model, schedule, Path(folder), own, {"seed": seed})
        learner = Learner(run, reference, RULES, own.device, run.precision, MICRO_BATCH_TOKENS)
        asking = Asking(sampling, seed, puzzles, countdown_tokenizer(), reward, sampler)
        tell = stack.enter_context(show_progress("GRPO", round(budget)))
        while (spent := sum(chain(*took.values()))) < budget:
            began = time.process_time()
            batch = asking.batch(len(updates))
            sampled = time.process_time()
            rows = rows_of(batch, resampling, True, seed, len(updates))
            learner.learn(rows)
            asking.load(run.weights())
            took["sampling"].append(sampled - began)
            took["learning"].append(time.process_time() - sampled)
            updates.append((float(batch.rewards.mean()), batch.mixed, len(rows)))
            tell(round(spent), f"{len(updates)} updates, reward {updates[-1][0]:.3f}")
    rewards, mixed, learned = zip(*updates, strict=True)
    seconds = {f"{part}_seconds": sum(each) for part, each in took.items()}
    return {
        "rewards": rewards,
        "mixed": mean(mixed),
        "rows": mean(learned),
        "grpo_dtype": dtype,
        **seconds,
    }
