"""The page in Chromium: true numbers, a playground that streams, nothing that leaves the origin."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

from playwright.sync_api import Page, expect

from tests.browser.conftest import WIDE, Open, brightness, is_as_wide_as
from tests.kit.serving import NUM_SLOTS, Server


def run(page: Page, **fields: object) -> None:
    """Fill fields in, press Run and wait until it has ended."""
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))
    page.click("#run")
    expect(page.locator("#run")).to_be_enabled()


def completions(page: Page) -> list[str]:
    """The samples, without the prompt before each."""
    prompt = page.input_value("#prompt")
    texts = page.locator(".sample p").evaluate_all("all => all.map(one => one.textContent)")
    assert all(text.startswith(prompt) for text in texts)
    return [text.removeprefix(prompt) for text in texts]


def test_it_shows_the_numbers_that_metrics_has(server: Server, open_page: Open) -> None:
    page = open_page()
    ended = server.metric("srm_engine_sequence_seconds_count")
    expect(page.locator("#whole-sequence td").last).to_have_text("0")
    assert server.post(n=5, max_tokens=9, ignore_eos=True).status_code == 200
    assert server.post(n=0).status_code == 400
    assert server.metric("srm_engine_sequence_seconds_count") == ended + 5
    for row, count in {"whole-sequence": "5", "first-token": "5", "inter-token": "40"}.items():
        expect(page.locator(f"#{row} td").last).to_have_text(count)
    sampled = int(server.metric("srm_engine_decode_tokens_total"))
    shown = {"total": f"{sampled:,}", "slots": f"0 of {NUM_SLOTS} slots", "occupancy": "0 %",
             "waiting": "0", "state-text": "Ready", "model": "tiny", "engines": "1 of 1",
             "weights": "1", "batches": "0", "batches-ended": "0"}  # fmt: skip
    for name, text in shown.items():
        expect(page.locator(f"#{name}")).to_have_text(text)
    for row in ("first-token", "inter-token", "step-time", "whole-sequence"):
        median, *_ = page.locator(f"#{row} td").all_text_contents()
        assert re.fullmatch(r"[\d.,]+ m?s", median)
    assert page.locator("#tokens-chart .line").get_attribute("d")


def test_it_shows_what_runs(server: Server, open_page: Open) -> None:
    page = open_page()
    long = {"prompt": "the cat", "n": 2_000, "max_tokens": 120, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=long):
        expect(page.locator("#running")).to_have_text(str(NUM_SLOTS))
        expect(page.locator("#occupancy")).to_have_text("100 %")
        expect(page.locator("#waiting")).to_have_text(re.compile(r"1,[89]\d\d"))
        expect(page.locator("#tokens")).not_to_have_text("0")
    server.wait_until_idle()


def test_the_playground_shows_what_the_api_answers(server: Server, open_page: Open) -> None:
    page = open_page()
    sampling = {"temperature": 0.9, "top_p": 0.8, "top_k": 40, "min_p": 0.01, "seed": 2**63 + 7}
    run(page, prompt="the cat", n=3, max_tokens=60, stop="zq\n\\n", **sampling)
    answer = server.post(n=3, max_tokens=60, stop=["zq", "\n"], **sampling).json()
    assert completions(page) == [choice["text"] for choice in answer["choices"]]
    reasons = page.locator(".sample h3 span").all_text_contents()
    assert reasons == [choice["finish_reason"] for choice in answer["choices"]]
    tokens = answer["usage"]["completion_tokens"]
    expect(page.locator("#progress")).to_contain_text(f"3 of 3 samples ended · {tokens} tokens in")
    expect(page.locator("#announcement")).to_contain_text("3 of 3 samples ended")


def test_a_chat_goes_on_from_the_reply_that_was_chosen(server: Server, open_page: Open) -> None:
    page = open_page()
    page.check("#chat")
    sampling = {"n": 2, "max_tokens": 5, "seed": 4, "temperature": 0.8}
    run(page, message="the cat", system="mat", **sampling)
    results = [{"role": "system", "content": "mat"}, {"role": "user", "content": "the cat"}]
    reply = server.http.post("/v1/chat/completions", json={"messages": results, **sampling}).json()
    replies = [choice["message"]["content"] for choice in reply["choices"]]
    assert page.locator(".sample p").all_text_contents() == replies
    page.get_by_role("button", name="Go on from this one").nth(1).click()
    with page.expect_request("**/v1/chat/completions") as asked:
        run(page, message="sat")
    results += [{"role": "assistant", "content": replies[1]}, {"role": "user", "content": "sat"}]
    body: Any = asked.value.post_data_json
    assert body["messages"] == results
    expect(page.locator("#turns li")).to_have_count(3)
    page.click("#new-chat")
    expect(page.locator("#turns li, .sample")).to_have_count(0)


def slow_down(page: Page) -> None:
    """Let the page receive 20 kB a second."""
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    slow = {"offline": False, "latency": 0, "downloadThroughput": 20_000, "uploadThroughput": -1}
    session.send("Network.emulateNetworkConditions", slow)


def test_text_streams_in_and_can_be_stopped(server: Server, open_page: Open) -> None:
    page = open_page()
    page.fill("#n", "64")
    page.fill("#max_tokens", "120")
    slow_down(page)  # or all might have come before it is stopped
    for prompt, by_key in (("the cat", False), ("sat on", True)):
        page.fill("#prompt", prompt)
        page.click("#run")
        begun = re.compile(f"^{prompt}.{{5}}", re.S)
        # Any sample: the first one may end early.
        expect(page.locator(".sample p", has_text=begun).first).to_be_attached()
        page.keyboard.press("Escape") if by_key else page.click("#cancel")
        expect(page.locator("#announcement")).to_have_text("Stopped")
        assert "stopped" in page.locator(".sample h3 span").all_text_contents()
        assert page.locator("#error").is_hidden()
    server.wait_until_idle()


def test_an_error_is_said(open_page: Open, complaints: list[str]) -> None:
    page = open_page()
    run(page, prompt="cat " * 200)
    expect(page.locator(".sample")).to_have_count(0)
    error = page.locator("#error")
    expect(error).to_be_visible()
    expect(error).to_have_text(re.compile("^400: .*context"))
    run(page, prompt="the cat", max_tokens=3)
    expect(error).to_be_hidden()
    (message,) = complaints  # Chromium's own line about the 400
    assert "400" in message
    complaints.clear()


def test_a_server_that_is_away_is_said_until_it_is_back(
    open_page: Open, complaints: list[str]
) -> None:
    page = open_page()
    page.route("**/*", lambda route: route.abort())
    away = "The server cannot be reached"
    expect(page.locator("#metrics-error")).to_have_text(f"{away}; trying again.")
    expect(page.locator("#state-text")).to_have_text("Not reachable")
    numbers = page.locator(".number, #numbers td")
    assert set(numbers.all_text_contents()) == {"–"}
    run(page)
    expect(page.locator("#error")).to_have_text(f"{away}.")
    page.unroute("**/*")
    expect(page.locator("#metrics-error")).to_be_hidden()
    expect(page.locator("#slots")).to_have_text(f"0 of {NUM_SLOTS} slots")
    assert all("Failed to load resource" in complaint for complaint in complaints)
    complaints.clear()


def test_one_engine_of_two_is_said(open_page: Open) -> None:
    page = open_page()
    states = {"engines": ["ready", "it does not answer"], "summary": "1 of 2 engines"}
    page.route("**/ready", lambda route: route.fulfill(json={"status": "ready", **states}))
    expect(page.locator("#state-text")).to_have_text("Ready: 1 of 2 engines")
    expect(page.locator("#state")).to_have_attribute("data-state", "part")


def test_an_api_key_goes_with_every_request_and_is_kept_nowhere(open_page: Open) -> None:
    page = open_page()
    page.fill("#key", "sesame")
    with page.expect_request("**/metrics*") as scraped:
        pass
    with page.expect_request("**/v1/completions") as asked:
        run(page, max_tokens=2)
    for request in (scraped.value, asked.value):
        assert request.headers["authorization"] == "Bearer sesame"
    assert "sesame" not in page.evaluate("JSON.stringify([{...localStorage}, document.cookie])")
    page.reload()
    assert page.input_value("#key") == ""


def test_keyboard_labels_and_headings_are_enough_to_run_a_completion(open_page: Open) -> None:
    page = open_page()

    def focused() -> str:
        return str(page.evaluate("document.activeElement.id"))

    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the first link skips the numbers
    assert focused() == "completion"
    page.keyboard.press("ArrowRight")
    expect(page.locator("#message")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Tab")
    assert focused() == "prompt"
    page.keyboard.press("Control+A")
    page.keyboard.type("the cat")
    order = []
    while focused() != "run":
        page.keyboard.press("Tab")
        order.append(focused())
        assert len(order) < 20
        if focused() in {"n", "max_tokens"}:
            page.keyboard.press("Control+A")
            page.keyboard.type("2")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert {"n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "until", "verify",
            "stop", "key", "", "run"} == set(order)  # fmt: skip
    page.keyboard.press("Enter")
    expect(page.locator("#progress")).to_contain_text("2 of 2 samples ended")
    expect(page.locator("#run")).to_be_focused()
    page.focus("#prompt")
    page.keyboard.type(" sat")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".sample p").first).to_contain_text("the cat sat")
    expect(page.locator("#run")).to_be_enabled()
    unlabelled = "all => all.filter(one => !one.labels.length).map(one => one.id)"
    assert page.locator("input, textarea").evaluate_all(unlabelled) == []
    level = "all => all.map(one => Number(one.tagName[1]))"
    levels = page.locator("h1, h2, h3").evaluate_all(level)
    assert levels[0] == 1
    assert all(below - above <= 1 for above, below in pairwise(levels))
    assert page.locator("html").get_attribute("lang") == "en"


def test_a_narrow_screen_does_not_scroll_sideways(open_page: Open) -> None:
    page = open_page(320)
    page.click("summary")
    page.locator("#strings").evaluate("one => one.hidden = false")
    for n in (3, 70):  # beside each other, and counted
        run(page, prompt="w" * 60, n=n, max_tokens=20)
        for width in (320, 390, 768, 1440, 360):
            assert is_as_wide_as(page, width)
            assert page.locator("body *:not(.skip)").evaluate_all(WIDE) == 0
    hidden = page.locator(".scroll").evaluate(
        """one => {
          for (const cell of one.querySelectorAll("td")) cell.textContent = "123,456 s";
          return one.scrollWidth - one.clientWidth;
        }"""
    )
    assert hidden == 0, "a part of the latency table"


def test_curves_have_gaps_where_pauses_were_and_rates_few_digits(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#since")).to_have_text(re.compile(r"^\d\d s ago$"))
    seconds = [0, 1, 2, 9, 10]
    shapes = page.evaluate(
        """async (seconds) => {
          const { curve } = await import("/dashboard/show.js");
          const svg = document.getElementById("step-chart").cloneNode();
          curve(svg, seconds.map((at) => ({ at, value: 1 })), 10);
          return [...svg.children].map((one) => one.getAttribute("d"));
        }""",
        seconds,
    )
    lines = [re.findall(r"([ML])([\d.]+),", shape) for shape in shapes]
    assert lines[1] == [("M", "0.0"), ("L", "20.0"), ("L", "40.0"), ("M", "180.0"), ("L", "200.0")]
    assert [item for item, _ in lines[0]].count("M") == 2
    shown = page.evaluate(
        """async (values) => values.map((await import("/dashboard/show.js")).amount)""",
        [0, 0.332, 4.23, 38.5, 45_678, 912_345],
    )
    assert shown == ["0", "0.3", "4.2", "39", "45,678", "912K"]


def test_dark_and_light_follow_the_system_and_the_switch(open_page: Open) -> None:
    def background(page: Page) -> int:
        return brightness(page, "body", "backgroundColor")[0]

    dark, light = open_page(color_scheme="dark"), open_page(color_scheme="light")
    assert background(dark) < 100
    assert background(light) > 600
    light.click("#theme")
    assert background(light) == background(dark)
    expect(light.locator("#theme")).to_have_attribute("aria-pressed", "true")
    light.reload()
    assert background(light) == background(dark)


def test_the_browser_refuses_what_is_not_ours(
    open_page: Open, complaints: list[str], requested: list[str]
) -> None:
    page = open_page()
    violated = page.evaluate(
        """async () => {
          const violated = [];
          document.addEventListener("securitypolicyviolation",
            (event) => violated.push(event.effectiveDirective));
          await fetch("http://127.0.0.1:9/").catch(() => {});
          const script = document.createElement("script");
          script.textContent = "window.injected = true";
          document.head.append(script);
          const image = new Image();
          image.src = "http://127.0.0.1:9/x.png";
          document.body.append(image);
          await new Promise((resolve) => setTimeout(resolve, 50));
          return violated.concat(window.injected ? ["injected"] : []);
        }"""
    )
    assert sorted(violated) == ["connect-src", "img-src", "script-src-elem"]
    assert all("Content Security Policy" in complaint for complaint in complaints)
    complaints.clear()
    requested.remove("http://127.0.0.1:9/x.png")  # tried, and refused
