"""Questions from JSON lines, and the rewards of completions."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from srm.errors import ConfigError
from srm.training.questions.questions import Question, read_questions
from srm.training.questions.rewards import (
    gsm8k_lenient,
    gsm8k_strict,
    gsm8k_worked,
    load_reward,
    rewarded,
)

GSM8K = Path(__file__).resolve().parents[4] / "shared" / "data" / "gsm8k" / "dev.jsonl"


def question(answer: str) -> Question:
    return Question("How many?", answer)


@pytest.mark.parametrize(
    ("completion", "answer", "strict", "lenient"),
    [
        ("16 - 3 = 13\n#### 18", "so 18\n#### 18", 1, 1),
        ("the answer is 18", "#### 18", 0, 1),
        ("the answer is 18.", "#### 18", 0, 1),
        ("#### 18.", "18", 1, 1),
        ("#### $1,000", "#### 1000", 1, 1),
        ("#### 1000", "#### 1,000", 1, 1),
        ("#### 18.00", "#### 18", 1, 1),
        ("#### -5", "#### -5", 1, 1),
        ("#### 5", "#### -5", 0, 0),
        ("#### 17\n#### 18", "#### 18", 0, 1),
        ("#### 18 apples of 20", "#### 18", 1, 0),
        ("#### 18\n\nQuestion: What is 3 + 4?\nAnswer: 7\n#### 7", "#### 18", 1, 1),
        ("Question: 18?\n#### 18", "#### 18", 0, 0),
        ("it costs .5", "#### 0.5", 0, 1),
        ("#### 1.2.3", "#### 1.2", 0, 0),
        ("####", "#### 0", 0, 0),
        ("", "#### 0", 0, 0),
    ],
)
def test_rewards_of_gsm8k(completion: str, answer: str, strict: int, lenient: int) -> None:
    assert gsm8k_strict(completion, question(answer)) == strict
    assert gsm8k_lenient(completion, question(answer)) == lenient


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("2 bags hold 2*3=6.\nIn all 6 + 1,000 = $1,006.00\n#### 1006", 1),
        ("2*3=<<2*3=6>>6, 6+1000=<<6+1000=1006>>1006\n#### 1006", 1),
        ("3 + 3 = 6, 1000 + 6 = 1006\n#### 1006", 1),
        ("2*3=7, 7+999=1006\n#### 1006", 0),
        ("6+1000=1006, 2*3=6\n#### 1006", 0),
        ("6+1000=1006\n#### 1006", 0),
        ("2*3=6, 6+1000=1006, 1006+0=1006\n#### 1006", 0),
        ("2*3=6, 6+1000=1006\n#### 1007", 0),
        ("2*3=6, 6+1000=1006", 0),
        ("#### 1006\n2*3=6, 6+1000=1006", 0),
        ("2*3=6, 6+1000=1006\n#### 1006\nQuestion: 1 + 1 = 2?", 1),
    ],
)
def test_worked_answers_have_all_results_in_order(completion: str, right: int) -> None:
    asked = question("They hold 2*3=<<2*3=6>>6.\nSo 6+1000=<<6+1000=1006>>1006\n#### 1006")
    assert gsm8k_worked(completion, asked) == right


def test_an_answer_without_a_number_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"How many.*ends with no number"):
        rewarded(gsm8k_strict, "#### 5", question("five"))


def test_reads_lines_and_makes_prompts(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "a {x}?", "answer": "1", "more": 2}\n\n')
    (one,) = read_questions(path)
    assert one == Question("a {x}?", "1")
    assert one.prompt() == "Question: a {x}?\nAnswer:"
    assert one.prompt("{question} =") == "a {x}? ="
    parquet.write_table(pa.table({"question": ["b"], "answer": ["2"]}), tmp_path / "some.parquet")
    assert read_questions(tmp_path / "some.parquet") == [Question("b", "2")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a", "answer": "1"}\n{"question": "a"}', ":2: .*answer"),
        ('{"question": "a", "answer": 1}', ":1: answer must be a string"),
        ("nonsense", ":1: "),
        ("\n", "has no question"),
    ],
)
def test_names_what_cannot_be_read(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"some.jsonl.*{message}"):
        read_questions(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_questions(tmp_path / "none.jsonl")


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "some.jsonl"
    path.write_text('{"question": "a", "answer": "1"}\r\n', "utf-8-sig")
    assert read_questions(path) == [Question("a", "1")]


def test_what_is_damaged_in_parquet_is_said(tmp_path: Path) -> None:
    path = tmp_path / "some.parquet"
    parquet.write_table(pa.table({"question": ["a", "b"], "answer": ["1", "2"]}), path)
    content = bytearray(path.read_bytes())
    content[60] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"some.parquet: .*[a-z]{4}") as refused:
        read_questions(path)
    assert "None" not in str(refused.value)
    latin = pa.array([b"caf\xe9"]).view(pa.string())
    parquet.write_table(pa.table({"question": latin, "answer": ["1"]}), path)
    with pytest.raises(ConfigError, match=r"some.parquet: 'utf-8' codec can't decode byte 0xe9"):
        read_questions(path)


def test_rewards_are_loaded_by_name(tmp_path: Path) -> None:
    assert load_reward("srm.training.questions.rewards:gsm8k_strict") is gsm8k_strict
    (tmp_path / "mine.py").write_text("def short(text, question):\n    return -len(text)\n")
    assert rewarded(load_reward(f"{tmp_path}/mine.py:short"), "abc", question("1")) == -3.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm8k_strict", "module:function"),
        ("no.such.module:f", "cannot be imported: ModuleNotFoundError"),
        ("none.py:f", "cannot be imported: FileNotFoundError"),
        ("math:no_such", "math has no function 'no_such'"),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_names_a_reward_that_is_none(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward(name)


def test_a_reward_file_that_ends_the_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(0)\n")
    with pytest.raises(ConfigError, match="cannot be imported: SystemExit"):
        load_reward(f"{tmp_path}/ends.py:f")


def test_a_reward_must_be_a_finite_number() -> None:
    for value in (float("nan"), float("inf"), "much", None):
        with pytest.raises(ConfigError, match="reward"):
            rewarded(lambda text, one, value=value: value, "abc", question("1"))  # type: ignore[misc]


@pytest.mark.skipif(not GSM8K.exists(), reason="../shared is absent")
def test_the_solutions_of_gsm8k_are_right() -> None:
    questions = read_questions(GSM8K)
    assert len(questions) > 500
    assert all(gsm8k_strict(item.answer, item) == 1 for item in questions)
    assert all(gsm8k_lenient(item.answer, item) == 1 for item in questions)
    assert all(gsm8k_worked(item.answer, item) == 1 for item in questions)
