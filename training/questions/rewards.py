"""Rewards of completions: any function of a completion and its question, named by settings.

Those of GSM8K compare values, so that 1,000 is 1000 and 18.00 is 18. They read a completion up to
where it begins a question of its own. Those of countdown and regexes read the task itself.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from importlib import import_module

from srm.errors import ConfigError
from srm.training.problems import countdown as puzzles
from srm.training.problems import regexes
from srm.training.questions.questions import Question

Reward = Callable[[str, Question], float]

MOST_REWARD = 1e18
"""Largest reward, as of other numbers of training: sums of squares still have a root."""
_STRICT = re.compile(r"####\s*([-$0-9.,]*[0-9])")
_RESULT = re.compile(r"=\s*[$€£]?(-?[0-9][0-9,]*(?:\.[0-9]+)?)")
_NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?|-?\.[0-9]+")


def gsm8k_strict(completion: str, question: Question) -> float:
    """Return 1.0 if the first `#### <number>` is the answer's, else 0.0."""
    match, wanted = _STRICT.search(_own(completion)), final_number(question)
    return float(match is not None and _value(match[1]) == wanted)


def gsm8k_lenient(completion: str, question: Question) -> float:
    """Return 1.0 if the last number, wherever it is, is the answer's, else 0.0."""
    numbers, wanted = _NUMBER.findall(_own(completion)), final_number(question)
    return float(bool(numbers) and _value(numbers[-1]) == wanted)


def gsm8k_worked(completion: str, question: Question) -> float:
    """Return 1.0 if the first `#### <number>` is the answer's, and so are the results before it,
    which stand behind `=`, in their order; else 0.0."""
    own = results_of(_own(completion))
    return gsm8k_strict(completion, question) * (own == results_of(question.answer))


def results_of(text: str) -> list[Decimal | None]:
    """Return the numbers behind `=` in worked steps, such as `2*3=6` or `<<2*3=6>>6`."""
    return [_value(number) for number in _RESULT.findall(text.partition("####")[0])]


def final_number(question: Question) -> Decimal:
    """Return the value after `####`, or of the whole answer. Raises ValueError if it is no
    number."""
    value = _value(question.answer.rpartition("####")[2])
    if value is None:
        raise ValueError(f"the answer of {question.question!r:.100} ends with no number")
    return value


def countdown(completion: str, question: Question) -> float:
    """Return 1.0 if an expression, or steps, make the target of "make 64 of 25 3 7 4 :" with each
    of its numbers used once, else 0.0."""
    return float(puzzles.is_solved(puzzles.parse_prompt(question.question), completion))


def regex(completion: str, question: Question) -> float:
    """Return 1.0 if a regex matches the strings behind ✓ of the question "✓2024-01-15✓1999-12-31→",
    and none behind ✗ of the answer "✗2024/01/15✗24-01-15", else 0.0."""
    return float(regexes.is_solved(question.question, question.answer, completion))


def load_reward(name: str) -> Reward:
    """Return the function `module:function` or `path/to/file.py:function`; whatever it returns is
    checked where it is called, by `rewarded`. Raises ConfigError where there is none."""
    place, colon, function = name.rpartition(":")
    if not colon or not place or not function:
        raise ConfigError(f"reward must be module:function or file.py:function, got {name!r}")
    try:
        if place.endswith(".py"):
            loaded = runpy.run_path(place).get(function)
        else:
            loaded = getattr(import_module(place), function, None)
    except (Exception, SystemExit) as error:  # it is the user's code
        raise ConfigError(f"reward: {place} cannot be imported: {error!r}") from error
    if not callable(loaded):
        raise ConfigError(f"reward: {place} has no function {function!r}")
    reward: Reward = loaded
    return reward


def rewarded(reward: Reward, completion: str, question: Question) -> float:
    """Return a completion's reward. Raises ConfigError if the function fails or returns no number
    of at most MOST_REWARD."""
    try:
        reward_value = float(reward(completion, question))
    except (Exception, SystemExit) as error:  # it is the user's code
        raise ConfigError(f"reward failed for {completion!r:.200}: {error!r}") from error
    if not abs(reward_value) <= MOST_REWARD:
        raise ConfigError(
            f"reward must be a number of at most {MOST_REWARD:g} either way, got {reward_value} "
            f"for {completion!r:.200}"
        )
    return reward_value


def _own(completion: str) -> str:
    return completion.partition("Question:")[0]


def _value(text: str) -> Decimal | None:
    try:
        value = Decimal(re.sub(r"[\s$,]", "", text))
    except InvalidOperation:
        return None
    return value if value.is_finite() else None
