"""`until`, `return` and `stream_whole` over HTTP: slots are freed, and nothing else changes."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.serving import (
    CHATS,
    SERVER_FLAGS,
    Server,
    complete,
    connect,
    events_of,
    read_all,
    wait_until,
)  # fmt: skip

N = 200
SAMPLING: dict[str, Any] = {"prompt": "the cat", "n": N, "max_tokens": 8, "seed": 5}
VOWEL = "[aeiou]"
WHOLE: dict[str, Any] = {"stream_whole": True}


@pytest.fixture(scope="module")
def small_server(text_model: Path) -> Iterator[Server]:
    """With fewer slots than samples, and fewer rows than slots."""
    flags = ("--num-slots=7", "--max-step-rows=5", "--prefix-cache=false")
    with Server(text_model, *SERVER_FLAGS, *flags) as running:
        yield running


def enough_of(choices: list[dict[str, Any]], pattern: str, count: int) -> list[str]:
    """Texts of the first choices, up to the one at which so many match."""
    texts = [choice["text"] for choice in choices]
    ends = [end for end, text in enumerate(texts, 1) if re.search(pattern, text)]
    return texts[: ends[count - 1]] if len(ends) >= count else texts


@pytest.mark.parametrize(("count", "stop"), [(1, []), (7, []), (7, ["e", "tt"]), (N, ["e"])])
def test_the_reply_depends_on_no_slots(
    server: Server, small_server: Server, count: int, stop: list[str]
) -> None:
    full = complete(server, stop=stop, **SAMPLING)
    fields = {"until": {"match": VOWEL, "count": count}, "stop": stop, **SAMPLING}
    replies = [complete(one, **fields) for one in (server, small_server)]
    expected = enough_of(full["choices"], VOWEL, count)
    assert count == N or len(expected) < N
    for reply in replies:
        assert [choice["text"] for choice in reply["choices"]] == expected
        assert [choice["index"] for choice in reply["choices"]] == list(range(len(expected)))
        matched = sum(choice["matched"] for choice in reply["choices"])
        (samples,) = reply["samples"]
        assert samples["matched"] == matched
        assert (samples["requested"], samples["drawn"]) == (N, len(expected))
        assert samples["reached"] == (matched == count)
        ends = Counter(choice["finish_reason"] for choice in reply["choices"])
        assert samples["finished_by"] == ends
    tokens = {reply["usage"]["completion_tokens"] for reply in replies}
    assert len(tokens) == 1
    full_tokens = full["usage"]["completion_tokens"]
    for reply in replies:
        assert reply["usage"]["discarded_tokens"] <= full_tokens - min(tokens)
    server.wait_until_idle()
    small_server.wait_until_idle()


def test_those_that_are_not_needed_lose_their_slots_and_never_start(small_server: Server) -> None:
    server = small_server
    before = server.metric("srm_engine_decode_tokens_total")
    endless = {"max_tokens": 100, "min_tokens": 90, "prompt": [5], "n": 3_000, "seed": 1}
    reply = complete(server, until={"match": "(?s).*"}, **endless)
    server.wait_until_idle()
    assert [choice["index"] for choice in reply["choices"]] == [0]
    drawn = server.metric("srm_engine_decode_tokens_total") - before
    assert drawn <= 100 * 7 * 2  # of 3,000 x 90


def test_a_stream_that_nobody_reads_stops_its_samples_all_the_same(server: Server) -> None:
    stopped = server.metric("srm_engine_sequences_total", "stop")
    until = {"match": "(?s).*", "count": 150}
    # Some 7 MB, far more than the connection holds.
    fields = {"n": 200, "max_tokens": 60, "logprobs": 20, "until": until, "stream_whole": True}
    with closing(connect(server, prompt=[5], ignore_eos=True, **fields)) as connection:
        wait_until(lambda: server.metric("srm_engine_sequences_total", "stop") > stopped)
        server.wait_until_idle()
        assert b'"samples":[{"requested":200,"drawn":150,' in read_all(connection)


def test_each_prompt_has_its_own_end(server: Server) -> None:
    prompts = {**SAMPLING, "prompt": ["the cat", "on the mat"]}
    full = complete(server, **prompts)["choices"]
    reply = complete(server, until={"match": VOWEL, "count": 4}, **prompts)
    expected = [enough_of(full[:N], VOWEL, 4), enough_of(full[N:], VOWEL, 4)]
    assert [one["drawn"] for one in reply["samples"]] == [len(texts) for texts in expected]
    assert [choice["text"] for choice in reply["choices"]] == expected[0] + expected[1]
    assert reply["choices"][-1]["index"] == N + len(expected[1]) - 1


def test_counts_and_unique_are_of_all_that_was_drawn(server: Server) -> None:
    short = {**SAMPLING, "max_tokens": 1}
    texts = [choice["text"] for choice in complete(server, **short)["choices"]]
    counts = complete(server, **short, **{"return": "counts"})
    assert counts["choices"] == []
    (samples,) = counts["samples"]
    assert {one["text"]: one["count"] for one in samples["counts"]} == Counter(texts)
    assert samples["distinct"] == len(set(texts)) < N
    assert "matched" not in samples
    assert counts["usage"]["completion_tokens"] == N
    unique = complete(server, **short, logprobs=0, **{"return": "unique"})["choices"]
    firsts = sorted(texts.index(text) for text in set(texts))
    assert [choice["index"] for choice in unique] == firsts
    assert [choice["text"] for choice in unique] == [texts[first] for first in firsts]
    assert [choice["count"] for choice in unique] == [texts.count(texts[i]) for i in firsts]
    assert all(choice["logprobs"] for choice in unique)
    until = {"match": f"({VOWEL})", "count": 5}
    votes = complete(server, **SAMPLING, until=until, count_by="group", **{"return": "counts"})
    (samples,) = votes["samples"]
    full = complete(server, **SAMPLING)["choices"]
    drawn = enough_of(full, VOWEL, 5)
    found = [re.search(VOWEL, text) for text in drawn]
    assert {one["text"]: one["count"] for one in samples["counts"]} == Counter(
        one and one[0] for one in found
    )
    assert samples["drawn"] == len(drawn)


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 1}, {"stop": ["e"]}, {"return_packed": True, "logprobs": 0}, {"echo": True}],
)
def test_a_stream_has_whole_choices_only(server: Server, fields: dict[str, Any]) -> None:
    fields = {**SAMPLING, **fields}
    whole = complete(server, **fields)["choices"]
    usage = {"include_usage": True}
    *events, last = events_of(server, **WHOLE, **fields, stream_options=usage)
    told = [choice for event in events for choice in event["choices"]]
    assert sorted(told, key=lambda one: one["index"]) == whole
    assert last["usage"]["completion_tokens"] > 0 and len(events) <= 60


def test_a_stream_with_until_ends_with_what_was_drawn(server: Server) -> None:
    fields = {"until": {"match": VOWEL, "count": 9}, **SAMPLING}
    whole = complete(server, **fields)
    *events, last = events_of(server, **WHOLE, **fields)
    assert [choice for event in events for choice in event["choices"]] == whole["choices"]
    assert (last["choices"], last["samples"]) == ([], whole["samples"])


def test_chats_have_the_same(server: Server) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "the cat"}], "n": 60}
    chat |= {"max_completion_tokens": 6, "seed": 3}
    full = server.http.post(CHATS, json=chat).json()["choices"]
    texts = [{"text": choice["message"]["content"]} for choice in full]
    expected = enough_of(texts, VOWEL, 3)
    chat["until"] = {"match": VOWEL, "count": 3}
    reply = server.http.post(CHATS, json=chat).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == expected
    assert [choice["matched"] for choice in reply["choices"]].count(True) == 3
    *events, last = events_of(server, CHATS, **WHOLE, **chat)
    told = [choice for event in events for choice in event["choices"]]
    assert [choice["delta"]["content"] for choice in told] == expected
    assert all(one["delta"]["role"] == "assistant" and one["finish_reason"] for one in told)
    assert last["samples"] == reply["samples"]
    del chat["until"]
    counts = server.http.post(CHATS, json={**chat, "return": "counts"}).json()
    found = {one["text"]: one["count"] for one in counts["samples"][0]["counts"]}
    assert found == Counter(one["text"] for one in texts)


def test_the_sdk_reads_them(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        asked = {"model": "tiny", "prompt": "the cat", "n": 50, "max_tokens": 8, "seed": 5}
        until = {"until": {"match": VOWEL, "count": 2}}
        answer = client.completions.create(**asked, extra_body=until)  # type: ignore[call-overload]
        assert [choice.matched for choice in answer.choices].count(True) == 2
        assert answer.samples[0]["drawn"] == len(answer.choices)
        stream = client.completions.create(  # type: ignore[call-overload]
            **asked, stream=True, extra_body={"stream_whole": True}
        )
        told = {choice.index: choice.finish_reason for one in stream for choice in one.choices}
        assert sorted(told) == list(range(50))
        assert None not in told.values()


def test_no_pattern_holds_the_others_up(server: Server) -> None:
    """Searching on while others are answered: the event loop is free."""
    slow = {"until": {"match": "(.{1,30}){1,10}z"}, "n": 200, "max_tokens": 100, "prompt": [5]}
    thread = threading.Thread(target=complete, args=(server,), kwargs=slow)
    thread.start()
    answered = 0
    while thread.is_alive():
        complete(server, max_tokens=1)
        answered += 1
    assert answered > 2
