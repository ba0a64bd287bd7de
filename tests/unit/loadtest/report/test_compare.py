"""Two reports compared: a difference is called one where it is more than noise, and only there."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from srm.errors import ConfigError
from srm.loadtest.analysis.confidence import BATCHES, ESTIMATED, difference, parts, standard_error
from srm.loadtest.analysis.observed import observe
from srm.loadtest.report.compare import compare, compare_reports
from srm.loadtest.report.compare_report import html, markdown, text
from srm.loadtest.report.report import SCHEMA, Report, encode, report_of
from tests.kit.loads.recorded_run import run_of


def report(*warnings: str, **settings: Any) -> Report:
    """Of one run; of several if `rates` are given."""
    results = []
    for rate in settings.pop("rates", None) or [settings.pop("rate")]:
        run = run_of(*warnings, rate=rate, **settings)
        observed = observe(run.recording, run.summary.window)
        results.append(report_of(run.summary, observed, run.warnings))
    return Report(SCHEMA, "a title", "a command", tuple(results))


def verdicts(a: Report, b: Report) -> dict[str, str]:
    (step,) = compare_reports(a, b).steps
    return {row.key: row.verdict for row in step.rows}


def test_a_run_compared_with_itself_differs_in_nothing() -> None:
    one = report(rate=30, seconds=20)
    result = compare_reports(one, one, "same", "same")
    assert (result.label_a, result.label_b) == ("same (A)", "same (B)")
    (step,) = result.steps
    assert all(row.a == row.b for row in step.rows)
    entries = {row.key: row.verdict for row in step.rows}
    assert {key for key in entries if entries[key] == "no clear difference"} == set(ESTIMATED)
    assert set(entries.values()) == {"no clear difference", "not tested"}
    assert result.conditions == ()
    for page in (text(result), markdown(result)):
        assert "Scenarios, machines and versions are the same." in page


def test_a_clear_difference_is_called_one_and_chance_is_not() -> None:
    base, again = (report(rate=30, seconds=20, seed=seed) for seed in (0, 1))
    slow = report(rate=30, seconds=20, seed=1, token_s=0.03)
    assert verdicts(base, again)["itl_p50"] == "no clear difference"
    result = verdicts(base, slow)
    assert result["itl_p50"] == result["e2e_p50"] == "worse"
    assert result["itl_p99"] == "not tested"
    assert verdicts(slow, base)["itl_p50"] == "better"


def test_parts_are_those_of_the_window_counted_one_by_one() -> None:
    run = run_of(rate=40, seconds=20)
    result = parts(observe(run.recording, run.summary.window))
    edges = np.linspace(*run.summary.window, BATCHES + 1).tolist()
    events, planned = run.recording.events, run.recording.requests["planned"]
    firsts = events[np.unique(events["request"], return_index=True)[1]]
    for index, (begin, end) in enumerate(pairwise(edges)):
        tokens = sum(1 for event in events if begin <= event["time"] < end)
        assert result["output_tokens_per_s"][index] == pytest.approx(tokens / (end - begin))
        of = [first for first in firsts if begin <= planned[first["request"]] < end]
        middle = statistics.median_low(item["time"] - planned[item["request"]] for item in of)
        assert result["ttft_p50"][index] == pytest.approx(middle)
    mean = sum(result["output_tokens_per_s"]) / BATCHES
    assert mean == pytest.approx(run.summary.output_tokens_per_s)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    held = 0
    for _ in range(2000):
        a, b = random.normal(100, 5, BATCHES).tolist(), random.normal(110, 9, BATCHES).tolist()
        result = difference(sum(a) / BATCHES, sum(b) / BATCHES, a, b)
        held += result.low <= 10 <= result.high
    assert 0.94 < held / 2000 < 0.985  # 95 %, and a little more since degrees are the fewest
    assert standard_error(2.0, [1.0, 3.0]) == pytest.approx(math.sqrt(2 / 1 / 2))


def test_small_differences_and_short_runs_are_left_open() -> None:
    still = [100.0] * BATCHES
    assert difference(100.0, 101.9, still, [101.9] * BATCHES).verdict == "no clear difference"
    assert difference(100.0, 102.1, still, [102.1] * BATCHES).verdict == "more"
    assert difference(100.0, 90.0, still, []).verdict == "not tested"
    run = run_of(rate=40, seconds=4)  # a part is shorter than a request
    assert parts(observe(run.recording, run.summary.window)) == {}


def test_steps_are_matched_by_name_and_repeats_by_their_number() -> None:
    a, b = report(rates=(10, 20, 20), seconds=3), report(rates=(20, 20, 40), seconds=3)
    result = compare_reports(a, b, "one", "two")
    assert [step.name for step in result.steps] == ["poisson 20/s", "poisson 20/s (2)"]
    assert (result.only_a, result.only_b) == (("poisson 10/s",), ("poisson 40/s",))
    for message in (text(result), markdown(result), html(result)):
        assert "Only in one: poisson 10/s." in message
    apart = compare_reports(report(rate=5, seconds=3), b)
    assert apart.steps == ()
    assert "No step has the same name in both." in html(apart)


def test_what_else_differs_is_said(tmp_path: Path) -> None:
    one = report("Late.", rate=10, seconds=3, machine="<b>one</b>", versions={"srm": "1"})
    other = report(rate=12, seconds=3, machine="other", versions={"max": "2"})
    for name, content in (("a", one), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_bytes(encode(content))
    result = compare(tmp_path / "a", tmp_path / "b")
    assert result.conditions == (
        ("machine", "<b>one</b>", "other"),
        ("version of srm", "1", "–"),
        ("version of max", "–", "2"),
        ("rate", "10.0", "12.0"),
    )
    asked = "The runs asked different things: rate (10.0 and 12.0)."
    assert result.warnings == (asked, "a, poisson 10/s: Late.")
    assert [step.name for step in result.steps] == ["poisson 10/s and poisson 12/s"]
    page = html(result)
    assert "&lt;b&gt;one&lt;/b&gt;" in page and "<b>" not in page
    for message in (text(result), markdown(result), page):
        assert "TTFT p99.9" in message and "version of max" in message
    with pytest.raises(ConfigError, match="cannot read the report"):
        compare(tmp_path / "a", tmp_path / "c")
