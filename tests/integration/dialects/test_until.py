"""`until` and `return` over HTTP: slots are freed, and nothing else changes.

That the reply is right whatever samples end in whatever order, tests/property/test_until.py holds.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tests.kit.serving import CHATS, Server, complete, connect, read_all, wait_until

N = 200
SAMPLING: dict[str, Any] = {"prompt": "the cat", "n": N, "max_tokens": 8, "seed": 5}
VOWEL = "[aeiou]"


def enough_of(texts: list[str], count: int) -> list[str]:
    """Texts of the first choices, up to the one at which so many have a vowel."""
    ends = [end for end, text in enumerate(texts, 1) if re.search(VOWEL, text)]
    return texts[: ends[count - 1]]


def test_the_reply_is_the_first_of_all_samples_up_to_enough(server: Server) -> None:
    prompts = {**SAMPLING, "prompt": ["the cat", "on the mat"], "stop": ["e", "tt"]}
    full = complete(server, **prompts)
    reply = complete(server, until={"match": VOWEL, "count": 7}, **prompts)
    texts = [choice["text"] for choice in full["choices"]]
    expected = [enough_of(texts[:N], 7), enough_of(texts[N:], 7)]
    assert [choice["text"] for choice in reply["choices"]] == expected[0] + expected[1]
    for number, samples in enumerate(reply["samples"]):
        own = [choice for choice in reply["choices"] if choice["index"] // N == number]
        assert [solution["index"] % N for solution in own] == list(range(len(expected[number])))
        assert (samples["requested"], samples["drawn"]) == (N, len(own))
        assert samples["matched"] == sum(solution["matched"] for solution in own) == 7
        assert samples["reached"] and len(own) < N
        assert samples["finished_by"] == Counter(solution["finish_reason"] for solution in own)
    left_out = full["usage"]["completion_tokens"] - reply["usage"]["completion_tokens"]
    assert reply["usage"]["discarded_tokens"] <= left_out
    server.wait_until_idle()


def test_those_that_are_not_needed_lose_their_slots_and_never_start(server: Server) -> None:
    before = server.metric("srm_engine_decode_tokens_total")
    endless = {"max_tokens": 60, "min_tokens": 50, "prompt": [5], "n": 1_000, "seed": 1}
    reply = complete(server, until={"match": "(?s).*", "count": 1}, **endless)
    server.wait_until_idle()
    assert [choice["index"] for choice in reply["choices"]] == [0]
    drawn = server.metric("srm_engine_decode_tokens_total") - before
    assert drawn <= 60 * 64 * 2  # of 1,000 x 50


def test_a_stream_that_nobody_reads_stops_its_samples_all_the_same(server: Server) -> None:
    stopped = server.metric("srm_engine_sequences_total", "stop")
    fields = {"prompt": [5] * 99, "prompt_logprobs": 20, "n": 900, "max_tokens": 8}
    fields |= {"ignore_eos": True, "stream_whole": True}  # far more than the connection holds
    with connect(server, until={"match": "(?s).*", "count": 150}, **fields) as connection:
        wait_until(lambda: server.metric("srm_engine_sequences_total", "stop") > stopped)
        server.wait_until_idle()
        assert b'"samples":[{"requested":900,"drawn":150,' in read_all(connection)


def test_counts_and_unique_are_of_all_that_was_drawn(server: Server) -> None:
    short = {**SAMPLING, "max_tokens": 1}
    texts = [choice["text"] for choice in complete(server, **short)["choices"]]
    counts = complete(server, **short, **{"return": "counts"})
    assert counts["choices"] == []
    (samples,) = counts["samples"]
    assert {count["text"]: count["count"] for count in samples["counts"]} == Counter(texts)
    assert samples["distinct"] == len(set(texts)) < N
    assert "matched" not in samples
    assert counts["usage"]["completion_tokens"] == N
    unique = complete(server, **short, logprobs=0, **{"return": "unique"})["choices"]
    firsts = sorted(texts.index(text) for text in set(texts))
    assert [(choice["index"], choice["text"], choice["count"]) for choice in unique] == [
        (first, texts[first], texts.count(texts[first])) for first in firsts
    ]
    assert all(choice["logprobs"] for choice in unique)


def test_chats_have_the_same(server: Server) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "the cat"}], "n": 60}
    chat |= {"max_completion_tokens": 6, "seed": 3}
    until = {"match": VOWEL, "count": 3}
    full, counts, enough = (
        server.http.post(CHATS, json={**chat, **own}).json()
        for own in ({}, {"return": "counts"}, {"until": until})
    )
    texts = [choice["message"]["content"] for choice in full["choices"]]
    entries = {count["text"]: count["count"] for count in counts["samples"][0]["counts"]}
    assert entries == Counter(texts)
    contents = [choice["message"]["content"] for choice in enough["choices"]]
    assert contents == enough_of(texts, 3)
    assert [choice["matched"] for choice in enough["choices"]].count(True) == 3
