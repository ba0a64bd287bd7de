"""/docs in Chromium: contents, a search, and the page's look, though it loads nothing."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Open, is_as_wide_as
from tests.serving import Server


@pytest.fixture
def reference(server: Server, open_page: Open) -> Page:
    page = open_page()
    page.get_by_role("link", name="API", exact=True).click()
    expect(page.locator("h1")).to_have_text("srm HTTP API")
    return page


def test_its_contents_lead_to_every_entry_and_it_can_be_searched(reference: Page) -> None:
    linked = reference.locator("nav a").evaluate_all("all => all.map(one => one.hash.slice(1))")
    entries = reference.locator("details").evaluate_all("all => all.map(one => one.id)")
    assert linked == entries
    assert len(entries) > 50
    entry = reference.locator("#CompletionRequest")
    expect(entry.locator("table")).to_be_hidden()
    reference.get_by_role("link", name="CompletionRequest", exact=True).first.click()
    expect(entry.locator("table")).to_be_visible()
    expect(entry).to_be_in_viewport()
    reference.fill("#search", "temperature top_k body")
    shown = reference.locator("details:visible")
    expect(reference.locator("#CompletionRequest table")).to_be_visible()
    assert 0 < shown.count() < 5
    expect(reference.locator("#found")).to_contain_text(f"{shown.count()} of ")
    reference.locator("#CompletionRequest").get_by_role("link", name="Until").click()
    expect(reference.locator("#Until table")).to_be_visible()
    reference.fill("#search", "no such words")
    expect(shown).to_have_count(0)


def test_it_looks_as_the_page_does_and_fits_the_screen(server: Server, open_page: Open) -> None:
    look = """() => ["color", "backgroundColor", "fontFamily"]
        .map(name => getComputedStyle(document.body)[name])"""
    cut = "all => all.filter(one => one.scrollWidth > one.clientWidth).length"
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        looked = page.evaluate(look)
        page.goto(f"{server.url}/docs")
        assert page.evaluate(look) == looked
    height = page.evaluate("document.documentElement.scrollHeight")
    page.locator("details").evaluate_all("all => all.forEach(one => one.open = true)")
    for width in (320, 360, 1280):
        assert is_as_wide_as(page, width)
        assert page.locator(".scroll").evaluate_all(cut) == 0
    assert height < 8_000
