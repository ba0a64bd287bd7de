"""The questions of a run as token ids: those of each update, and those for evaluation."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Protocol

import msgspec
from tokenizers import Tokenizer

from srm.errors import ConfigError
from srm.tokenizer_file import TextEncoder
from srm.training.data import EpochBatches
from srm.training.grpo.config import DataSettings, EvaluationSettings
from srm.training.problems.drawn import Split, problems
from srm.training.questions.questions import PROMPT, Question, read_questions

log = logging.getLogger(__name__)


class Asked(msgspec.Struct, frozen=True):
    """A question and its prompt's token ids."""

    question: Question
    token_ids: list[int]


class QuestionBatches(Protocol):
    """The questions of each update; the index is the number of updates before it."""

    def __getitem__(self, index: int) -> list[Asked]: ...


class ProblemQuestions:
    """Generated word problems, new ones for each update; pretraining with its seed has others."""

    def __init__(self, tokenizer: Tokenizer, form: str, count: int, seed: int) -> None:
        self._tokenizer, self._form = tokenizer, form
        self._count, self._seed = count, seed

    def __getitem__(self, index: int) -> list[Asked]:
        drawn = islice(_generated("train", f"grpo-{self._seed}-{index}"), self._count)
        return [_asked(question, self._tokenizer, self._form) for question in drawn]


class Questions(msgspec.Struct, frozen=True):
    """All questions of a run."""

    train: QuestionBatches
    evaluation: list[Asked]
    source: str
    """Hash that identifies the questions."""


def questions(
    data: DataSettings,
    evaluations: EvaluationSettings,
    seed: int,
    tokenizer: Tokenizer,
    n_ctx: int,
    max_tokens: int,
) -> Questions:
    """Return the questions of the settings. Raises ConfigError for bad files and too few questions.

    Questions that leave less than `max_tokens` of the context to their completions are left out.
    """
    if max_tokens >= n_ctx:
        raise ConfigError(
            f"max_tokens must be below the model's context of {n_ctx} tokens, got {max_tokens}"
        )
    most, form = n_ctx - max_tokens, data.prompt or PROMPT
    evaluation: list[Asked] = []
    if data.evaluation or not data.train:
        wanted = evaluations.evaluation_questions
        if data.evaluation:
            evaluation = _read("evaluation", data.evaluation, tokenizer, form, most)
        else:
            drawn = islice(_generated("held-out", seed), wanted)
            evaluation = [_asked(question, tokenizer, form) for question in drawn]
        if evaluations.evaluate_every and len(evaluation) < wanted:
            raise ConfigError(
                f"evaluation_questions must be at most {len(evaluation)}, what evaluation has, got "
                f"{wanted}"
            )
        evaluation = evaluation[: wanted or None]
    if not data.train:
        batches = ProblemQuestions(tokenizer, form, data.questions, seed)
        return Questions(batches, evaluation, f"problems of GRPO {_digest(evaluation)}")
    train = _read("train", data.train, tokenizer, form, most)
    return Questions(
        EpochBatches(train, data.questions, seed),
        evaluation,
        f"{_digest(train)} {_digest(evaluation)}",
    )


def _generated(split: Split, seed: int | str) -> Iterator[Question]:
    return (Question(problem.question, problem.solution) for problem in problems(split, seed))


def _asked(question: Question, tokenizer: Tokenizer, form: str) -> Asked:
    return Asked(question, TextEncoder(tokenizer).encode([question.prompt(form)])[0])


def _read(
    name: str, paths: tuple[Path, ...], tokenizer: Tokenizer, form: str, most: int
) -> list[Asked]:
    read = (question for path in paths for question in read_questions(path))
    results = [_asked(question, tokenizer, form) for question in read]
    short = [asked for asked in results if len(asked.token_ids) <= most]
    if not short:
        raise ConfigError(f"{name}: all prompts have more than {most} tokens: lower max_tokens")
    if len(short) < len(results):
        log.warning(
            "%s: %d of %d prompts have more than %d tokens: left out",
            *(name, len(results) - len(short), len(results), most),
        )
    return short


def _digest(askeds: list[Asked]) -> str:
    return hashlib.sha256(msgspec.json.encode(askeds)).hexdigest()[:16]
