"""/docs in Chromium: Swagger UI, in the dashboard's theme, from this server alone."""

from __future__ import annotations

from playwright.sync_api import expect

from tests.browser.conftest import Open, brightness, is_as_wide_as
from tests.kit.serving import Server


def test_a_request_is_read_and_tried_by_keyboard(open_page: Open) -> None:
    page = open_page()
    page.get_by_role("link", name="API", exact=True).click()
    operation = page.locator("#operations-Completions_and_chats-post_v1_completions")
    operation.locator(".opblock-summary-control").focus()
    page.keyboard.press("Enter")
    operation.get_by_role("tab", name="Schema").first.focus()
    page.keyboard.press("Enter")
    fields = operation.locator(".json-schema-2020-12-property")
    expect(fields.first).to_contain_text("prompt")
    expect(fields.first).to_contain_text("One prompt or several")
    operation.get_by_role("button", name="Try it out").focus()
    page.keyboard.press("Enter")
    operation.get_by_role("button", name="Execute").focus()
    page.keyboard.press("Enter")
    expect(operation.locator(".live-responses-table")).to_contain_text("text_completion")


def test_it_has_the_theme_of_the_dashboard_and_fits_the_screen(
    server: Server, open_page: Open
) -> None:
    for scheme in ("light", "dark"):
        page = open_page(color_scheme=scheme)
        page.goto(f"{server.url}/docs")
        page.locator(".opblock-summary-control").first.click()
        expect(page.locator(".highlight-code").first).to_be_visible()
        (ink,) = brightness(page, ".info .title", "color")
        assert (ink > 400) is (scheme == "dark")
        for width in (320, 360, 1440):
            assert is_as_wide_as(page, width)
