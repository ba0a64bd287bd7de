"""Questions and their answers, as GSM8K has them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from srm.errors import ConfigError, in_words
from srm.training.text.rows import rows

PROMPT = "Question: {question}\nAnswer:"
"""Template of a prompt, the same as for the bundled model's problems and in lm-eval's GSM8K."""


class Question(msgspec.Struct, frozen=True):
    """One row; members besides these are ignored."""

    question: str
    answer: str
    """The right answer, which rewards compare with; in GSM8K a solution that ends with the line
    `#### <number>`."""

    def prompt(self, form: str = PROMPT) -> str:
        """Return the text to complete: `form` with `{question}` replaced."""
        return form.replace("{question}", self.question)


def check_apart(setting: str, learned: Iterable[Question], asked: Iterable[Question]) -> None:
    """Raise ConfigError, which names the setting, for a question to answer that is also learned, or
    is there twice; spaces make no difference."""
    known = {" ".join(question.question.split()): "models are trained on" for question in learned}
    for question in asked:
        plain = " ".join(question.question.split())
        if plain in known:
            raise ConfigError(f"{setting}: {known[plain]} {question.question!r:.200}: leave it out")
        known[plain] = "there is twice"


def check_prompt(form: str) -> None:
    """Raise ValueError for a template without its question; an empty one stands for PROMPT."""
    if form and "{question}" not in form:
        raise ValueError(f"prompt must have {{question}} in it, got {form!r}")


def read_questions(path: Path) -> list[Question]:
    """Read a file .jsonl or .parquet. Raises ConfigError, which names file and row, also where
    there is no question at all."""
    questions = []
    for where, row in rows(path, "questions"):
        try:
            questions.append(msgspec.convert(row, Question))
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"questions: {where}: {in_words(error)}; a row has the members "
                "question and answer, both text"
            ) from None
    if not questions:
        raise ConfigError(f"questions: {path} has no question")
    return questions
