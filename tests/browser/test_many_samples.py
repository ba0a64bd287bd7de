"""The playground in Chromium: many samples counted, judged and stopped, and the model's example."""

from __future__ import annotations

import json
import re
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Open
from tests.browser.test_page import run, slow_down
from tests.kit.serving import ROOT, Server

MATCH = "[a-m]"


def counts_of(page: Page, kind: str) -> list[int]:
    """How many samples have each of the answers that are shown."""
    heads = page.locator(f".answer{kind} h3").all_text_contents()
    return [int(head.split(" ")[0].replace(",", "")) for head in heads]


def test_many_samples_are_counted_as_the_server_does(server: Server, open_page: Open) -> None:
    page = open_page()
    asked: dict[str, Any] = {"n": 2_000, "max_tokens": 2, "temperature": 0.8, "seed": 3}
    run(page, prompt="the cat", until=json.dumps({"match": MATCH}), **asked)
    reply = server.post(**asked, until={"match": MATCH}, **{"return": "counts"}).json()
    (samples,) = reply["samples"]
    (first,) = server.post(**asked, until={"match": MATCH, "count": 1}).json()["samples"]
    summary = (
        f"2,000 of 2,000 samples ended · {samples['distinct']:,} distinct · "
        f"{samples['matched']:,} right ("
    )
    assert 0 < samples["matched"] < 2_000
    for place in ("#progress", "#announcement"):
        expect(page.locator(place)).to_contain_text(summary)
        expect(page.locator(place)).to_contain_text(f"the first is sample {first['drawn']} ")
        expect(page.locator(place)).to_contain_text(f"{reply['usage']['completion_tokens']:,} tok")
    for kind, is_right in ((".right", True), (":not(.right)", False)):
        counts = [row["count"] for row in samples["counts"] if bool(row["matched"]) is is_right]
        assert counts_of(page, kind) == counts[:10]


def test_a_run_ends_at_the_first_right_sample(server: Server, open_page: Open) -> None:
    page = open_page()
    rule = {"match": MATCH, "number": 1}
    for until, verify in (({"match": MATCH, "count": 1}, ""), ({"score": 0, "count": 2}, rule)):
        written = json.dumps(verify) if verify else ""
        run(page, prompt="the cat", n=3_000, max_tokens=2, seed=3,
            until=json.dumps(until), verify=written)  # fmt: skip
        more = {"verify": verify} if verify else {}
        asked = {"n": 3_000, "max_tokens": 2, "seed": 3, "temperature": 0.8}
        (samples,) = server.post(**asked, until=until, **more).json()["samples"]
        ended = f"{samples['drawn']} of 3,000 samples ended"
        expect(page.locator("#progress")).to_contain_text(ended)


def test_what_it_keeps_and_shows_does_not_grow(open_page: Open) -> None:
    page = open_page()
    size = page.evaluate(
        """async () => {
          const { Answers } = await import("/dashboard/samples.js");
          const answers = new Answers(40000);
          answers.show();
          for (let index = 0; index < 40000; index += 1) {
            const text = String(index % 20000).padEnd(1000);
            answers.add({ choices: [{ index, text, finish_reason: "stop" }] });
          }
          answers.finish();
          return answers.answers.size;
        }"""
    )
    assert 15_000 < size < 17_000
    expect(page.locator("#samples > *")).to_have_count(20)
    expect(page.locator("#progress")).to_contain_text(f"over {size:,} distinct")


def test_leaving_the_page_ends_the_run(server: Server, open_page: Open) -> None:
    page = open_page()
    slow_down(page)
    page.fill("#n", "3000")
    page.fill("#prompt", "the cat")
    page.click("#run")
    expect(page.locator("#progress")).to_contain_text(" of 3,000 samples ended")
    page.goto("about:blank")
    server.wait_until_idle()


@pytest.mark.parametrize("route", ["completion", "chat"])
def test_programs_send_what_the_page_sends(
    route: str, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_page()
    expect(page.locator("#model")).to_have_text("tiny")
    page.check(f"#{route}")
    text = """it's "a" \\ true\nnull ✓😀"""
    fields = {"prompt" if route == "completion" else "message": text, "stop": "it's\n\\n"}
    page.click("summary")
    page.fill("#key", "sesame")
    with page.expect_request("**/completions") as asked:
        run(page, n=2, max_tokens=3, seed=2**63 + 7, until='{"match": "it\'s", "count": null}',
            verify='{"match": "t",\n"number": 12345678901234567890}', **fields)  # fmt: skip
    sent = json.loads(asked.value.post_data or "")
    assert sent["seed"] == 2**63 + 7 and sent["verify"]["number"] == 12345678901234567890
    curl = shlex.split(page.locator("#curl").text_content() or "")
    assert curl[2] == asked.value.url
    assert json.loads(curl[-1]) == sent
    assert "sesame" not in page.locator("details").inner_text()
    called: dict[str, Any] = {}

    def create(**given: Any) -> list[object]:
        called.update(given)
        return []

    completions = SimpleNamespace(create=create)
    client = SimpleNamespace(completions=completions, chat=SimpleNamespace(completions=completions))
    monkeypatch.setattr("openai.OpenAI", lambda **given: client)
    exec(page.locator("#python").text_content() or "", {})
    assert called | called.pop("extra_body") == sent


@pytest.mark.parametrize(
    ("name", "text"),
    [("n", "0"), ("n", "1000000000"), ("n", "many"), ("seed", "1.5"), ("verify", '{"match": '),
     ("verify", '{"matches": "a"}'), ("until", '{"count": 0}'), ("until", '"a"')],
)  # fmt: skip
def test_the_servers_error_is_beside_the_field(
    name: str, text: str, open_page: Open, complaints: list[str]
) -> None:
    page = open_page()
    run(page, prompt="the cat", max_tokens=2, **{name: text})
    error = page.locator(f"label:has(#{name}) + #error")
    expect(error).to_have_text(re.compile(f"^400: .*{name}"))
    expect(page.locator("[aria-invalid]")).to_have_id(name)
    expect(page.locator(f"#{name}")).to_be_focused()
    expect(page.locator("#samples > *")).to_have_count(0)
    run(page, n=2, **({} if name == "n" else {name: ""}))
    expect(page.locator("#error")).to_be_hidden()
    expect(page.locator("[aria-invalid]")).to_have_count(0)
    complaints.clear()  # Chromium's own line about the 400


def open_with(open_page: Open, example: dict[str, Any], prompt: str = "") -> Page:
    """The page of a model with this example, whose prompt is shown as `prompt`."""
    page = open_page()
    page.route("**/dashboard/example.json", lambda route: route.fulfill(json=example))
    page.reload()
    expect(page.locator("#prompt")).to_have_value(prompt or example["prompt"])
    return page


def test_strings_to_match_make_the_prompt_and_the_rule(open_page: Open) -> None:
    example = json.loads((ROOT / "models/regex/example.json").read_text())
    page = open_with(open_page, example)
    *_, curl = shlex.split(page.locator("#curl").text_content() or "")
    own = {"model", "stream", "stream_whole", "stream_options"}
    sent = {name: value for name, value in json.loads(curl).items() if name not in own}
    assert sent == example
    expect(page.locator("#accepts")).to_have_value("\n".join(example["verify"]["accepts"]))
    expect(page.locator("#held")).to_be_checked()
    page.fill("#accepts", "a1\nb\\2\n\nc3\n")
    page.fill("#rejects", "\nd")
    expect(page.locator("#prompt")).to_have_value("✓a1✓b\\2→")
    page.uncheck("#held")
    expect(page.locator("#prompt")).to_have_value("✓a1✓b\\2✓c3→")
    rule = {"accepts": ["a1", "b\\2", "c3"], "rejects": ["d"]}
    assert json.loads(page.input_value("#verify")) == rule


def test_an_example_cannot_inject_script(open_page: Open) -> None:
    evil = "</textarea><script>window.injected = 1</script><img src=x onerror='injected = 1'>"
    verify = {"accepts": [evil], "rejects": [], "match": evil}
    page = open_with(open_page, {"prompt": evil, "n": evil, "stop": [evil], "verify": verify})
    assert page.locator("#form img").count() == 0
    page.click("summary")
    expect(page.locator("#curl")).to_contain_text("<script>")
    assert page.evaluate("window.injected") is None


def test_an_example_of_token_ids_is_sent_as_such(open_page: Open) -> None:
    page = open_with(open_page, {"prompt": [0, 1]}, "[0,1]")
    with page.expect_request("**/v1/completions") as asked:
        run(page, n=1, max_tokens=2)
    assert json.loads(asked.value.post_data or "")["prompt"] == [0, 1]


@pytest.mark.parametrize("example", [{"prompt": ["a", "b"]}, {"prompt": "a", "stop": [1, 2]}])
def test_an_example_that_no_field_can_have_is_left_out(
    open_page: Open, example: dict[str, Any]
) -> None:
    """It was shown in part, and its reply found no cards."""
    before = open_page().input_value("#prompt")
    page = open_with(open_page, example, before)
    expect(page.locator("#stop")).to_have_value("")
