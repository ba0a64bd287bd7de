"""The files of a report: each says what was measured, and none breaks on what it is given."""

from __future__ import annotations

import csv
import math
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest

from srm.errors import ConfigError
from srm.loadtest.analysis.observed import observe
from srm.loadtest.analysis.summarize import summarize
from srm.loadtest.quantities import MEASURES, unit_for, value_of
from srm.loadtest.recording import EVENT, REQUEST
from srm.loadtest.report import report_files
from srm.loadtest.report.report import SCHEMA, Report, read_report, report_of
from srm.loadtest.report.report_files import MeasuredRun, write_reports
from srm.loadtest.report.tables import (
    harness_table,
    objectives_table,
    scenario_toml,
    throughput_table,
)
from srm.loadtest.scenario import Scenario
from tests.kit.loads.recorded_run import recorded, run_of

EVIL = '<script>alert("x")</script> & $\\frac{1}{2}$ | ``` \' _x_ [a](http://b)'
"""Whatever a name contains is text."""
Single = tuple[Path, MeasuredRun, Report]
Sweep = tuple[Path, list[MeasuredRun], Report]


def same(a: Any, b: Any) -> bool:
    """Equal as JSON has it, where NaN is null."""
    contents = [msgspec.json.decode(msgspec.json.encode(item, enc_hook=str)) for item in (a, b)]
    return bool(contents[0] == contents[1])


def page_in(folder: Path) -> ElementTree.Element:
    """What a browser would see; every tag must be closed."""
    html = (folder / "report.html").read_text()
    closed = re.sub(r"<(meta[^>]*)>", r"<\1/>", html[html.index("<html") :])
    return ElementTree.fromstring(closed.replace("xlink:", ""))


def cells(page: ElementTree.Element) -> list[str]:
    return ["".join(item.itertext()) for item in page.iter() if item.tag in {"td", "th"}]


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(newline="") as opened:
        return list(csv.DictReader(opened))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Single:
    folder = tmp_path_factory.mktemp("single")
    settings: dict[str, Any] = {
        "objectives": ("ttft<0.5", "e2e<1ms"),
        "fail_if": ("ttft_p99>1ms", "errors>9999"),
        "served_model_name": EVIL,
        "url": f"http://{EVIL}",
    }
    shown: dict[str, Any] = {"name": EVIL, "machine": EVIL, "versions": {EVIL: EVIL}}
    load: dict[str, Any] = {"rate": 40, "seconds": 12, "failing": 0.05}
    run = run_of("The harness was late.", EVIL, **load, **settings, **shown)
    return folder, run, write_reports(folder, [run])


OUTCOME = ("Knee so far: 60 requests a second.", "Throughput still grew.")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    folder = tmp_path_factory.mktemp("sweep")
    runs = [
        run_of(f"60 `late` {EVIL}", rate=60, seconds=4, served_model_name=EVIL),
        run_of("10 `late`", rate=10, seconds=4),
    ]
    more: dict[str, Any] = {"knee": "poisson 60/s", "knee_may_lie_beyond": True, "outcome": OUTCOME}
    return folder, runs, write_reports(folder, runs, title=EVIL, **more)


def test_json_gives_back_what_was_written(single: Single, sweep: Sweep) -> None:
    for folder, _, report in (single, sweep):
        assert same(read_report(folder), report)
        assert same(read_report(folder / "report.json"), report)
    assert math.isnan(read_report(sweep[0]).runs[0].summary.good_share)
    assert read_report(single[0]).runs[0].scenario == single[1].recording.about.scenario

    content = msgspec.json.decode((single[0] / "report.json").read_bytes())
    assert content["schema"] == SCHEMA == "srm-loadtest-1"
    assert list(content) == [
        *("schema", "title", "command", "runs", "knee", "knee_may_lie_beyond", "outcome")
    ]
    (run,) = content["runs"]
    assert list(run) == [
        *("summary", "scenario", "command", "started_unix", "seconds", "stopped_by", "machine"),
        *("versions", "warnings", "objectives", "failed", "histograms", "parts"),
        *("timeline", "server"),
    ]
    assert run["warnings"] == ["The harness was late.", EVIL]
    for name, buckets in run["histograms"].items():
        assert sum(buckets["counts"]) == run["summary"][name]["count"] > 0
        assert buckets["start_s"] == sorted(buckets["start_s"])
        assert all(a < b for a, b in zip(buckets["start_s"], buckets["end_s"], strict=True))


@pytest.mark.parametrize("content", ["{}", "[]", "nothing", '{"schema": "srm-loadtest-2"}',
                                     f'{{"schema": "{SCHEMA}", "runs": [{{}}]}}'])  # fmt: skip
def test_another_file_is_no_report(tmp_path: Path, content: str) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(ConfigError, match=r"report\.json"):
        read_report(tmp_path)


def test_summary_csv_has_every_measure_as_it_is(sweep: Sweep) -> None:
    folder, runs, _ = sweep
    for row, run in zip(rows_of(folder / "summary.csv"), runs, strict=True):
        assert row["name"] == run.summary.name
        assert len(row) == 3 + len(MEASURES)
        for key, measure in MEASURES.items():
            is_time = measure.kind == "seconds" and not key.endswith("_s")
            cell = row[f"{key}_s" if is_time else key]
            assert same(float(cell or "nan"), value_of(run.summary, key))


def test_requests_csv_has_every_request(single: Single) -> None:
    folder, run, _ = single
    requests, events = run.recording.requests, run.recording.events
    for row, request in zip(rows_of(folder / "requests.csv"), requests, strict=True):
        times = events["time"][events["request"] == request["index"]]
        first = times.min() if len(times) else math.nan
        for name, expected in (
            ("index", request["index"]),
            ("planned_s", request["planned"]),
            ("ttft_s", first - request["planned"]),
            ("e2e_s", request["ended"] - request["planned"]),
            ("queue_s", request["queue_s"]),
            ("usage_output_tokens", request["usage_output_tokens"]),
        ):
            unknown = math.isnan(expected) or expected == -1
            assert (row[name] == "") == unknown
            assert unknown or float(row[name]) == pytest.approx(expected, abs=2e-6)
        assert row["error"] == ("none" if len(times) else "rejected")


def test_markdown_and_html_say_what_was_measured(single: Single) -> None:
    folder, run, _ = single
    markdown, html = ((folder / name).read_text() for name in ("report.md", "report.html"))
    summary, shown = run.summary, cells(page_in(folder))
    ms = unit_for("seconds", [summary.e2e.p99])
    for value in (
        ms.write(summary.ttft.p50),
        ms.write(summary.e2e.p999),
        ms.write(summary.itl.max),
        f"{summary.planned:,}",
        f"{summary.errors['rejected']:,}",
        unit_for("tokens_per_s", [0]).write(summary.output_tokens_per_s),
    ):
        assert f" {value} |" in markdown
        assert value in shown
    for text, begins in ((markdown, "| Measure"), (html, "<svg")):
        assert 0 < text.index("The harness was late.") < text.index(begins)
        assert run.recording.about.command in text


def test_objectives_pass_or_fail(single: Single) -> None:
    _, run, report = single
    table = objectives_table(report.runs[0])
    assert {row[0].split(":")[0]: row[-1] for row in table.rows} == {
        "ttft<0.5": "fail",  # since 5 % were rejected
        "e2e<1ms": "fail",
        "all of these": "",
        "fail if ttft_p99>1ms": "fail",
        "fail if errors>9999": "pass",
    }
    rejected = run.summary.rejected_share
    assert report.runs[0].objectives == {"ttft<0.5": pytest.approx(1 - rejected), "e2e<1ms": 0}
    fine = run_of(rate=10, objectives=("ttft<0.5",))
    observed = observe(fine.recording, fine.summary.window)
    rows = objectives_table(report_of(fine.summary, observed)).rows
    assert rows == [["ttft<0.5", "100", "pass"], ["all of these", "100", ""]]


def test_a_sweep_shows_its_steps_its_knee_and_their_warnings(sweep: Sweep) -> None:
    folder, runs, _ = sweep
    markdown, html = ((folder / name).read_text() for name in ("report.md", "report.html"))
    assert all(" ".join(OUTCOME) in text for text in (markdown, html))
    assert html.count(">knee so far</text>") == 5
    assert "The knee so far is at poisson 60/s." in html
    shown = cells(page_in(folder))
    for run in runs:
        assert run.summary.name in shown
        assert f"| {run.summary.name} |" in markdown
    assert "rate, of each step" in markdown and "60, 10" in markdown
    first = html[: html.index("The sweep</h2>")]  # warnings of the knee's step stand there too
    assert "poisson 60/s: 60 <code>late</code>" in first
    assert "2 of 2 steps have warnings" in first
    assert [html.count(f"{rate} <code>late</code>") for rate in (10, 60)] == [1, 2]


def test_the_page_is_whole_and_wants_nothing_from_elsewhere(single: Single, sweep: Sweep) -> None:
    for folder in (single[0], sweep[0]):
        html, page = (folder / "report.html").read_text(), page_in(folder)
        ids = [item.attrib["id"] for item in page.iter() if "id" in item.attrib]
        for element in page.iter():
            assert element.tag not in {"script", "link", "img"}
            for name, value in element.attrib.items():
                is_address = name in {"src", "href", "srcset", "action", "data"}
                assert not name.startswith("on")
                assert not is_address or value.startswith("#"), (element.tag, name, value)
        assert not re.search(r"@import|url\((?!#)|<script|javascript:", html)
        assert "default-src 'none'" in html
        assert len(ids) == len(set(ids))
        used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', html))
        assert used and used <= set(ids)


def test_whatever_a_name_contains_is_text(single: Single, sweep: Sweep) -> None:
    assert EVIL in cells(page_in(single[0]))
    for folder in (single[0], sweep[0]):
        markdown = (folder / "report.md").read_text()
        outside = re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", markdown, flags=re.S | re.M)
        assert "<script" not in outside
        assert not re.search(r"(?<!\\)\]\(", outside)
        table = [line for line in outside.splitlines() if line.startswith("| ")]
        widths = {line.count("|") for line in table if line.startswith("| ---")}
        assert all(len(re.findall(r"(?<!\\)\|", line)) in widths for line in table)


def test_plots_take_their_colours_from_the_page(single: Single) -> None:
    html = (single[0] / "report.html").read_text()
    plots = re.findall(r"<svg.*?</svg>", html, re.S)
    assert len(plots) == 12
    for plot in plots:
        assert re.search(r'^<svg viewBox="[^"]+" role="img" aria-label="[^"]{20,}">', plot)
        assert not re.search(r"(?:fill|stroke): ?#|DejaVu", plot)
        assert "var(--series-1)" in plot or "var(--series-3)" in plot
        assert len(plot) < 40_000
    assert html.count("<figure") == html.count("<summary>As a table") == len(plots)


def test_runs_without_requests_or_replies_are_reported(tmp_path: Path) -> None:
    nothing = recorded(seconds=4)
    nothing.requests, nothing.events = np.zeros(0, REQUEST), np.zeros(0, EVENT)
    nothing.clients, nothing.about.server_metrics = nothing.clients[:0], []
    failed = recorded(rate=5, seconds=4, failing=1.0, objectives=("ttft<1",))
    one = recorded(rate=1, seconds=1.0, warmup_s=0.0)
    for name, recordings in (("nothing", [nothing]), ("one", [one]), ("both", [nothing, failed])):
        folder = tmp_path / name
        report = write_reports(folder, [MeasuredRun(summarize(run), run) for run in recordings])
        assert same(read_report(folder), report)
        assert "nan" not in " ".join(cells(page_in(folder))).lower()
        assert "nan" not in (folder / "report.md").read_text().lower()
        num_requests = sum(len(recording.requests) for recording in recordings)
        assert len(rows_of(folder / "requests.csv")) == num_requests


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_files, "html", lambda _report: "")
    run = run_of(rate=5, seconds=2)
    (tmp_path / "file").write_text("")
    for runs, knee, message in (
        ([], None, "at least one run"),
        ([run], "x", "knee 'x' is none of the runs poisson 5/s"),
        ([run], None, "cannot write the report into"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_reports(tmp_path / "file", runs, knee)


def test_the_scenario_that_is_shown_is_the_one_that_ran() -> None:
    scenario = Scenario(
        url='http://a/"quoted"\\\x7f', rate=1e-7, stream=False, objectives=("ttft<1",),
        arrivals="trace", trace=Path("a b.jsonl"), top_k=3, extra_body='{"a":\n"ü"}',
    )  # fmt: skip
    shown = tomllib.loads(scenario_toml(scenario))
    assert msgspec.convert(shown, Scenario, dec_hook=lambda kind, value: kind(value)) == scenario
    assert tomllib.loads(scenario_toml(Scenario())) == {}


def test_counts_that_nobody_checked_are_not_called_equal() -> None:
    """A server without usage: 0 of 0 differ."""
    summary = msgspec.structs.replace(run_of().summary, checked=0, miscounted=0)
    run = report_of(summary, observe(run_of().recording, summary.window))
    assert [row[1] for row in harness_table(run).rows[-2:]] == ["none checked", "none checked"]
    assert not [row for row in throughput_table(run).rows if "differ" in row[0]]
