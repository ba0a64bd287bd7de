"""Problems are right, deterministic, and split without overlap."""

from __future__ import annotations

import json
import operator
import random
import re
from itertools import islice

import pytest

from srm.training.problems import words
from srm.training.problems.drawn import KINDS, Split, chats, instruction, problems
from srm.training.problems.patterns import conjugate, fill
from srm.training.problems.problem import Problem, extract_answer, reward
from srm.training.problems.story import in_digits
from srm.training.problems.sums import plain
from srm.training.problems.talk import ANSWER, talk

SPLITS: tuple[Split, Split] = ("train", "held-out")


def _drawn(split: Split, seed: int, count: int) -> list[Problem]:
    return list(islice(problems(split, seed), count))


@pytest.mark.parametrize("split", SPLITS)
def test_problems_are_a_function_of_split_and_seed(split: Split) -> None:
    assert _drawn(split, 3, 200) == _drawn(split, 3, 200)
    assert _drawn(split, 3, 200) != _drawn(split, 4, 200)


def test_splits_share_no_problem() -> None:
    train = {p.question for seed in range(2) for p in _drawn("train", seed, 5_000)}
    held_out = {p.question for p in _drawn("held-out", 0, 500)}
    assert not train & held_out


def test_every_kind_appears_about_equally_often() -> None:
    kinds = [p.kind for p in _drawn("train", 0, 4_000)]
    assert len(set(kinds)) == len(KINDS)
    for kind in set(kinds):
        assert 280 < kinds.count(kind) < 520


def test_names_are_seldom_seen_twice() -> None:
    r = random.Random(0)
    names = [words.name(r) for _ in range(2_000)]
    assert len(set(names)) > 0.3 * len(names)


def test_made_words_neither_offend_nor_are_words_of_their_own() -> None:
    r = random.Random(5)
    made = {words.name(r).lower() for _ in range(30_000)} | {words.thing(r) for _ in range(30_000)}
    assert not [item for item in made if re.search("shit|fuck|cock|dick|coon|nazi|sex|cum", item)]
    assert not made & {"she", "he", "the", "we", "me"} and "robin" in made


def test_a_system_message_chooses_the_style_of_the_answer() -> None:
    (one,) = _drawn("train", 4, 1)
    assert one.prompt_with("Explain.") == f"System: Explain.\n{one.prompt}"
    assert one.solution == f" {chr(10).join(one.steps)}\n#### {one.answer}"
    assert one.solution_in("number") == f" #### {one.answer}"
    prose = one.solution_in("prose")
    assert all(step in prose for step in one.steps)
    assert prose.endswith(f".\n#### {one.answer}") and prose.count("\n") == 1
    r = random.Random(0)
    drawn = [instruction(r) for _ in range(2_000)]
    styles = {style: {system for system, own in drawn if own == style} for _, style in drawn}
    assert "" in styles["equations"]
    assert not styles["prose"] & styles["number"] and not styles["equations"] & styles["prose"]
    assert 800 < sum(not system for system, _ in drawn) < 1_200


def test_chats_are_problems_in_every_style_calls_and_some_talk() -> None:
    drawn = list(islice(chats(3), 2_000))
    assert drawn == list(islice(chats(3), 2_000))
    turns = [turn for chat in drawn for turn in chat]
    texts = [prompt for prompt, reply in turns if reply == f" {ANSWER}"]
    assert 40 < len(texts) < 140 and extract_answer(ANSWER) is None and not re.search(r"\d", ANSWER)
    solved = iter([turn for turn in turns if turn[1] != f" {ANSWER}"])
    calls = 0
    for problem, turn in zip(problems("train", 3), solved, strict=False):
        prompt, reply = turn
        assert prompt.endswith(problem.prompt)
        if "Tools: " not in prompt:
            assert reply in {problem.solution_in(s) for s in ("equations", "prose", "number")}
            continue
        tool = re.search(r"Tools: (\w+)\((\w+)\)\n", prompt)
        assert tool
        for step in problem.steps:
            call = json.loads(reply)
            assert call["name"] == tool[1] and list(call["arguments"]) == [tool[2]]
            result = str(eval(call["arguments"][tool[2]].replace("/", "//")))
            assert f"{call['arguments'][tool[2]]} = {result}" == step
            prompt, reply = next(solved)
            assert prompt == f"Result: {result}\nAnswer:"
            calls += 1
        assert reply == f" #### {problem.answer}"
    assert calls > 150 and sum(len(chat) > 1 for chat in drawn) > 300


def test_talk_is_whole_and_mostly_new() -> None:
    r = random.Random(1)
    texts = [talk(r) for _ in range(2_000)]
    assert len(set(texts)) > 1_000
    assert not [text for text in texts if re.search(r"[][{}<>|@^%]|  ", text)]


def test_every_step_is_true_of_given_numbers_and_the_last_is_the_answer() -> None:
    """The numbers are those that the question has, whichever way it writes them."""
    operations = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    for problem in _drawn("train", 1, 20_000):
        assert problem.steps[-1].endswith(f"= {problem.answer}")
        assert problem.answer >= 0
        known = set(re.findall(r"\d+", in_digits(problem.question)))
        known |= (
            {"2"} if re.search(r"\b(twice|double|half|halve)\b", problem.question, re.I) else set()
        )
        known |= {"3"} if re.search(r"\btriple\b", problem.question, re.I) else set()
        for step in problem.steps:
            match = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)", step)
            assert match, step
            a, sign, b, result = match.groups()
            assert operations[sign](int(a), int(b)) == int(result), step
            assert {a, b} <= known, problem.question
            known.add(result)


def test_plain_problems_are_what_they_say() -> None:
    """Python reads those that are only numbers and signs, and computes the same."""
    r, read = random.Random(2), 0
    for _ in range(3_000):
        problem = plain(r)
        text = problem.question
        for spoken, sign in (("plus", "+"), ("minus", "-"), ("divided by", "/"), ("times", "*")):
            text = re.sub(rf"\b{spoken}\b", sign, text)
        text = in_digits(text).translate(str.maketrans("x×÷–", "**/-"))
        for written in re.findall(r"\d+(?: ?[-+*/] ?\d+)+", text):
            read += 1
            assert eval(written) == problem.answer, problem.question
    assert read > 1_500


def test_questions_are_english_of_many_frames() -> None:
    """A frame is a question without its names, numbers and things, and without what is said besides
    it."""
    listed = {*words.THINGS, *words.ADJECTIVES, *words.HOLDERS, *words.GOODS, *words.DAYS}
    listed |= {word for part in words.SORTS for word in re.findall(r"\w+", " ".join(part))}
    listed |= {word for part in words.ACTIVITIES for word in re.findall(r"\w+", part[1])}
    listed |= {*words.TIMES, *map(words.plural, words.GOODS), *(f"{time}s" for time in words.TIMES)}
    letters = re.compile(r"[A-Za-z]+")
    for kind in KINDS:
        r, frames = random.Random(7), set()
        for _ in range(4_000):
            text = kind(r).question
            assert not re.search(r"[][{}<>|@^]|  | [.?,!]", text.lower()) or (kind is plain), text
            frames.add(
                letters.sub(
                    lambda match: "X" if match[0] in listed or match[0][0].isupper() else match[0],
                    re.sub(r"\d[\d,]*", "N", text),
                )
            )
        assert len(frames) > (300 if kind is plain else 1_500), (kind, len(frames))


def test_numbers_of_every_length_are_well_represented() -> None:
    lengths = [
        len(number)
        for problem in _drawn("train", 6, 4_000)
        for step in problem.steps
        for number in re.findall(r"\d+", step)[:2]
    ]
    for digits, share in ((1, 0.2), (2, 0.3), (3, 0.1), (4, 0.01)):
        assert lengths.count(digits) > share * len(lengths), digits


@pytest.mark.parametrize("pattern", ["[a", "a]", "a|b"])
def test_a_pattern_that_is_not_closed_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="a bracket or bar stands alone"):
        fill(random.Random(0), f"{pattern}{{x}}", {"x": "y"})


def test_verbs_agree() -> None:
    for verb, person, is_past, form in (
        ("give away", "she", False, "gives away"),
        ("be given", "I", False, "am given"),
        ("carry", "she", True, "carried"),
        ("be", "they", True, "were"),
        ("watch", "she", False, "watches"),
        ("have", "she", False, "has"),
        ("buy", "they", True, "bought"),
    ):
        assert conjugate(verb, person, is_past) == form


@pytest.mark.parametrize(
    ("text", "answer"),
    [(" 3 + 4 = 7\n#### 7", 7), ("#### -12 and more", -12), ("####5", 5), ("no mark 7", None)],
)
def test_extract_answer_reads_the_number_after_the_mark(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


def test_reward_is_one_for_the_solution_and_zero_for_another_number() -> None:
    (problem,) = _drawn("train", 5, 1)
    assert reward(problem, problem.solution) == 1.0
    assert reward(problem, problem.solution + "1") == 0.0
    assert reward(problem, "") == 0.0
