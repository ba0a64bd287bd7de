"""`until`, `return` and `stream_whole` over HTTP: slots are freed, and nothing else changes.

That the reply is right whatever samples end in whatever order, tests/property/test_until.py holds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

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


def enough_of(texts: list[str], count: int) -> list[str]:
    """Texts of the first choices, up to the one at which so many have a vowel."""
    ends = [end for end, text in enumerate(texts, 1) if re.search(VOWEL, text)]
    return texts[: ends[count - 1]]


def test_the_reply_depends_on_no_slots(server: Server, small_server: Server) -> None:
    prompts = {**SAMPLING, "prompt": ["the cat", "on the mat"], "stop": ["e", "tt"]}
    full = complete(server, **prompts)
    until = {"match": VOWEL, "count": 7}
    replies = [complete(one, until=until, **prompts) for one in (server, small_server)]
    texts = [choice["text"] for choice in full["choices"]]
    expected = [enough_of(texts[:N], 7), enough_of(texts[N:], 7)]
    for reply in replies:
        assert [choice["text"] for choice in reply["choices"]] == expected[0] + expected[1]
        for number, samples in enumerate(reply["samples"]):
            own = [one for one in reply["choices"] if one["index"] // N == number]
            assert [one["index"] % N for one in own] == list(range(len(expected[number])))
            assert (samples["requested"], samples["drawn"]) == (N, len(own))
            assert samples["matched"] == sum(one["matched"] for one in own) == 7
            assert samples["reached"] and len(own) < N
            assert samples["finished_by"] == Counter(one["finish_reason"] for one in own)
    (tokens,) = {reply["usage"]["completion_tokens"] for reply in replies}
    for reply in replies:
        assert reply["usage"]["discarded_tokens"] <= full["usage"]["completion_tokens"] - tokens
    server.wait_until_idle()
    small_server.wait_until_idle()


def test_those_that_are_not_needed_lose_their_slots_and_never_start(small_server: Server) -> None:
    before = small_server.metric("srm_engine_decode_tokens_total")
    endless = {"max_tokens": 60, "min_tokens": 50, "prompt": [5], "n": 1_000, "seed": 1}
    reply = complete(small_server, until={"match": "(?s).*", "count": 1}, **endless)
    small_server.wait_until_idle()
    assert [choice["index"] for choice in reply["choices"]] == [0]
    drawn = small_server.metric("srm_engine_decode_tokens_total") - before
    assert drawn <= 60 * 7 * 2  # of 1,000 x 50


def test_a_stream_that_nobody_reads_stops_its_samples_all_the_same(server: Server) -> None:
    stopped = server.metric("srm_engine_sequences_total", "stop")
    until = {"match": "(?s).*", "count": 150}
    # Far more than the connection holds.
    fields = {"prompt": [5] * 99, "prompt_logprobs": 20, "n": 900, "max_tokens": 8, **WHOLE}
    with closing(connect(server, ignore_eos=True, until=until, **fields)) as connection:
        wait_until(lambda: server.metric("srm_engine_sequences_total", "stop") > stopped)
        server.wait_until_idle()
        assert b'"samples":[{"requested":900,"drawn":150,' in read_all(connection)


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
    assert [(one["index"], one["text"], one["count"]) for one in unique] == [
        (first, texts[first], texts.count(texts[first])) for first in firsts
    ]
    assert all(choice["logprobs"] for choice in unique)


@pytest.mark.parametrize(
    "fields",
    [{"logprobs": 1, "stop": ["e"], "echo": True}, {"return_packed": True, "logprobs": 0},
     {"until": {"match": VOWEL, "count": 9}}],
)  # fmt: skip
def test_a_stream_has_whole_choices_only(server: Server, fields: dict[str, Any]) -> None:
    fields = {**SAMPLING, **fields}
    whole = complete(server, **fields)
    usage = {"include_usage": True}
    events = events_of(server, **WHOLE, **fields, stream_options=usage)
    told = [choice for event in events for choice in event["choices"]]
    assert sorted(told, key=lambda one: one["index"]) == whole["choices"]
    assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    samples = [event["samples"] for event in events if "samples" in event]
    assert samples == ([whole["samples"]] if "until" in fields else [])
    assert len(events) <= 60


def test_chats_have_the_same(server: Server) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "the cat"}], "n": 60}
    chat |= {"max_completion_tokens": 6, "seed": 3}
    full = server.http.post(CHATS, json=chat).json()["choices"]
    texts = [choice["message"]["content"] for choice in full]
    counts = server.http.post(CHATS, json={**chat, "return": "counts"}).json()
    found = {one["text"]: one["count"] for one in counts["samples"][0]["counts"]}
    assert found == Counter(texts)
    expected = enough_of(texts, 3)
    chat["until"] = {"match": VOWEL, "count": 3}
    reply = server.http.post(CHATS, json=chat).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == expected
    assert [choice["matched"] for choice in reply["choices"]].count(True) == 3
    *events, last = events_of(server, CHATS, **WHOLE, **chat)
    told = [choice for event in events for choice in event["choices"]]
    assert [choice["delta"]["content"] for choice in told] == expected
    assert all(one["delta"]["role"] == "assistant" and one["finish_reason"] for one in told)
    assert last["samples"] == reply["samples"]
