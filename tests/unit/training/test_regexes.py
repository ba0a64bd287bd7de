"""Regexes from examples: the tasks that are drawn, the hand-written ones, tokens and batches."""

from __future__ import annotations

import json
import re
from itertools import islice, pairwise
from pathlib import Path

import pytest
import re2
import torch

from srm.loadtest.records import ROOT
from srm.tokenizer_file import read_tokenizer
from srm.training.data import IGNORED, RegexBatches
from srm.training.problems import regexes
from srm.training.problems.problem import HELD_OUT_SHARE
from srm.training.problems.regex_tokenizer import (
    BEGIN,
    END,
    IDS,
    UNKNOWN,
    VOCABULARY,
    regex_tokenizer,
)
from srm.training.problems.regexes import RegexTask, is_solved, parse_task, write_prompt
from srm.training.questions.questions import Question, read_questions
from srm.training.questions.rewards import regex as regex_reward
from srm.training.text.tokenizer import special_ids

WRITTEN = ROOT / "models" / "regex" / "written.jsonl"
DATES = write_prompt(("2024-01-15", "1999-12-31")), "✗24-01-15✗2024/01/15✗"


def _drawn(count: int, held_out: bool = False) -> list[RegexTask]:
    return list(islice(regexes.tasks(0, held_out), count))


def test_a_drawn_regex_is_right_for_its_strings() -> None:
    tasks = _drawn(1_000)
    for task in tasks:
        assert parse_task(task.prompt, task.misses) == ([*task.matching], [*task.missing])
        assert task.regex == task.regex.strip()  # an answer is read so
        assert (
            is_solved(task.prompt, task.misses, task.regex)
            and len(task.regex) <= regexes.MOST_ANSWER
        )
        assert len(task.prompt) <= regexes.MOST_PROMPT
        for strings in (task.matching, task.missing):
            assert regexes.LEAST_STRINGS <= len({*strings}) == len(strings) <= regexes.MOST_STRINGS
        pattern = re.compile(task.regex, re.ASCII)  # another engine
        assert all(map(pattern.fullmatch, task.matching))
        assert not any(map(pattern.fullmatch, task.missing))
    assert len({task.regex for task in tasks}) > 800
    assert tasks[:50] == _drawn(50)


def test_no_upper_bound_is_without_a_reason() -> None:
    bounded = [task for task in _drawn(1_000) if re.search(r"\{\d+,\d+\}", task.regex)]
    assert len(bounded) > 50
    for task in bounded:
        unbounded = re.sub(r"\{\d+,\d+\}", "+", task.regex, count=1)
        assert not is_solved(task.prompt, task.misses, unbounded)


def test_held_out_regexes_are_drawn_apart() -> None:
    assert all(task.is_held_out for task in _drawn(20, held_out=True))
    trained = _drawn(200)
    assert not any(task.is_held_out for task in trained)
    share = sum(regexes.is_held_out(f"{number}+") for number in range(20_000)) / 20_000
    assert 0.8 < share * HELD_OUT_SHARE < 1.2


def test_every_written_task_is_solved_by_its_reference() -> None:
    references = [json.loads(line)["regex"] for line in WRITTEN.read_text().splitlines()]
    questions = read_questions(WRITTEN)
    assert len({question.question for question in questions}) == len(questions) == 200
    for question, reference in zip(questions, references, strict=True):
        assert len(question.question) <= regexes.MOST_PROMPT
        for strings in parse_task(question.question, question.answer):
            assert 4 <= len({*strings}) == len(strings) <= 8
        assert regex_reward(f" {reference}\n", question) == 1


@pytest.mark.parametrize(
    "answer", ["", r"\d{4}-", r"\d{4}.\d\d.\d\d", ".*", "(", r"2024-01-15|(?=1).*"]
)
def test_a_regex_that_does_not_fit_is_no_solution(answer: str) -> None:
    assert is_solved(*DATES, r"\d{4}-\d\d-\d\d")
    assert not is_solved(*DATES, answer)
    assert regex_reward(answer, Question(*DATES)) == 0


def test_a_task_is_read_back_with_any_character() -> None:
    ascii_text = "".join(VOCABULARY[:95])
    task = RegexTask((ascii_text, "", " "), ("-✗"[:1], "\\n"), "")
    assert parse_task(f" {task.prompt}\n", task.misses) == ([*task.matching], [*task.missing])
    assert parse_task("✓→", "") == ([""], [])
    for text in ("", "✓a", "✗a✓b→", "✓a✗b→", "✓é→", "✓a→→"):
        with pytest.raises(ValueError, match="no regex task"):
            parse_task(text, "")
    for text in ("a", "✓a", "✗é", r"\d+"):
        with pytest.raises(ValueError, match="no strings that must not match"):
            parse_task("✓a→", text)


def test_every_character_is_a_token(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(regex_tokenizer().to_str())
    tokenizer = read_tokenizer(path)
    assert special_ids(tokenizer) == (IDS[BEGIN], IDS[END])
    text = "".join(VOCABULARY[:98])
    assert tokenizer.encode(text).ids == [IDS[BEGIN], *range(98)]
    assert tokenizer.decode([IDS[BEGIN], *range(98), IDS[END]]) == text
    assert tokenizer.encode("aé\nb").ids == [
        IDS[BEGIN],
        IDS["a"],
        IDS[UNKNOWN],
        IDS[UNKNOWN],
        IDS["b"],
    ]


def test_a_row_is_full_of_tasks_of_which_the_ends_are_learned() -> None:
    batches = RegexBatches(1, 4_000, 400)
    for index in (0, 3):
        inputs, targets = batches[index]
        again = RegexBatches(1, 4_000, 400)[index]
        assert torch.equal(inputs, again[0]) and torch.equal(targets, again[1])
        assert inputs.shape == targets.shape == (10, 400)
        used = 0
        for row, learned in zip(inputs.tolist(), targets.tolist(), strict=True):
            begins = [place for place, token in enumerate(row) if token == IDS[BEGIN]]
            assert begins[0] == 0
            for first, end in pairwise([*begins, len(row)]):
                answer = row.index(IDS[regexes.ANSWER], first)
                last = row.index(IDS[END], answer)
                used += last + 1 - first
                prompt, text = (
                    "".join(VOCABULARY[token] for token in row[a + 1 : b])
                    for a, b in ((first, answer + 1), (answer, last))
                )
                assert is_solved(prompt, "", text) and not regexes.is_held_out(text)
                shown = answer - prompt[::-1].index(regexes.MATCHES)
                assert row[shown] == IDS[regexes.MATCHES]
                assert learned[shown:last] == row[shown + 1 : last + 1]
                assert {*learned[first:shown], *learned[last:end]} == {IGNORED}
        assert used > 0.9 * inputs.numel()
    for inputs, targets in batches.evaluation(2):
        answers = targets[0][targets[0] != IGNORED].tolist()
        text = "".join(VOCABULARY[token] for token in answers[: answers.index(IDS[END])])
        assert regexes.is_held_out(text) and IDS[regexes.ANSWER] in inputs[0]


def test_the_grammar_is_refused_by_no_engine() -> None:
    for task in _drawn(300):
        re2.compile(task.regex)
        re.compile(task.regex)
