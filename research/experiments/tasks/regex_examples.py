"""Regexes from examples as a task of `coverage`: those of models/regex/drawn.jsonl are answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
from torch import Tensor

from research.experiments.tasks.tasks import PosedProblem
from srm.errors import ConfigError
from srm.training.finetuning.examples import Example, padded
from srm.training.problems import regexes
from srm.training.problems.regex_tokenizer import (
    BEGIN,
    CHARACTERS,
    END,
    IDS,
    VOCABULARY,
    regex_tokenizer,
)
from srm.training.questions.questions import Question, read_questions

DRAWN = Path(__file__).resolve().parents[3] / "models" / "regex" / "drawn.jsonl"
"""Tasks of regexes that are held out from training."""
MEAN_LENGTH = 84
"""Mean tokens of a prompt with its answer; rows are padded beyond it."""
POOL = 4
"""Batches whose rows are sorted by length together, so that little is padded."""


def trained_regexes(seed: int) -> Iterator[str]:
    """Yield answers of training without end."""
    return (task.regex for task in regexes.tasks(f"guesses {seed}"))


def count_fitting(questions: Sequence[Question], guesses: Sequence[str]) -> list[int]:
    """Return how many of the guesses fit each question."""
    matches = [regexes.compiled(guess).fullmatch for guess in guesses]
    counts = []
    for question in questions:
        strings = regexes.parse_task(question.question, question.answer)
        right, wrong = ([text.encode() for text in texts] for texts in strings)
        fitting = (match for match in matches if all(map(match, right)))
        counts.append(sum(not any(map(match, wrong)) for match in fitting))
    return counts


class RegexExamples:
    """Strings that a regex to write must match, and others that it must not."""

    begin, end = IDS[BEGIN], IDS[END]
    vocab_size = len(VOCABULARY)
    longest = regexes.LONGEST
    guesses = "regexes of training"

    def __init__(self, count: int) -> None:
        """The first `count` tasks are answered. Raises ConfigError if there are fewer."""
        self._questions = read_questions(DRAWN)[:count]
        if count > len(self._questions):
            raise ConfigError(f"problems = {count}, but {DRAWN} has {len(self._questions)}")
        self.tokenizer = regex_tokenizer()
        self.problems = [
            PosedProblem(
                question.question,
                write_ids(question.question),
                partial(self._is_right, question),
                regexes.MOST_ANSWER + 1,
                judged_by=question.answer,
            )
            for question in self._questions
        ]

    def _is_right(self, question: Question, ids: Sequence[int]) -> bool:
        """Whether an answer has ended, is as short as those that are learned, has no other special
        token, and fits."""
        *written, last = ids or [self.begin]
        is_whole = last == self.end and len(written) <= regexes.MOST_ANSWER
        if not is_whole or any(token >= len(CHARACTERS) for token in written):
            return False
        text = "".join(VOCABULARY[token] for token in written)
        return regexes.is_solved(question.question, question.answer, text)

    def batches(self, seed: int, tokens: int) -> RegexRows:
        return RegexRows(seed, tokens)

    def guess(self, samples: int, seed: int) -> list[int]:
        return count_fitting(self._questions, [*islice(trained_regexes(seed), samples)])


class RegexRows:
    """Batches of about `tokens` tokens, a task a row, right-padded, of which the regexes are
    learned: inputs and targets, int64 [rows, length]. None is held out."""

    def __init__(self, seed: int, tokens: int) -> None:
        self._seed, self._rows = seed, max(1, tokens // MEAN_LENGTH)
        self._pool: tuple[int, list[Example]] = -1, []

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number, place = divmod(index, POOL)
        if self._pool[0] != number:
            self._pool = number, self._drawn(f"{self._seed} {number}", POOL, is_held_out=False)
        return padded(self._pool[1][place * self._rows : (place + 1) * self._rows])

    def evaluation(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Return batches of held-out tasks, the same ones for every model."""
        return [padded(self._drawn(f"{index}", 1, is_held_out=True)) for index in range(count)]

    def _drawn(self, seed: str, batches: int, is_held_out: bool) -> list[Example]:
        drawn = islice(regexes.tasks(seed, is_held_out), batches * self._rows)
        examples = []
        for task in drawn:
            prompt = write_ids(task.prompt)
            ids = np.array([*prompt, *(IDS[name] for name in task.regex), IDS[END]], np.int32)
            examples.append(Example(ids, np.arange(len(ids)) >= len(prompt)))
        return sorted(examples, key=lambda example: len(example.ids))


def write_ids(prompt: str) -> list[int]:
    """Return the ids of a prompt, from the begin token."""
    return [IDS[BEGIN], *(IDS[name] for name in prompt)]
