"""Coverage at equal compute: both models are trained, drawn from and set side by side."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from research.experiments import coverage
from research.experiments.__main__ import main
from research.experiments.coverage import (
    MODELS,
    RANDOM,
    Settings,
    at_budget,
    read_task,
    verdict,
)
from research.experiments.harness import runner, solving
from research.experiments.harness.learning_rates import Start, best_rate, search
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.solving import SLOTS, draw_answers
from research.experiments.tasks import regex_examples, tasks
from research.experiments.tasks.regex_examples import DRAWN
from research.experiments.tasks.tasks import (
    EVALUATED,
    CountdownTask,
    PosedProblem,
    TextTask,
    draw_random,
    is_right,
    prompt_ids,
)
from srm.errors import ConfigError
from srm.training.grpo.engine_sampler import EngineSampler
from srm.training.grpo.rollouts import RolloutSampling
from srm.training.loop import Run
from srm.training.problems.countdown import EOS, Countdown, draw_split, parse_ids, parse_prompt
from srm.training.questions.questions import Question, read_questions
from tests.unit.experiments.conftest import Experiment, numpy_sampler

TINY = ["--budgets=0.002,0.004", "--problems=3", "--samples=20", "--seeds=0,1"]
PUZZLES_OF_FILE = "--task=countdown"
SIZES: dict[str, Any] = {
    **{"search_minutes": 0.001, "d_model": 8, "transformer_width": 8, "num_layers": 1},
    **{"batch_tokens": 200, "learning_rates": (0.002, 0.004), "most_starts": 3},
}
GIVEN = Countdown((25, 3, 7, 4), 64)
PUZZLES = CountdownTask({"": [GIVEN]})


@pytest.fixture
def puzzles(tmp_path: Path) -> Path:
    """A file of held-out puzzles."""
    path = tmp_path / "puzzles.jsonl"
    solved = draw_split(np.random.default_rng(0), 4, 4, False, is_held_out=True)
    lines = [{"question": problem.prompt, "answer": ""} for problem in solved.problems]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(autouse=True)
def numpy_engine(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The dtypes that engines were asked for. Training takes bfloat16, as if there were
    instructions for it."""
    dtypes: list[str] = []

    def sampler(*given: Any) -> EngineSampler:
        dtypes.append(given[2].dtype)
        return numpy_sampler(*given)

    monkeypatch.setattr(solving, "engine_sampler", sampler)
    monkeypatch.setattr(solving, "choose_precision", lambda *_: "bfloat16")
    return dtypes


def test_both_are_trained_and_set_side_by_side(
    puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_experiment: Experiment
) -> None:
    """And results of another rate or of other weights are refused."""
    argv = [*TINY, PUZZLES_OF_FILE, f"--input={puzzles}"]
    cases = [(coverage, name) for name in ("learned", "solved")]
    again = [*cases, (tasks, "draw_random")]
    record, page, picture = run_experiment("coverage", *argv, again=again, **SIZES)
    results = record["results"]
    for kind in MODELS:
        assert len(results[f"search {kind} 0.004 x1"]) == 1
        for minutes in (0.002, 0.004):
            train = results[f"train {kind} {minutes} min"]
            assert [seed["seed"] for seed in train] == [0, 1]
            assert all(seed["processor_seconds"] <= 60 * minutes + 0.2 for seed in train)
            for seed in results[f"{kind} {minutes} min"]:
                assert len(seed["right"]) == 3 and seed["samples"] == 20
                assert 60 <= seed["tokens"] <= 60 * 28
                assert seed["processor_seconds"] > 0
    assert page.count("\n| SRM | ") == 2 and "| Transformer 0.004 min |" in page
    for minutes in (0.002, 0.004):
        assert f"After {minutes} processor minutes of training: The paper's claim, more" in page
    assert "At equal loss, " in page and "both in bfloat16. Operations" in page
    assert "<!-- FLOP a problem -->" in picture

    folder = tmp_path / "results" / "coverage"
    places = [f"--output={tmp_path / 'output'}", f"--results={folder.parent}", "--threads=1"]
    argv = ["coverage", *argv, *places]
    with monkeypatch.context() as patch:
        patch.setattr(coverage, "best_start", lambda *_: Start(0.5))
        with pytest.raises(
            ConfigError, match=r"train_SRM_0.002_min-0.json is of another rate, 0.0.* not 0.5"
        ):
            main(argv, **SIZES)
    weights = folder / "model-SRM-0.002-0.pt"
    content = weights.read_bytes()
    weights.write_bytes(b"0")
    assert main(argv, **SIZES) == 0, "its answers are there"
    (answers := folder / "SRM_0.002_min-0.json").rename(tmp_path / "answers")
    with pytest.raises(
        ConfigError, match=r"model-SRM-0.002-0.pt is not the model of its result: remove"
    ):
        main(argv, **SIZES)
    weights.write_bytes(content)
    (tmp_path / "answers").rename(answers)
    (folder / "train_SRM_0.002_min-0.json").unlink()
    monkeypatch.setattr(coverage, "learned", lambda *_: {"weights": "others"})
    with pytest.raises(ConfigError, match=r"coverage/SRM_0.002_min-0.json is of another weights"):
        main(argv, **SIZES)
    for damaged in (b"", b"0"):
        weights.write_bytes(damaged)
        of = hashlib.sha256(damaged).hexdigest()
        with pytest.raises(ConfigError, match=r"model-SRM-0.002-0.pt is no model: remove"):
            coverage.trained(Settings(results=folder.parent), PUZZLES, "SRM", 0.002, of, 0)


def test_one_run_makes_the_models_of_all_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update takes a second of the test's clock. A part of a run ends before the update that
    would be late, so that 20 and 40 seconds have 18 and 37, of which the first 15 are made once. A
    run that is stopped goes on to the same losses."""
    ticks, made, stopped_at = Ticks(), 0, 0
    monkeypatch.setattr(time, "process_time", ticks)
    update = Run.update

    def slow(run: Run, *given: Any) -> float:
        nonlocal made
        made += 1
        if made == stopped_at:
            raise KeyboardInterrupt
        return update(run, *given)

    monkeypatch.setattr(Run, "update", ticks.slowed(slow, 1.0))
    monkeypatch.setattr(runner, "SAVE_EVERY", 1)

    def train(results: Path) -> list[list[float]]:
        budgets = (20 / 60, 40 / 60)
        config = Settings(task="countdown", results=results, budgets=budgets, **SIZES)
        given = config, PUZZLES, "SRM", Start(0.01)
        return [coverage.learned(*given, each, 0)["training_losses"] for each in budgets]

    short, long = train(tmp_path / "one")
    assert (len(short), len(long), made) == (18, 37, 15 + 3 + 15 + 7)
    assert short[:17] == long[:17] and short[17] != long[17], "a loss is that before its update"
    made, stopped_at = 0, 25
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "two")
    assert train(tmp_path / "two") == [short, long]


def test_regexes_are_learned_and_judged_by_what_is_not_shown(
    tmp_path: Path, run_experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers that were judged by other strings are refused."""
    flags = ["--task=regexes", "--seeds=0", *TINY[:-1]]
    record, page, _ = run_experiment("coverage", *flags, **SIZES)
    assert "The row random has regexes of training." in page
    for kind in MODELS:
        (answers,) = record["results"][f"{kind} 0.004 min"]
        assert len(answers["right"]) == 3 and answers["tokens"] <= 60 * 65
    questions = [structs.replace(row, answer="✗x") for row in read_questions(DRAWN)]
    monkeypatch.setattr(regex_examples, "read_questions", lambda _: questions)
    with pytest.raises(ConfigError, match=r"random-0.json is of another judged_by"):
        run_experiment("coverage", *flags, **SIZES)


def test_a_search_goes_on_until_its_best_start_is_within() -> None:
    """Or says which starts beside it were left out."""

    def measure(start: Start) -> Numbers:
        return {"loss": abs(math.log2(start.rate / 4)) + abs(math.log2(start.scale * 8))}

    tried = search([Start(1.0), Start(2.0)], measure, 100)
    assert best_rate(tried) == Start(4.0, 1 / 8) and len(tried) < 30
    assert not coverage.edge("SRM", tried)
    few = search([Start(1.0), Start(2.0)], measure, 3)
    assert len(few) == 3
    left = coverage.edge("SRM", few)
    assert left == " Beside SRM's best start 8 x1, 4 x0.5, 4 x2 were not tried.", left


class Ticks:
    """A clock that only goes on where the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def slowed(self, function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        """Return the function, after whose calls it is so much later."""

        def call(*args: Any) -> Any:
            result = function(*args)
            self.now += seconds
            return result

        return call


def test_puzzles_are_drawn_where_there_is_no_file() -> None:
    problems = read_task(Settings(task="countdown", problems=8)).problems
    drawn = [parse_prompt(problem.prompt) for problem in problems]
    assert [len(puzzle.numbers) for puzzle in drawn] == [4, 5, 6, 4, 5, 6, 4, 5]
    assert all(puzzle.is_held_out for puzzle in drawn)


def test_right_answers_have_ended() -> None:
    ids = parse_ids("25*3-7-4")
    assert is_right(GIVEN, [*ids, EOS])
    assert not is_right(GIVEN, ids) and not is_right(GIVEN, []) and not is_right(GIVEN, [EOS])
    assert not is_right(GIVEN, [*parse_ids("25*3-7+4"), EOS])
    assert prompt_ids(GIVEN)[1:] == parse_ids(GIVEN.prompt)


def test_prompts_of_like_lengths_are_answered_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    def sample(prompts: list[list[int]], sampling: RolloutSampling) -> list[list[Any]]:
        beside.append(([*map(len, prompts)], sampling.max_tokens))
        return [[SimpleNamespace(token_ids=np.array(ids[:1]))] * sampling.n for ids in prompts]

    beside: list[tuple[list[int], int]] = []
    sampler = SimpleNamespace(sample=sample, close=lambda: None)
    monkeypatch.setattr(solving, "open_sampler", lambda *_: sampler)
    lengths = enumerate((50, 3, 20, 5, 4))
    problems = [PosedProblem("", [i] * n, (i,).__eq__, 60 - n) for i, n in lengths]
    task: Any = SimpleNamespace(problems=problems, end=EOS)
    drawn = draw_answers(Settings().make("SRM", PUZZLES), task, SLOTS // 2, 0)
    assert drawn["right"] == [SLOTS // 2] * 5
    assert beside == [([3, 4], 56), ([5], 55), ([20], 40), ([50], 10)]


def test_random_combinations_solve_some_puzzles() -> None:
    solved = draw_split(np.random.default_rng(0), 5, 4, False)
    right = draw_random(solved.problems, 20_000, 0)
    assert all(0 < count < 20_000 for count in right)
    assert draw_random([Countdown((1, 1, 1, 1), 999)], 1_000, 0) == [0]


def test_a_budget_is_read_between_the_ks_and_not_beyond() -> None:
    rates, ks = np.array([0.1, 0.3, 0.5]), [1, 10, 100]
    assert at_budget(rates, ks, 10) == pytest.approx(0.3)
    assert at_budget(rates, ks, 10**0.5) == pytest.approx(0.2)
    assert np.isnan(at_budget(rates, ks, 101)) and np.isnan(at_budget(rates, ks, 0.9))


def _results(
    srm: list[int], other: list[int], slower: float, *seeds: int, guesses: int = 0
) -> dict[str, list[Numbers]]:
    """`seeds`: how many more of each of SRM's answers are right with each seed."""

    def drawn(right: list[int], seconds: float, *seeds: int) -> list[Numbers]:
        total = 100 * len(right)
        figures = {"samples": 100, "tokens": 10 * total, "processor_seconds": seconds * total}
        return [{"right": [count + more for count in right], **figures} for more in seeds]

    trained: list[Numbers] = [{"factors": 5}]
    return {
        "SRM": drawn(srm, 1.0, *(seeds or (0,))),
        "Transformer": drawn(other, slower, *(0 for _ in seeds or (0,))),
        "train SRM": trained,
        "train Transformer": trained,
        RANDOM: [{"right": [guesses] * len(srm), "samples": 100}],
    }


@pytest.mark.parametrize(
    ("srm", "other", "slower", "guesses", "outcome"),
    [
        ([30] * 9, [30] * 9, 50.0, 0, "holds here: in 100 processor seconds"),
        ([60] * 99, [1] * 99, 1.0, 1, "holds here: in 100 processor seconds"),
        ([0] * 9, [30] * 9, 1.0, 0, "fails here: in 100 processor seconds"),
        ([1] * 99, [60] * 99, 1.0, 1, "fails here: in 100 processor seconds"),
        ([0, 50] * 5, [50, 0] * 5, 1.0, 0, "is not decided here: in 100 processor"),
        ([0, 0, 50] * 3, [50, 50, 0] * 3, 1.0, 0, "is not decided here: in 100 processor"),
        ([0, 50, 50] * 3, [50, 0, 0] * 3, 1.0, 0, "is not decided here: in 100 processor"),
        ([40] * 99, [1] * 99, 1.0, 40, "is no better than guesses: in 100 processor"),
        ([1] * 99, [40] * 99, 1.0, 90, "is no better than guesses: in 100 processor"),
        ([0, 50] * 5, [50, 0] * 5, 1.0, 50, "is no better than guesses: in 100 processor"),
    ],
)
def test_the_verdict_is_by_seconds_and_above_guesses(
    srm: list[int], other: list[int], slower: float, guesses: int, outcome: str
) -> None:
    config = Settings(samples=100 if max(srm + other) < 60 else 1)
    outcome = outcome.replace("100", str(config.samples))
    assert outcome in verdict(config, _results(srm, other, slower, guesses=guesses))


def test_a_gap_of_few_seeds_is_not_decided() -> None:
    """However many problems there are."""
    rare = [1] * 500
    apart = _results(rare, rare, 1.0, 30, 0, 30)
    apart["Transformer"] = apart["SRM"][1:2] * 3
    sentence = verdict(Settings(samples=1), apart)
    assert "is not decided here: in" in sentence and "seed +0.300, +0.000, +0.300" in sentence


def test_equal_loss_is_read_off_between_the_times() -> None:
    config = Settings(samples=100, budgets=(2.0, 8.0))
    results: dict[str, list[Numbers]] = {}
    for kind, losses, right in (("SRM", (2.0, 1.0), (0, 20)), ("Transformer", (1.5, 0.5), (5, 9))):
        for minutes, loss, count in zip((2, 8), losses, right, strict=True):
            results[f"train {kind} {minutes} min"] = [{"loss": loss}]
            results[f"{kind} {minutes} min"] = [{"right": [count and 100], "samples": 100}]
    sentence = coverage.at_equal_loss(config, results)
    assert sentence.startswith("At equal loss, 1.000: SRM after 8 minutes, and solves 1.000 of")
    assert "Transformer after 4 minutes, and solves 1.000" in sentence
    results["train Transformer 2 min"] = [{"loss": 0.9}]
    assert "Transformer before 2 minutes" in coverage.at_equal_loss(config, results)


@pytest.mark.parametrize("cost", [0.1, 0.7, 1.1, 1 / 3, 2.3e-5, 49.0, 1.7e-3])
@pytest.mark.parametrize("samples", [500, 10_000])
def test_no_rounding_makes_a_verdict_of_nothing(samples: int, cost: float) -> None:
    """A budget of `samples` answers, divided by the cost of one, may be more than `samples`."""
    results = _results([30] * 9, [30] * 9, 2.0)
    results[RANDOM][0]["samples"] = samples
    for kind in MODELS:
        (seed,) = results[kind]
        seed["samples"] = samples
        seed["processor_seconds"] *= cost * samples / 100
    assert "nan" not in verdict(Settings(samples=samples), results)


def write_questions(
    path: Path, places: range, worked: str = "{0} and {0} is {1}.\n#### {1}"
) -> Path:
    """Write a file of questions about numbers at these places."""
    rows = ({"question": f"Twice {n}?", "answer": worked.format(n, 2 * n)} for n in places)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def questions(tmp_path: Path) -> list[str]:
    """Flags of files of questions to learn and to answer."""
    train = write_questions(tmp_path / "train.jsonl", range(2 * EVALUATED))
    known = write_questions(tmp_path / "known.jsonl", range(2_000, 2_004))
    new = write_questions(tmp_path / "new.jsonl", range(3_000, 3_004))
    return [f"--train={train}", f"--input={known},{new}"]


def test_questions_of_files_are_learned_and_answered(
    questions: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the record's page is made again without the files."""

    def guess(task: TextTask, samples: int, _: int) -> list[int]:
        return [samples * (problem.kind == "known") for problem in task.problems]

    monkeypatch.setattr(TextTask, "guess", guess)
    places = [f"--output={tmp_path / 'output'}", f"--results={tmp_path / 'results'}"]
    assert (
        main(
            [
                "coverage",
                *TINY,
                *places,
                *questions,
                "--task=questions",
                "--samples=5",
                "--seeds=0",
            ],
            **SIZES,
        )
        == 0
    )
    (path,) = (tmp_path / "output").glob("*-experiment-coverage.json")
    results = json.loads(path.read_text())["results"]
    assert all(len(seed["right"]) == 6 for kind in MODELS for seed in results[f"{kind} 0.004 min"])
    page = path.with_suffix(".md").read_text()
    assert "| Transformer 0.004 min of known |" in page
    assert "| random of known | 1.0000 |" in page and "| random of new | 0.0000 |" in page
    assert "The row random has answers drawn from those of the training questions." in page
    for file in ("train", "known", "new"):
        (tmp_path / f"{file}.jsonl").unlink()
    assert main(["page", str(path)]) == 0


def test_answers_are_judged_by_all_results_once_they_have_ended(
    tmp_path: Path,
) -> None:
    train = write_questions(tmp_path / "train.jsonl", range(2 * EVALUATED))
    asked = [Question("Twice 1,500?", "#### 3000.0"), Question("Twice 7, again?", "14")]
    task = TextTask(train, {"of file": asked})
    problem = task.problems[0]
    assert problem.prompt == "Question: Twice 1,500?\nAnswer:" and problem.kind == "of file"
    assert problem.ids[0] == task.begin

    def ids(text: str) -> list[int]:
        return task.tokenizer.encode(text, add_special_tokens=False).ids

    assert problem.is_right([*ids(" It is 7.\n#### 3,000"), task.end])
    assert not problem.is_right(ids(" It is 7.\n#### 3,000")) and not problem.is_right([task.end])
    assert not problem.is_right([*ids(" It is 3000."), task.end]) and not problem.is_right([])
    assert not problem.is_right([*ids(" 2 * 1 = 2\n#### 3,000"), task.end])
    none, some = task.guess(10_000, 0)
    assert none == 0 and 0 < some < 50, "one training answer in 1,024 is 14"
    batches = task.batches(0, 300)
    trained_on = {tuple(row.tolist()) for at in range(200) for row in batches[at][0]}
    held = {tuple(row.tolist()) for inputs, _ in batches.evaluation(10) for row in inputs}
    assert held and not {row for row in held if row in trained_on}
    inputs, targets = batches[0]
    assert inputs.shape == targets.shape
    for row, learned in zip(inputs.tolist(), targets.tolist(), strict=True):
        answer = task.tokenizer.decode([token for token in learned if token > task.end])
        assert task.tokenizer.decode(row).split("Answer:")[1].startswith(answer.split("####")[0])
    assert batches[0][0].equal(task.batches(0, 300)[0][0])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input="], "train and input must be files where task is questions"),
        (["--task=countdown"], "train and input must be files where task is questions, and no o"),
        (["--budgets=2,1"], "budgets must rise from above 0, got"),
        (["--budgets=0"], "budgets must rise from above 0, got"),
        (["--input={0},{0}"], "input: two files are called train"),
        (["--input={0}"], "input: models are trained on 'Twice 0.': leave it out"),
        (["--problems=5"], "problems = 5, but .*known.jsonl has 4"),
        (["--train={1}", "--input={0}"], "train: .*known.jsonl must have 1024 .* has 4 of 4"),
        (["--input={2}"], "input: '0 twice .* tokens with what is put around it, must have few"),
        (["--input={3}"], "input: the answer of 'Twice 5000.' ends with no number"),
        (["--train={3}", "--input={1}"], "train: the answer of 'Twice 5000.' ends with no number"),
        (["--train={4}"], "train: the answer of 'Twice 9000.' must have one `#### <number>`"),
        (["--train={2}"], "train: .*long.jsonl must have 1024 rows of .* has 0 of 2000"),
        (["--input={5}"], "input: models are trained on ' Twice  3. ': leave it out"),
        (["--input={6}", "--problems=2"], "input: there is twice 'Twice 8000.': leave it out"),
    ],
)
def test_questions_that_cannot_be_used_are_refused(
    questions: list[str], flags: list[str], message: str, tmp_path: Path
) -> None:
    long = tmp_path / "long.jsonl"
    rows = ({"question": f"{n} " + 400 * "twice ", "answer": f"#### {n}"} for n in range(2_000))
    long.write_text("".join(json.dumps(row) + "\n" for row in rows))
    unworked = write_questions(tmp_path / "unworked.jsonl", range(5_000, 7_000), "#### many")
    bare = write_questions(tmp_path / "bare.jsonl", range(9_000, 11_000), "{1}")
    spaced = tmp_path / "spaced.jsonl"
    spaced.write_text(json.dumps({"question": " Twice  3? ", "answer": "6"}))
    twice = write_questions(tmp_path / "twice.jsonl", range(8_000, 8_001))
    twice.write_text(2 * twice.read_text())
    files = [tmp_path / name for name in ("train.jsonl", "known.jsonl")]
    given = [flag.format(*files, long, unworked, bare, spaced, twice) for flag in flags]
    with pytest.raises(ConfigError, match=message):
        main(["coverage", *questions, "--task=questions", "--problems=1", *given])


def test_puzzles_that_are_trained_on_or_are_none_are_refused(puzzles: Path) -> None:
    with pytest.raises(ConfigError, match=r"problems = 5, but .* has 4"):
        main(["coverage", PUZZLES_OF_FILE, f"--input={puzzles}", "--problems=5"])
    for question, reason in (
        ("make 482 of 97 3 5 12 :", "are trained on"),
        ("64?", "no countdown"),
        ("make 205 of 205 :", "must have 4, 5, 6 numbers, has 1"),
        ("make 205 of 1 2 3 4 5 6 7 :", "must have 4, 5, 6 numbers, has 7"),
        ("make 205 of 1 2 3 0 :", "must have numbers of 1 … 100"),
        ("make 205 of 1 2 3 101 :", "must have numbers of 1 … 100"),
        ("make 99 of 1 2 3 4 :", "must have a target of 100 … 999, has 99"),
        (f"make {10**23} of 1 2 3 4 :", "must have a target of 100 … 999, has 10000"),
    ):
        puzzles.write_text(json.dumps({"question": question, "answer": ""}))
        with pytest.raises(ConfigError, match=reason):
            main(["coverage", PUZZLES_OF_FILE, f"--input={puzzles}", "--problems=1"])
