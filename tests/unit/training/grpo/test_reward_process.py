"""Rewards come from a process of their own: whatever a function does, the run gets an answer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from srm.errors import ConfigError
from srm.training.questions.questions import Question
from srm.training.questions.reward_process import RewardProcess

FUNCTIONS = """
import os, re, sys, time

def length(completion, question):
    print("a line that is no answer")
    return len(completion) + len(question.answer)

def process(completion, question):
    return os.getpid()

def hangs(completion, question):
    while completion == "hang":
        pass
    return 0.0

def regex(completion, question):
    return float(bool(re.fullmatch("(a+)+b", "a" * 64)))

def leaves(completion, question):
    os._exit(7)

def raises(completion, question):
    sys.exit("done")

def nan(completion, question):
    return float("nan")

def huge(completion, question):
    return -1e200
"""
QUESTION = Question("1?", "234")
LONG_S = 300.0
"""Limit that nothing here comes near."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[RewardProcess]]:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    running: list[RewardProcess] = []
    yield running
    for process in running:
        process.close()


def start(
    running: list[RewardProcess], folder: Path, names: str, limit_s: float = LONG_S
) -> RewardProcess:
    functions = [f"{folder}/functions.py:{name}" for name in names.split()]
    running.append(RewardProcess(functions, [1.0] * len(functions), limit_s))
    return running[-1]


def test_each_text_has_a_reward_of_each_function(
    started: list[RewardProcess], tmp_path: Path
) -> None:
    reward = start(started, tmp_path, "length process")
    for texts in (["", "ab"], ["abc"], []):
        results = reward.rewards(texts, QUESTION)
        assert [row[0] for row in results] == [3 + len(text) for text in texts]
        assert all(row[1] not in (0, os.getpid()) for row in results)


def test_very_many_texts_are_answered(started: list[RewardProcess], tmp_path: Path) -> None:
    """More than the connection holds, in both directions."""
    reward = start(started, tmp_path, "hangs")
    assert reward.rewards(["x" * 1_000] * 5_000, QUESTION).shape == (5_000, 1)


@pytest.mark.parametrize("name", ["hangs", "regex"])
def test_a_function_that_never_returns_is_named_with_its_completion(
    started: list[RewardProcess], tmp_path: Path, name: str
) -> None:
    reward = start(started, tmp_path, name, limit_s=0.2)
    with pytest.raises(ConfigError, match=r"longer than reward_limit_s = 0\.2 for 'hang'"):
        reward.rewards(["hang"], QUESTION)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("leaves", "reward ended its process, with code 7, for 'x'"),
        ("raises", r"reward failed for 'x': SystemExit\('done'\)"),
        ("nan", r"reward must be a number of at most 1e\+18 either way, got nan for 'x'"),
        ("huge", r"reward must be a number of at most 1e\+18 either way, got -1e\+200 for 'x'"),
    ],
)
def test_what_a_function_does_instead_is_said(
    started: list[RewardProcess], tmp_path: Path, name: str, message: str
) -> None:
    reward = start(started, tmp_path, name)
    with pytest.raises(ConfigError, match=message):
        reward.rewards(["x", "y"], QUESTION)


def test_a_function_that_is_not_there_is_refused_at_once(
    started: list[RewardProcess], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"functions\.py has no function 'lenght'"):
        start(started, tmp_path, "lenght")
