"""The tasks of `coverage`: countdown puzzles, or questions of files.

Another task is a class as `SolvingTask` describes, which `read_task` of the experiment returns by
its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from tokenizers import Tokenizer
from torch import Tensor

from research.experiments.tasks import large_puzzles
from srm.errors import ConfigError
from srm.training.data import CountdownBatches, EpochBatches
from srm.training.finetuning.examples import Example, in_order, padded
from srm.training.loop import TrainingBatches
from srm.training.problems import countdown
from srm.training.problems.countdown import SIZES, USUAL, Bounds, Countdown, draw_split
from srm.training.problems.countdown_tokenizer import countdown_tokenizer
from srm.training.questions.questions import Question, check_apart, read_questions
from srm.training.questions.rewards import (
    final_number,
    gsm8k_strict,
    gsm8k_worked,
    results_of,
)
from srm.training.text.tokenizer import BEGIN_ID, END_ID, train_tokenizer

LONGEST_TEXT = 320
"""Most tokens of a question with its answer; longer ones are not learned."""
VOCABULARY_OF_TEXT = 2_048
READ_FOR_VOCABULARY = 10_000
"""Questions that the tokenizer is trained on, the first ones."""
ENCODED = 1_000
"""Questions that are encoded at once, to save memory."""
POOL = 4
"""Batches whose rows are sorted by length together, so that little is padded."""
EVALUATED = 512
"""Questions at the end of the file that are left out of training, for the loss."""


class PosedProblem(NamedTuple):
    """A problem as a model meets it."""

    prompt: str
    ids: list[int]
    """The prompt's ids, from the begin token."""
    is_right: Callable[[Sequence[int]], bool]
    """Whether the ids of an answer have ended and are right."""
    room: int
    """Most tokens of an answer, end token included."""
    kind: str = ""
    judged_by: str = ""
    """Text outside the prompt that `is_right` reads, such as strings that must not match."""


class EvaluatedBatches(TrainingBatches, Protocol):
    """Batches to learn from, and of what is not learned."""

    def evaluation(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return up to `count` batches that are the same for every model."""
        ...


class SolvingTask(Protocol):
    """Problems to answer, and batches of others to learn from."""

    problems: list[PosedProblem]
    begin: int
    end: int
    vocab_size: int
    longest: int
    """Most tokens of a problem with its answer, begin and end token included."""
    guesses: str
    """Words for what `guess` draws."""
    tokenizer: Tokenizer
    """The tokenizer of problems and answers."""

    def batches(self, seed: int, tokens: int) -> EvaluatedBatches:
        """Return batches of about `tokens` tokens."""
        ...

    def guess(self, samples: int, seed: int) -> list[int]:
        """Answer each problem so often without a model; return how often that is right."""
        ...


class CountdownTask:
    """Countdown puzzles; learned ones are drawn, none of them held out."""

    begin, end = countdown.BOS, countdown.EOS
    vocab_size = len(countdown.VOCABULARY)
    longest = countdown.LONGEST
    guesses = "random combinations"

    def __init__(self, puzzles: Mapping[str, Sequence[Countdown]]) -> None:
        """`puzzles` has those to answer by kind."""
        self.tokenizer = countdown_tokenizer()
        self._puzzles = [*chain.from_iterable(puzzles.values())]
        self.problems = [
            PosedProblem(
                puzzle.prompt,
                ids := prompt_ids(puzzle),
                partial(is_right, puzzle),
                self.longest - len(ids),
                kind,
            )
            for kind, of_kind in puzzles.items()
            for puzzle in of_kind
        ]

    def batches(self, seed: int, tokens: int) -> CountdownBatches:
        return CountdownBatches(seed, tokens, "direct")

    def guess(self, samples: int, seed: int) -> list[int]:
        return draw_random(self._puzzles, samples, seed)


class LargeCountdownTask:
    """Countdown puzzles of seven numbers with large targets."""

    begin, end = large_puzzles.BEGIN, large_puzzles.END
    vocab_size = len(large_puzzles.VOCABULARY)
    longest = large_puzzles.LONGEST
    guesses = "random combinations"

    def __init__(self, puzzles: Sequence[Countdown]) -> None:
        """`puzzles` are those to answer."""
        self._puzzles = puzzles
        self.tokenizer = countdown_tokenizer(large_puzzles.VOCABULARY)
        self.problems = [self._posed(puzzle) for puzzle in puzzles]

    def _posed(self, puzzle: Countdown) -> PosedProblem:
        prompt = large_puzzles.prompt_of(puzzle)
        ids = [self.begin, *large_puzzles.parse_ids(prompt)]
        return PosedProblem(prompt, ids, partial(self._is_right, puzzle), self.longest - len(ids))

    def _is_right(self, puzzle: Countdown, ids: Sequence[int]) -> bool:
        text = " ".join(large_puzzles.VOCABULARY[token] for token in ids[:-1])
        return bool(ids) and ids[-1] == self.end and countdown.is_solved(puzzle, text)

    def batches(self, seed: int, tokens: int) -> large_puzzles.LargeBatches:
        return large_puzzles.LargeBatches(seed, tokens)

    def guess(self, samples: int, seed: int) -> list[int]:
        return draw_random(self._puzzles, samples, seed, large_puzzles.BOUNDS)


class TextBatches:
    """Questions with worked answers in epochs, a row each, right-padded; answers are learned."""

    def __init__(self, examples: Sequence[Example], seed: int, tokens: int) -> None:
        self._learned, self._held = examples[:-EVALUATED], examples[-EVALUATED:]
        mean_length = np.mean([len(example.ids) for example in examples])
        self._rows = max(1, round(tokens / mean_length))
        self._pools = EpochBatches(self._learned, POOL * self._rows, seed)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        pool = sorted(self._pools[index // POOL], key=lambda example: len(example.ids))
        begin = index % POOL * self._rows
        return padded(pool[begin : begin + self._rows])

    def evaluation(self, count: int) -> list[tuple[Tensor, Tensor]]:
        return in_order(self._held[: count * self._rows], self._rows)


class TextTask:
    """Questions of a file, whose answers end with `#### <number>`; those of another one are
    learned, by a tokenizer that is trained on them. The results of all steps are judged: guesses
    are too often right in the last one alone."""

    begin, end = BEGIN_ID, END_ID
    longest = LONGEST_TEXT
    guesses = "answers drawn from those of the training questions"

    def __init__(self, train: Path, by_kind: Mapping[str, Sequence[Question]]) -> None:
        """`by_kind` has the questions to answer. Raises ConfigError for a file that cannot be
        learned from, and for questions that it has or that are too long."""
        asked = [*chain.from_iterable(by_kind.values())]
        learned = read_questions(train)
        check_apart("input", learned, asked)
        self._learned_results = Counter(results("train", learned))
        for question in learned:
            if gsm8k_strict(question.answer, question) != 1:
                raise ConfigError(
                    f"train: the answer of {question.question!r:.200} must have one `#### <number>`"
                )
        texts = [
            part for row in learned[:READ_FOR_VOCABULARY] for part in (row.question, row.answer)
        ]
        self.tokenizer = train_tokenizer(texts, VOCABULARY_OF_TEXT)
        self.vocab_size = self.tokenizer.get_vocab_size()
        self._examples = encode(self.tokenizer, learned, self.longest)
        if len(self._examples) < 2 * EVALUATED:
            raise ConfigError(
                f"train: {train} must have {2 * EVALUATED} rows of at most {self.longest} tokens, "
                f"has {len(self._examples)} of {len(learned)}"
            )
        self._results = results("input", asked)
        self.problems = [
            self._problem(question, kind)
            for kind, of_kind in by_kind.items()
            for question in of_kind
        ]

    def _problem(self, question: Question, kind: str) -> PosedProblem:
        prompt = question.prompt()
        ids = self.tokenizer.encode(prompt).ids
        if len(ids) >= self.longest:
            raise ConfigError(
                f"input: {question.question!r:.200} has {len(ids)} tokens with what is put around "
                f"it, must have fewer than {self.longest}"
            )

        room = self.longest - len(ids)
        return PosedProblem(prompt, ids, partial(self._is_right, question), room, kind)

    def _is_right(self, question: Question, ids: Sequence[int]) -> bool:
        """Whether an answer has ended and its results are right."""
        if not ids or ids[-1] != END_ID:
            return False
        return gsm8k_worked(self.tokenizer.decode(ids[:-1]), question) == 1.0

    def batches(self, seed: int, tokens: int) -> TextBatches:
        return TextBatches(self._examples, seed, tokens)

    def guess(self, samples: int, seed: int) -> list[int]:
        counts = np.array([self._learned_results[wanted] for wanted in self._results])
        random = np.random.default_rng(seed)
        right: list[int] = random.binomial(samples, counts / self._learned_results.total()).tolist()
        return right


def encode(tokenizer: Tokenizer, questions: Sequence[Question], longest: int) -> list[Example]:
    """Return the questions of at most `longest` tokens as ids, whose answers are learned."""
    examples = []
    for begin in range(0, len(questions), ENCODED):
        some = questions[begin : begin + ENCODED]
        prompts = tokenizer.encode_batch_fast([question.prompt() for question in some])
        answers = tokenizer.encode_batch_fast(
            [f" {question.answer}" for question in some], add_special_tokens=False
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = np.array([*prompt.ids, *answer.ids, END_ID], np.int32)
            if len(ids) <= longest:
                examples.append(Example(ids, np.arange(len(ids)) >= len(prompt.ids)))
    return examples


def results(setting: str, questions: Sequence[Question]) -> list[tuple[Decimal | None, ...]]:
    """Return the results of each answer's steps and the number that it ends with. Raises
    ConfigError where there is none."""
    try:
        return [(*results_of(row.answer), final_number(row)) for row in questions]
    except ValueError as error:
        raise ConfigError(f"{setting}: {error}") from None


def draw_puzzles(random: np.random.Generator, count: int, is_held_out: bool) -> list[Countdown]:
    """Draw puzzles of four, five and six numbers in turn that are, or are not, held out."""
    each = -(-count // len(SIZES))
    by_size = (draw_split(random, each, size, False, is_held_out).problems for size in SIZES)
    return list(chain.from_iterable(zip(*by_size, strict=True)))[:count]


def draw_random(
    problems: Sequence[Countdown], samples: int, seed: int, bounds: Bounds = USUAL
) -> list[int]:
    """Combine the numbers of each problem at random; return how often that makes the target."""
    right = []
    for place, problem in enumerate(problems):
        random, drawn, solved = np.random.default_rng((seed, place)), 0, 0
        while drawn < samples:
            count = min(100_000, samples - drawn)
            rows = np.tile(np.array(problem.numbers), (count, 1))
            made = countdown.combine(random, rows, False, bounds).target
            solved += int((made == problem.target).sum())
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
