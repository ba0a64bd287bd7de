"""Record the playground while it looks for a right answer, and make the dashboard's pictures.

example, beside `make serve MODEL=regex`:
  .venv/bin/python -m tests.tools.record_playground http://localhost:8000 docs
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import time
from itertools import pairwise

from PIL import Image
from playwright.sync_api import Page, ViewportSize, sync_playwright

MATCHING = ("1/2", "3/4", "22/7", "0/5", "100/3")
OTHERS = ("1/", "/2", "1/0", "3:4", "1/2/3", "22", "a/b")
FIELDS = {"n": 20_000, "max_tokens": 66, "seed": 1}
VIEW = ViewportSize(width=1_000, height=1_000)
SCALE = 0.8
"""Pixels of the picture for one of the page."""
LAST_MS = 4_000
"""How long the last frame stays."""


def main(url: str, folder: str) -> None:
    """Run the playground at this address once, and write the pictures into the folder of pages."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    arguments = ["--no-sandbox"] if os.getuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_page(viewport=VIEW, device_scale_factor=SCALE)
        page.goto(url)
        page.wait_for_function("document.getElementById('accepts').value")
        frames, times = record(page)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            page.screenshot(path=f"{folder}/dashboard-{scheme}.png", full_page=True)
        browser.close()
    gaps = [round(1_000 * (later - at)) for at, later in pairwise(times)]
    first, *others = frames
    path, durations = f"{folder}/assets/playground.webp", [*gaps, LAST_MS]
    first.save(path, save_all=True, append_images=others, duration=durations, loop=0)


def record(page: Page) -> tuple[list[Image.Image], list[float]]:
    """Fill in the form, run it, and return pictures until it has ended, with the time of each."""
    page.fill("#accepts", "\n".join(MATCHING))
    page.fill("#rejects", "\n".join(OTHERS))
    for name, value in FIELDS.items():
        page.fill(f"#{name}", str(value))
    page.uncheck("#held")
    frames, times, is_running = [capture(page)], [time.monotonic()], True
    page.click("#run")
    while is_running:
        is_running = page.locator("#run").is_disabled()
        frames.append(capture(page))
        times.append(time.monotonic())
    return frames, times


def capture(page: Page) -> Image.Image:
    """Return a picture of the page from the strings on."""
    page.evaluate("document.getElementById('strings').scrollIntoView()")
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


if __name__ == "__main__":
    main(*sys.argv[1:])
