"""A record's page is made again from its numbers alone, and one of its intervals in another way."""

from __future__ import annotations

import json
import re
from math import comb
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

from research.experiments.__main__ import main
from research.experiments.coverage import MODELS, RANDOM, Settings, page
from research.experiments.harness.result_cache import Numbers
from research.experiments.harness.runner import Results, publish
from srm.errors import ConfigError

SEEDS, PROBLEMS, SAMPLES, DEARER = 5, 60, 40, 4
"""An answer of the Transformer costs as much as `DEARER` of SRM."""


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A record of `coverage` whose gap differs as much by seed as by puzzle."""
    config = Settings(output=tmp_path, budgets=(2.0,), problems=PROBLEMS, samples=SAMPLES)
    random = np.random.default_rng(0)
    rates, about = random.beta(0.3, 2.0, PROBLEMS), {"commit": "abc", "samples": SAMPLES}
    training: Numbers = {"loss": 1.0, "parameters": 9, "factors": 5, "processor_seconds": 1.0}
    training |= {"steps": 7, "training_tokens": 70, "rate": 0.001, "scale": 1.0}
    results: Results = {RANDOM: [about | {"right": [0] * PROBLEMS}]}
    for kind, cost in zip(MODELS, (1, DEARER), strict=True):
        results |= {
            case: [about | training] for case in (f"search {kind} x", f"train {kind} 2 min")
        }
        taken: Numbers = {
            "processor_seconds": cost * PROBLEMS * SAMPLES,
            "tokens": 99,
            "dtype": "-",
        }
        results[f"{kind} 2 min"] = [
            about | taken | {"right": random.binomial(SAMPLES, rates * learned).tolist()}
            for learned in random.uniform(0.1, 1.0, SEEDS)
        ]
    written = publish(config, [], results, page(config, results), plt.figure())
    return written.with_suffix(".json")


def test_lines_that_a_changed_count_changes_are_named(
    record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["page", str(record)]) == 0
    assert capsys.readouterr().out == f"{record.with_suffix('.md')} is what its numbers say\n"
    content = json.loads(record.read_text())
    seeds = content["results"]["SRM 2 min"]
    before, of_first = sum(sum(seed["right"]) for seed in seeds), seeds[0]["right"]
    of_first[of_first.index(0)] = SAMPLES
    record.write_text(json.dumps(content))
    assert main(["page", str(record)]) == 1
    named = capsys.readouterr().out
    for mark, right in (("-", before), ("+", before + SAMPLES)):
        assert f"\n{mark}| SRM 2 min | {right / (SEEDS * PROBLEMS * SAMPLES):.4f} |" in named
    assert "\n@@ -7 +7 @@\n-After 2 processor minutes of training: The paper's claim" in named
    assert "| Transformer 2 min |" not in named


def test_an_interval_is_that_of_a_plain_loop(record: Path) -> None:
    """It draws puzzles and seeds at once, from other random numbers. An end of an interval of 1,000
    draws has a standard error of a tenth of their standard deviation."""
    results = json.loads(record.read_text())["results"]
    srm, other = (
        np.array([[pass_at(k, n) for n in seed["right"]] for seed in results[f"{kind} 2 min"]])
        for kind, k in zip(MODELS, (SAMPLES, SAMPLES // DEARER), strict=True)
    )
    gaps, random, of_both, of_puzzles = srm - other, np.random.default_rng(1), [], []
    for _ in range(5_000):
        puzzles, seeds = random.integers(0, PROBLEMS, PROBLEMS), random.integers(0, SEEDS, SEEDS)
        of_both.append(gaps[seeds][:, puzzles].mean())
        of_puzzles.append(gaps[:, puzzles].mean())
    verdict = (
        r"a difference of (\S+) \((\S+) … (\S+), 95 % over problems and seeds; by seed (.*?)\)"
    )
    (shown,) = re.findall(verdict, record.with_suffix(".md").read_text())
    assert shown[0] == f"{gaps.mean():+.3f}"
    assert shown[3] == ", ".join(f"{gap:+.3f}" for gap in gaps.mean(axis=1))
    ends, close = np.array([float(end) for end in shown[1:3]]), 0.3 * np.std(of_both)
    assert np.abs(np.quantile(of_both, [0.025, 0.975]) - ends).max() < close
    assert np.abs(np.quantile(of_puzzles, [0.025, 0.975]) - ends).min() > close


def pass_at(k: int, right: int) -> float:
    """Return the share of all choices of k samples that have a right one."""
    return 1 - comb(SAMPLES - right, k) / comb(SAMPLES, k)


OF = '{"command": "python -m research.experiments %s"'
COVERAGE = OF % "coverage"
RESULTS = ', "settings": {}, "results": %s}'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"command": "python -m research.experiments form"}', "passk; got a record of 'form'"),
        ('{"command": "srm bench host"}', "got a record of 'srm bench host'"),
        ("{}", "a.json: no page can be made of it: KeyError: 'command'"),
        (COVERAGE + ', "settings": {"minutes": 3.0}}', "contains unknown field `minutes`"),
        (COVERAGE + RESULTS % "{}", "no page can be made of it: KeyError: 'ra"),
        (OF % "forms" + RESULTS % '{"chunked": []}', "no page can be made of it: ValueError: not"),
        (OF % "information" + RESULTS % "{}", "no page can be made of it: KeyError: 'frequencies"),
        ("", "a.json: No such file or directory"),
    ],
)
def test_records_without_a_page_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.md").touch()
    if content:
        (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        main(["page", str(tmp_path / "a.json")])
    with pytest.raises(ConfigError, match=r"page takes one file, a record's .json; got \[\]"):
        main(["page"])
