"""A problem, its answer in several styles, and the check of an answer."""

from __future__ import annotations

import hashlib
import operator
import re
from dataclasses import dataclass
from typing import Literal

Style = Literal["equations", "prose", "number"]

HELD_OUT_SHARE = 64
"""One problem in this many is held out."""

_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.floordiv}

Turn = tuple[str, str]
"""A prompt, which ends with "Answer:", and what follows it."""
Step = tuple[int, str, int, str]
"""First number, operator, second number, and a sentence with `{}` for the equation."""


@dataclass(frozen=True)
class Problem:
    """`prompt` ends with "Answer:"; a solution ends with the line "#### <number>"."""

    kind: str
    question: str
    steps: tuple[str, ...]
    sentences: tuple[str, ...]
    answer: int

    @property
    def prompt(self) -> str:
        return self.prompt_with("")

    @property
    def solution(self) -> str:
        return self.solution_in("equations")

    def prompt_with(self, system: str) -> str:
        """Return the prompt with a system message before it, or with none."""
        return prompt(self.question, system)

    def solution_in(self, style: Style) -> str:
        """Return what follows the prompt."""
        lines = {"equations": self.steps, "prose": (" ".join(self.sentences),), "number": ()}
        return " " + "\n".join((*lines[style], f"#### {self.answer}"))

    @property
    def is_held_out(self) -> bool:
        digest = hashlib.sha256(self.question.encode()).digest()
        return int.from_bytes(digest[:8], "little") % HELD_OUT_SHARE == 0


def prompt(question: str, system: str = "", tool: str | None = None) -> str:
    """Return a question as a model gets it, with a system message before it and a tool that it may
    call, or without."""
    before = f"System: {system}\n" if system else ""
    before += f"Tools: {tool}\n" if tool else ""
    return f"{before}Question: {question}\nAnswer:"


def problem(kind: str, question: str, *steps: Step) -> Problem:
    """Write out each step; the last one makes the answer."""
    equations, sentences, result = [], [], 0
    for a, sign, b, sentence in steps:
        result = _OPERATIONS[sign](a, b)
        equations.append(f"{a} {sign} {b} = {result}")
        sentences.append(sentence.format(equations[-1]))
    return Problem(kind, question, tuple(equations), tuple(sentences), result)


def extract_answer(text: str) -> int | None:
    """Return the number after the first "####", or None."""
    match = re.search(r"####\s*(-?\d+)", text)
    return int(match.group(1)) if match else None


def reward(problem: Problem, text: str) -> float:
    """Return 1.0 if `text` gives the right answer, else 0.0."""
    return float(extract_answer(text) == problem.answer)
