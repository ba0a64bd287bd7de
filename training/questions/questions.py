"""Questions and their answers, from JSON lines as GSM8K has them. Knows no tokens and no model."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.errors import UNDECODABLE, ConfigError

PROMPT = "Question: {question}\nAnswer:"
"""The form of a prompt, that of the bundled model's problems and of lm-eval's GSM8K."""


class Question(msgspec.Struct, frozen=True):
    """One line; members besides these are ignored."""

    question: str
    answer: str
    """What rewards compare with: of GSM8K a solution that ends with the line `#### <number>`."""

    def prompt(self, form: str = PROMPT) -> str:
        """Return the text to complete: `form` with `{question}` replaced."""
        return form.replace("{question}", self.question)


def read_questions(path: Path) -> list[Question]:
    """Read a file of JSON lines; empty lines are skipped. Raises ConfigError, which names file and
    line, also where there is no question at all."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"questions: cannot read {path}: {error.strerror}") from None
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line, type=Question))
            except UNDECODABLE as error:
                raise ConfigError(
                    f"questions: {path}, line {number}: {error}; a line is an object with the "
                    "members question and answer, both text"
                ) from None
    if not found:
        raise ConfigError(f"questions: {path} has no question")
    return found
