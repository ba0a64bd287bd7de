"""The page of a load test in Chromium: it asks for nothing, and is read on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from srm.loadtest.report.compare import compare
from srm.loadtest.report.compare_report import html
from srm.loadtest.report.report_files import write_reports
from tests.browser.conftest import WIDE, Open, brightness, is_as_wide_as
from tests.kit.loads.recorded_run import run_of


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    run = run_of("A warning.", rate=40, seconds=5, objectives=("ttft<0.5",))
    write_reports(folder / "single", [run])
    steps = [run_of(rate=rate, seconds=3) for rate in (10, 60)]
    write_reports(folder / "sweep", steps, knee=steps[0].summary.name)
    compared = compare(folder / "single", folder / "single")
    (folder / "compare.html").write_text(html(compared))
    return folder


@pytest.fixture
def open_file(open_url: Open, pages: Path, requested: list[str]) -> Iterator[Open]:
    """open_file(name, width=360): a page that asks for nothing but itself."""
    opened = []

    def open_it(name: str, *arguments: Any, **settings: Any) -> Page:
        opened.append((pages / name).as_uri())
        return open_url(opened[-1], *arguments, **settings)

    yield open_it
    assert requested == opened


@pytest.mark.parametrize("name", ["single/report.html", "sweep/report.html", "compare.html"])
def test_all_of_it_is_seen_on_a_phone(open_file: Open, name: str) -> None:
    page = open_file(name, 360)
    page.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
    assert is_as_wide_as(page, 360)
    assert page.locator("body *:not(.scroll *, svg *, .hidden)").evaluate_all(WIDE) == 0
    sizes = "all => all.map(one => [one.clientWidth, one.clientHeight])"
    plots = page.locator("svg").evaluate_all(sizes)
    assert len(plots) >= 3
    assert all(250 < width <= 360 and 120 < height < 300 for width, height in plots)
    heights = "all => all.map(one => one.getBoundingClientRect().height)"
    assert min(page.locator("svg text").evaluate_all(heights)) > 7


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_plots_stand_out_from_the_page_in_light_and_dark(open_file: Open, scheme: str) -> None:
    page = open_file("single/report.html", color_scheme=scheme)
    (paper,) = brightness(page, "body", "backgroundColor")
    assert (paper > 600) if scheme == "light" else (paper < 100)
    texts = brightness(page, "svg text", "fill")
    assert texts and all(abs(text - paper) > 250 for text in texts)
    lines = brightness(page, "svg path[style*='series']", "stroke")
    assert lines and all(abs(line - paper) > 150 for line in lines)


def test_what_warns_stands_first_and_a_table_beside_each_plot(open_file: Open) -> None:
    page = open_file("single/report.html")
    assert page.locator("main > *").first.inner_text().endswith("A warning.")
    assert page.get_by_role("img").count() == page.locator("figure").count() == 12
    tables = page.locator("figure table")
    assert tables.count() == 12
    assert not tables.first.is_visible()
    page.locator("figure summary").first.click()
    assert tables.first.is_visible()
    assert page.locator("td.pass").inner_text() == "pass"
