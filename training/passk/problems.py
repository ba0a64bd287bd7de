"""The problems of a run: prompts, and the questions that reward functions get."""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path

import msgspec

from srm.errors import ConfigError
from srm.training.passk.config import PassKConfig
from srm.training.problems.drawn import Split, problems
from srm.training.questions.questions import PROMPT, Question, read_questions


class PromptProblem(msgspec.Struct, frozen=True):
    """One prompt to complete."""

    prompt: str
    question: Question


def read_problems(config: PassKConfig) -> list[PromptProblem]:
    """Return the problems that the settings ask for. Raises ConfigError for unreadable files and
    for too few problems."""
    form = config.prompt or PROMPT
    examples = _first("shots", config.shots, config.examples, "train", config.seed)
    before = "".join(f"{example.prompt(form)} {example.answer.strip()}\n\n" for example in examples)
    questions = _first("problems", config.problems, config.input, "held-out", config.seed)
    return [PromptProblem(before + question.prompt(form), question) for question in questions]


def digest(results: list[PromptProblem]) -> str:
    """Return a hash that identifies these problems."""
    return hashlib.sha256(msgspec.json.encode(results)).hexdigest()[:16]


def _first(name: str, count: int, path: Path | None, split: Split, seed: int) -> list[Question]:
    if path is None:
        drawn = islice(problems(split, seed), count)
        return [Question(token.question, token.solution) for token in drawn]
    questions = read_questions(path)
    if count > len(questions):
        raise ConfigError(f"{name} = {count}, but {path} has {len(questions)} questions")
    return questions[:count] if count or name == "shots" else questions
