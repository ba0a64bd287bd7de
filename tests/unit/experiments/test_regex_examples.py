"""Regexes from examples as a task of `coverage`."""

from __future__ import annotations

import re

import pytest
import torch

from research.experiments.tasks.regex_examples import (
    DRAWN,
    RegexExamples,
    RegexRows,
    count_fitting,
)
from srm.errors import ConfigError
from srm.training.data import IGNORED
from srm.training.problems import regexes
from srm.training.problems.regex_tokenizer import BEGIN, END, IDS, UNKNOWN, VOCABULARY
from srm.training.questions.questions import Question, read_questions

DATES = Question("✓2024-01-15✓1999-12-31→", "✗24-01-15✗2024/01/15")


def test_answers_are_judged_and_guessed() -> None:
    task = RegexExamples(5)
    question = read_questions(DRAWN)[2]
    problem = task.problems[2]
    assert problem.prompt == question.question
    assert problem.ids == task.tokenizer.encode(problem.prompt).ids
    ids = [IDS[letter] for letter in r"[A-Z](//\d+)*"]
    assert regexes.is_solved(question.question, question.answer, r"[A-Z](//\d+)*")
    assert problem.is_right([*ids, IDS[END]])
    for wrong in ([], ids, [IDS[END]], [IDS["x"], IDS[END]], [*ids, IDS["+"], IDS[END]]):
        assert not problem.is_right(wrong)
    listed = "|".join(map(re.escape, regexes.parse_task(question.question, "")[0])) + 20 * "|x"
    assert regexes.is_solved(question.question, question.answer, listed)
    assert not problem.is_right([*(IDS[letter] for letter in listed), IDS[END]]), "too long"
    assert problem.room == regexes.MOST_ANSWER + 1 and problem.judged_by == question.answer
    for special in (BEGIN, END, UNKNOWN):
        assert not problem.is_right([IDS[special], *ids, IDS[END]])
    assert task.guess(300, 1) == task.guess(300, 1)
    with pytest.raises(ConfigError, match=r"problems = 301, but .*drawn.jsonl has 300"):
        RegexExamples(301)


def test_fitting_guesses_are_counted() -> None:
    guesses = [r"\d+-\d\d-\d\d", r"\d{4}-\d\d-\d\d", r".{4}-.*", r"\d{4}-.*"]
    easier = Question(DATES.question, "")
    assert count_fitting([DATES, easier], guesses) == [3, 4]


def test_a_row_is_a_task_of_which_the_regex_is_learned() -> None:
    batches = RegexRows(3, 2_048)
    pool = [batches[index] for index in range(4)]
    again = RegexRows(3, 2_048)
    assert all(torch.equal(again[at][0], pool[at][0]) for at in (2, 0, 3))
    assert [inputs.shape[1] for inputs, _ in pool] == sorted(inputs.shape[1] for inputs, _ in pool)
    held_out = batches.evaluation(2)
    for is_held_out, (inputs, targets) in [(False, pool[1]), (True, held_out[1])]:
        assert len(inputs) == len(targets) == 24
        for row, learned in zip(inputs.tolist(), targets.tolist(), strict=True):
            *answer, end = [token for token in learned if token != IGNORED]
            text = "".join(VOCABULARY[token] for token in answer)
            assert end == IDS[END] and regexes.is_held_out(text) == is_held_out
            arrow = row.index(IDS[regexes.ANSWER])
            assert learned[arrow : arrow + len(answer)] == answer
            prompt = "".join(VOCABULARY[token] for token in row[1 : arrow + 1])
            assert row[0] == IDS[BEGIN] and regexes.is_solved(prompt, "", text)
