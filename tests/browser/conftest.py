"""Chromium, and pages that must end without an error and without having left their origin."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright

from tests.kit.serving import Server

Open = Callable[..., Page]
WIDE = "all => all.filter(one => one.getBoundingClientRect().right > innerWidth + 0.5).length"
"""How many elements go beyond the right edge."""

expect.set_options(timeout=20_000)  # milliseconds, on a machine that does other things


def is_as_wide_as(page: Page, width: int) -> bool:
    """Whether the page needs no more than this width, and does not scroll sideways."""
    page.set_viewport_size({"width": width, "height": 900})
    return bool(page.evaluate("document.documentElement.scrollWidth") == width)


def brightness(page: Page, selector: str, kind: str) -> list[int]:
    """Return how bright this colour of each element that has one is: 0 for black, 765 for white."""
    colours = page.locator(selector).evaluate_all(
        f"all => all.map(one => getComputedStyle(one).{kind})"
    )
    return [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours if colour != "none"]


def launch(playwright: Playwright) -> Browser | None:
    """Start the machine's Chromium, if it has one."""
    path = shutil.which("chromium") or shutil.which("google-chrome")
    # Chromium refuses to sandbox root.
    arguments = ["--no-sandbox"] if os.getuid() == 0 else []
    return playwright.chromium.launch(executable_path=path, args=arguments) if path else None


@pytest.fixture(scope="module")  # while it runs, no other test can have an event loop
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = launch(playwright)
        if running is None:
            pytest.skip("there is no Chromium; tests/install.sh installs it as root on Debian")
        yield running
        running.close()


@pytest.fixture
def complaints() -> list[str]:
    """What pages said on their consoles; a test that provokes some takes them out."""
    return []


@pytest.fixture
def requested() -> list[str]:
    """The addresses that pages asked for, or tried to."""
    return []


@pytest.fixture
def open_url(browser: Browser, complaints: list[str], requested: list[str]) -> Iterator[Open]:
    """open_url(url, width=320, color_scheme="dark"): a page that must not complain."""
    contexts = []

    def open_it(url: str, width: int = 1200, **settings: Any) -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, **settings)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: requested.append(request.url))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type == "error" else None,
        )
        page.goto(url)
        return page

    yield open_it
    for context in contexts:
        context.close()
    assert requested
    assert complaints == []


@pytest.fixture
def open_page(open_url: Open, server: Server, requested: list[str]) -> Iterator[Open]:
    """open_page(width=320, color_scheme="dark"): the page, with numbers in it."""

    def open_it(width: int = 1200, **settings: Any) -> Page:
        page = open_url(server.url, width, **settings)
        expect(page.locator("#total")).not_to_have_text("–")
        return page

    yield open_it
    assert [url for url in requested if not url.startswith(f"{server.url}/")] == []
