"""`srm evaluate` of the bundled model on a few problems, and against an earlier output."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

import srm.__main__ as srm
from srm.training.evaluate import Evaluation, Gains, evaluate
from srm.training.settings import EvaluateConfig

ARGS = ["evaluate", "--problems=3", "--samples=20"]


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return evaluate(EvaluateConfig(problems=3, samples=20))


def test_an_evaluation_is_compared_with_another_problem_by_problem(
    evaluation: Evaluation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = [max(n - 10, 0) for n in evaluation.right]
    other = msgspec.structs.replace(evaluation, model="other", right=fewer)
    (tmp_path / "other.json").write_bytes(msgspec.json.encode(other))
    assert srm.main([*ARGS, f"--against={tmp_path}/other.json"]) == 0
    again = msgspec.json.decode(capsys.readouterr().out, type=Evaluation)
    assert again.right == evaluation.right and any(evaluation.right)
    assert isinstance(again.gains, Gains) and again.gains.than == "other"
    assert list(again.pass_at) == list(again.gains.pass_at_error) == ["1", "10"]
    differences = [(a - b) / 20 for a, b in zip(evaluation.right, fewer, strict=True)]
    assert again.gains.pass_at["1"] == pytest.approx(sum(differences) / 3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"digest": "0"}, "not those of problems and seed"),
        ({"temperature": 0.5}, "was sampled at temperature 0.5: give that here too, got 1"),
        ({"samples": 19}, "must have at least 20 samples of each problem, got 19"),
        ({"right": [21, 0, 0]}, "must have the right samples of each problem"),
        ({"right": [0]}, "must have the right samples of each problem"),
        ({"right": "?"}, "is no output of srm evaluate: right must be a list"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    evaluation: Evaluation,
    changed: dict[str, object],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = msgspec.to_builtins(evaluation) | changed
    (tmp_path / "other.json").write_bytes(msgspec.json.encode(other))
    assert srm.main([*ARGS, f"--against={tmp_path}/other.json"]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_file_to_compare_with_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert srm.main([*ARGS, f"--against={tmp_path}/none.json"]) == 2
    assert "none.json cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--problems=100001", "problems must be at most 100000, got 100001"),
        ("--samples=100001", "samples must be at most 100000, got 100001"),
        ("--temperature=101", "temperature must be at most 100, got 101.0"),
    ],
)
def test_what_the_engine_does_not_take_is_refused_before_any_work(
    flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert srm.main(["evaluate", flag]) == 2
    assert message in capsys.readouterr().err
