"""Two reports compared: a difference is called one where it is more than noise, and only there."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import ConfigError
from loadtest.analysis.confidence import BATCHES, ESTIMATED, difference, parts, standard_error
from loadtest.analysis.observed import observe
from loadtest.report.compare import compare, compare_reports
from loadtest.report.compare_report import html, markdown, text
from loadtest.report.report import SCHEMA, Report, encode, report_of
from loadtest.report.report_files import Run
from tests.loads.recorded_run import run_of


def report(*runs: Run) -> Report:
    found = [
        report_of(run.summary, observe(run.recording, run.summary.window), run.warnings)
        for run in runs
    ]
    return Report(SCHEMA, "a title", "a command", tuple(found))


def test_a_run_compared_with_itself_differs_in_nothing() -> None:
    one = report(run_of(rate=30, seconds=20))
    found = compare_reports(one, one, "same", "same")
    assert (found.label_a, found.label_b) == ("same (A)", "same (B)")
    (step,) = found.steps
    for row in step.rows:
        assert row.a == row.b
        assert row.verdict in {"no clear difference", "not tested"}
    tested = [row.key for row in step.rows if row.verdict == "no clear difference"]
    assert sorted(tested) == sorted(ESTIMATED)
    assert found.conditions == ()
    for said in (text(found), markdown(found)):
        assert "Scenarios, machines and versions are the same." in said


def test_a_clear_difference_is_called_one_and_chance_is_not() -> None:
    settings: dict[str, Any] = {"rate": 30, "seconds": 20}
    base = report(run_of(seed=0, **settings))
    again = compare_reports(base, report(run_of(seed=1, **settings))).steps[0].rows
    slow = compare_reports(base, report(run_of(seed=1, token_s=0.03, **settings)))
    verdicts = {row.key: row.verdict for row in again}
    assert verdicts["itl_p50"] == "no clear difference"
    found = {row.key: row.verdict for row in slow.steps[0].rows}
    assert found["itl_p50"] == found["e2e_p50"] == "worse"
    assert found["itl_p99"] == "not tested"
    back = compare_reports(report(run_of(seed=1, token_s=0.03, **settings)), base)
    assert {row.key: row.verdict for row in back.steps[0].rows}["itl_p50"] == "better"


def test_parts_are_those_of_the_window_counted_one_by_one() -> None:
    run = run_of(rate=40, seconds=20)
    low, high = run.summary.window
    found = parts(observe(run.recording, run.summary.window))
    length = (high - low) / BATCHES
    events, requests = run.recording.events, run.recording.requests
    for index in range(BATCHES):
        begin, end = low + index * length, low + (index + 1) * length
        tokens = sum(1 for event in events if begin <= event["time"] < end)
        assert found["output_tokens_per_s"][index] == pytest.approx(tokens / length)
        times = [
            event["time"] - requests["planned"][event["request"]]
            for event in events[np.unique(events["request"], return_index=True)[1]]
            if begin <= requests["planned"][event["request"]] < end
        ]
        assert found["ttft_p50"][index] == pytest.approx(statistics.median_low(times))
    mean = sum(found["output_tokens_per_s"]) / BATCHES
    assert mean == pytest.approx(run.summary.output_tokens_per_s)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(7)
    held = 0
    for _ in range(2000):
        a, b = random.normal(100, 5, BATCHES).tolist(), random.normal(110, 9, BATCHES).tolist()
        found = difference(sum(a) / BATCHES, sum(b) / BATCHES, a, b)
        held += found.low <= 10 <= found.high
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
    a = report(*(run_of(rate=rate, seconds=3) for rate in (10, 20, 20)))
    b = report(*(run_of(rate=rate, seconds=3) for rate in (20, 20, 40)))
    found = compare_reports(a, b, "one", "two")
    assert [step.name for step in found.steps] == ["poisson 20/s", "poisson 20/s (2)"]
    assert (found.only_a, found.only_b) == (("poisson 10/s",), ("poisson 40/s",))
    for said in (text(found), markdown(found), html(found)):
        assert "Only in one: poisson 10/s." in said
    nothing = compare_reports(report(run_of(rate=10, seconds=3), run_of(rate=20, seconds=3)), b)
    assert [step.name for step in nothing.steps] == ["poisson 20/s"]
    apart = compare_reports(report(run_of(rate=5, seconds=3)), b)
    assert apart.steps == ()
    assert "No step has the same name in both." in html(apart)


def test_what_else_differs_is_said(tmp_path: Path) -> None:
    one = report(run_of("Late.", rate=10, seconds=3, machine="<b>one</b>", versions={"srm": "1"}))
    other = report(run_of(rate=12, seconds=3, machine="other", versions={"max": "2"}))
    for name, content in (("a", one), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_bytes(encode(content))
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.conditions == (
        ("machine", "<b>one</b>", "other"),
        ("version of srm", "1", "–"),
        ("version of max", "–", "2"),
        ("rate", "10.0", "12.0"),
    )
    assert found.warnings == ("a, poisson 10/s: Late.",)
    assert [step.name for step in found.steps] == ["poisson 10/s and poisson 12/s"]
    page = html(found)
    assert "&lt;b&gt;one&lt;/b&gt;" in page
    assert "<b>" not in page
    for said in (text(found), markdown(found), page):
        assert "TTFT p99.9" in said
        assert "version of max" in said
    with pytest.raises(ConfigError, match="cannot read the report"):
        compare(tmp_path / "a", tmp_path / "c")
