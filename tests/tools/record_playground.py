"""Record the playground while it looks for a right answer, and make the dashboard's pictures.

`python -m tests.tools.record_playground FOLDER` starts a server of `models/regex` and Chromium, and
writes `dashboard-light.png`, `dashboard-dark.png` and `assets/playground.webp` into the folder.
"""

from __future__ import annotations

import io
import sys
import time
from itertools import pairwise

from PIL import Image
from playwright.sync_api import FloatRect, Page, ViewportSize, sync_playwright

from research.bench.host.serving import serving
from tests.browser.conftest import launch

MATCHING = ("1/2", "3/4", "22/7", "0/5", "100/3")
OTHERS = ("1/", "/2", "1/0", "3:4", "1/2/3", "22", "a/b")
FIELDS = {"n": 20_000, "max_tokens": 66, "seed": 1}
VIEW = ViewportSize(width=1_000, height=2_150)
"""All that the recording shows, so that nothing scrolls."""
HEIGHT = 962
"""Pixels from the strings to the end of the second row of answers."""
FIRST_MS, LAST_MS = 1_500, 2_500
"""How long the first and the last frame stay."""


def main(folder: str) -> None:
    """Run the playground once, and write the pictures into the folder of pages."""
    with serving("--model=models/regex") as server, sync_playwright() as playwright:
        browser = launch(playwright)
        if browser is None:
            raise SystemExit("there is no Chromium; tests/install.sh installs it as root on Debian")
        page = browser.new_page(viewport=VIEW)
        page.goto(server.url)
        page.wait_for_function("document.getElementById('accepts').value")
        frames, times = record(page)
        page.set_viewport_size({**VIEW, "height": 900})
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            path = f"{folder}/dashboard-{scheme}.png"
            page.screenshot(path=path, full_page=True, animations="disabled")
        browser.close()
    durations = [round(1_000 * (later - at)) for at, later in pairwise(times)]
    path, shown = f"{folder}/assets/playground.webp", [FIRST_MS, *durations[1:], LAST_MS]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=shown, loop=0)


def record(page: Page) -> tuple[list[Image.Image], list[float]]:
    """Fill in the form, run it, and return pictures until it has ended, with the time of each."""
    page.fill("#accepts", "\n".join(MATCHING))
    page.fill("#rejects", "\n".join(OTHERS))
    for box in page.locator("#strings textarea").all():
        box.evaluate(f"one => one.rows = {len(OTHERS)}")  # as a reader drags it, to see all
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
    box = page.locator("#strings").bounding_box()
    assert box
    clip = FloatRect(x=0, y=box["y"] - 12, width=VIEW["width"], height=HEIGHT)
    return Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")


if __name__ == "__main__":
    main(*sys.argv[1:])
