"""Streams over HTTP: what adds up to the reply, in which events, and readers slow or many."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.kit.processes.held_engine import held
from tests.kit.serving import (
    CHATS,
    COMPLETIONS,
    EOS_PROMPT,
    SERVER_FLAGS,
    Server,
    children,
    complete,
    connect,
    events_of,
    joined,
    parts_of,
    read_all,
    unpacked,
    wait_until,
)  # fmt: skip

USER = {"role": "user", "content": "sat on the mat"}
TWO: dict[str, Any] = {"prompt": ["the cat", "sat on"], "n": 2}
STOPS: dict[str, Any] = {"stop": ["e", "at"], "n": 5}
EDITS = {"bad_words": ["a", "th"], "repetition_penalty": 1.5, "frequency_penalty": 0.5}
RANDOM_BYTES: dict[str, Any] = {
    **{"prompt": [[0, 5, 6], [0, 1, 226, 130]], "n": 9, "max_tokens": 40, "temperature": 100},
    **{"stop": ["e", "at", "é", "<|"], "echo": True, "logprobs": 0, "ignore_eos": True},
    **{"skip_special_tokens": False, "include_stop_str_in_output": True},
}
"""However they are cut, tests/unit/server/text/test_stream.py says."""
WHOLE: dict[str, Any] = {"stream_whole": True, "n": 200, "max_tokens": 8}
UNTIL: dict[str, Any] = {"until": {"match": "[aeiou]", "count": 9}}
SCORED: dict[str, Any] = {"verify": {"sum": [{"match": "[aeiou]", "weight": 0.5}, {"match": "t"}]}}
CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {}),
    (COMPLETIONS, {**TWO, "logprobs": 0}),
    (COMPLETIONS, {"logprobs": 0, "return_tokens_as_token_ids": True}),
    (COMPLETIONS, {**STOPS, "logprobs": 3, "echo": True, "return_token_ids": True}),
    (COMPLETIONS, {"n": 30, "stop_token_ids": list(range(60, 80)), "temperature": 2}),
    (COMPLETIONS, {**TWO, "n": 20, "stop": ["e", "at", "xy"]}),
    (COMPLETIONS, {**STOPS, "return_token_ids": True}),
    (COMPLETIONS, {"echo": True, "n": 2}),
    (COMPLETIONS, {"echo": True, "max_tokens": 0, "logprobs": 1}),
    (COMPLETIONS, {**STOPS, "include_stop_str_in_output": True, "logprobs": 0}),
    (COMPLETIONS, {"echo": True, "logprobs": 1, "skip_special_tokens": False, "n": 3}),
    (COMPLETIONS, {"stream_interval": 7, "n": 3, "logprobs": 0, "return_token_ids": True}),
    (COMPLETIONS, {**TWO, "echo": True, "logprobs": 2, "prompt_logprobs": 1}),
    (COMPLETIONS, {**EDITS, "n": 5, "return_token_ids": True}),
    (COMPLETIONS, RANDOM_BYTES),
    (COMPLETIONS, {"prompt": [0, 1, 226], "max_tokens": 60, "temperature": 100}),
    (CHATS, {"max_tokens": 60, "temperature": 100, "seed": 3}),
    (COMPLETIONS, {"return_packed": True}),
    (COMPLETIONS, {"return_packed": True, "logprobs": 0, "n": 3}),
    (COMPLETIONS, {"return_packed": True, "logprobs": 3, "n": 2, "prompt_logprobs": 2}),
    (COMPLETIONS, {**WHOLE, "logprobs": 1, "stop": ["e"], "echo": True}),
    (COMPLETIONS, {**WHOLE, "return_packed": True, "logprobs": 0}),
    (COMPLETIONS, {**WHOLE, **UNTIL}),
    (COMPLETIONS, {**WHOLE, **SCORED, "until": {"score": 1.5, "count": 5}}),
    (COMPLETIONS, {**WHOLE, **SCORED, "return_packed": True, "logprobs": 1, "stop": ["e"]}),
    (CHATS, {"n": 4, "return_token_ids": True}),
    (CHATS, {"n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHATS, {**STOPS, "logprobs": True, "return_token_ids": True}),
    (CHATS, {"max_tokens": 1}),
    (CHATS, {"n": 2, "max_tokens": 1, "prompt_logprobs": 2}),
    (CHATS, {**WHOLE, **UNTIL}),
    (CHATS, {**WHOLE, **SCORED}),
]
OF_STREAMS = {"stream_interval", "stream_whole"}
OF_THE_PROMPT = ("prompt_token_ids", "prompt_logprobs")


@pytest.mark.parametrize(("path", "fields"), CASES)
def test_a_stream_adds_up_to_the_whole(server: Server, path: str, fields: dict[str, Any]) -> None:
    fields = {"seed": 7, "max_tokens": 30, **fields}
    prompt = {"prompt": "the cat"} if path == COMPLETIONS else {"messages": [USER]}
    body = {name: value for name, value in fields.items() if name not in OF_STREAMS}
    reply = server.http.post(path, json={**prompt, **body})
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    *events, last = events_of(
        server, path, **{**prompt, **fields}, stream_options={"include_usage": True}
    )
    assert last["choices"] == []
    samples = [event["samples"] for event in (*events, last) if "samples" in event]
    assert samples == ([whole["samples"]] if {"until", "verify"} & fields.keys() else [])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    assert all(event["usage"] is None for event in events if event["choices"])
    assert len({event["id"] for event in (*events, last)}) == 1
    for name in OF_THE_PROMPT:  # of chats; completions have it in their choices
        assert events[0].get(name) == whole.get(name)
        assert not any(name in event for event in events[1:])
    for choice in whole["choices"]:
        parts = parts_of(events, choice["index"])
        if path == CHATS:
            del choice["message"]["refusal"]
            choice["delta"] = choice.pop("message")
        for name in ("token_ids", *OF_THE_PROMPT):  # events leave out what is not asked for
            if choice.get(name, parts) is None:
                del choice[name]
        assert joined(parts) == unpacked(choice)
        assert len(parts) == 1 or "stream_whole" not in fields
    assert len(events) <= 60 or "stream_whole" not in fields


@pytest.mark.parametrize(
    "fields",
    [
        {**TWO, "n": 8},
        {"n": 16, "logprobs": 0, "return_token_ids": True},
        {"n": 16, "stop": ["e"]},
        {"n": 16, "stream_whole": True},
    ],
)
def test_events_of_few_choices_have_one_each(server: Server, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 9, "ignore_eos": True, **fields}
    events = events_of(server, **fields)
    assert [len(event["choices"]) for event in events] == [1] * len(events)
    assert not any("usage" in event for event in events), "it is not asked for"
    assert {event["choices"][0]["index"] for event in events} == set(range(16))
    more = events_of(server, **{**fields, "n": 17})
    assert max(len(event["choices"]) for event in more) > 1


@pytest.mark.parametrize("interval", [1, 4, 1_000])
def test_a_stream_interval_makes_fewer_and_larger_events(server: Server, interval: int) -> None:
    fields = {"n": 3, "max_tokens": 30, "ignore_eos": True, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(server, stream_interval=interval, stream_options=options, **fields)
    for index in range(3):
        sizes = [len(part["token_ids"]) for part in parts_of(events, index)]
        assert sum(sizes) == 30 and len(sizes) <= 2 + 29 // interval
        assert all(size >= interval for size in sizes[1:-1])
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 90


def array(packed: str) -> npt.NDArray[np.int32]:
    return np.frombuffer(base64.b64decode(packed), "<i4")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"logprobs": 0, "n": 3},
        {"logprobs": 3, "n": 2, "prompt_logprobs": 2},
        {"logprobs": 1, "n": 2, "best_of": 4},
        {"max_tokens": 0, "prompt_logprobs": 1},
        {"prompt": EOS_PROMPT, "temperature": 0},  # which ends at once
    ],
)
def test_a_packed_reply_says_what_the_other_says(server: Server, fields: dict[str, Any]) -> None:
    fields = {**TWO, "n": 1, "max_tokens": 9, "seed": 6, "return_token_ids": True, **fields}
    plain = complete(server, return_tokens_as_token_ids=True, **fields)
    result = complete(server, return_packed=True, **fields)
    for name in ("prompt_tokens", "completion_tokens"):
        assert result["usage"][name] == plain["usage"][name]
    for choice, other in zip(result["choices"], plain["choices"], strict=True):
        assert (choice["text"], choice["logprobs"]) == ("", None)
        assert not {"token_ids", *OF_THE_PROMPT} & set(choice)
        for name in ("index", "finish_reason", "stop_reason"):
            assert choice[name] == other[name]
        packed = {name: array(value) for name, value in choice["packed"].items()}
        prompt = {name: array(value) for name, value in choice["packed_prompt"].items()}
        assert packed["token_ids"].tolist() == other["token_ids"]
        assert prompt["token_ids"].tolist() == other["prompt_token_ids"]
        k = fields.get("logprobs")
        assert ("logprobs" in packed, "top_token_ids" in packed) == (k is not None, bool(k))
        if k is not None:
            logprobs = packed["logprobs"].view("<f4").tolist()
            assert logprobs == other["logprobs"]["token_logprobs"]
        if k:
            names = [f"token_id:{token}" for token in packed["top_token_ids"]]
            pairs = list(zip(names, packed["top_logprobs"].view("<f4").tolist(), strict=True))
            for row, expected in enumerate(other["logprobs"]["top_logprobs"]):
                assert dict(pairs[row * k : (row + 1) * k]).items() <= expected.items()
        assert ("logprobs" in prompt) == ("prompt_logprobs" in fields)
        if "logprobs" in prompt:
            logprobs, ranks = prompt["logprobs"].view("<f4").tolist(), prompt["ranks"].tolist()
            assert np.isnan(logprobs[0]) and ranks[0] == 0
            entries = zip(other["prompt_token_ids"], other["prompt_logprobs"], strict=True)
            expected = [entry[str(token)] for token, entry in list(entries)[1:]]
            assert logprobs[1:] == [entry["logprob"] for entry in expected]
            assert ranks[1:] == [entry["rank"] for entry in expected]


def test_a_slow_reader_holds_its_tokens_and_nobody_up(text_model: Path) -> None:
    slots, n, max_tokens = 4_096, 4_000, 120
    flags = (f"--num-slots={slots}", f"--max-step-rows={slots}", "--max-step-tokens=9000")
    fields = {"prompt": [5], "ignore_eos": True, "stream_options": {"include_usage": True}}
    with Server(text_model, *flags, engine_module="research.bench.host.instant") as server:

        def memory() -> int:
            """Bytes resident in the API process."""
            statm = Path(f"/proc/{children(server)['api']}/statm").read_text()
            return int(statm.split()[1]) * 4_096

        complete(server, prompt=[5], n=n, max_tokens=3, ignore_eos=True)
        before = memory()
        all_tokens = server.metric("srm_engine_decode_tokens_total") + n * max_tokens
        slow = connect(server, n=n, max_tokens=max_tokens, **fields)
        wait_until(lambda: server.metric("srm_engine_decode_tokens_total") >= all_tokens)
        wait_until(lambda: server.metric("srm_engine_free_slots") == slots)  # read or not
        for _ in range(3):
            reply = complete(server, prompt=[7], max_tokens=5, ignore_eos=True)
            assert reply["usage"]["completion_tokens"] == 5
        # As events of a token each, of 80 bytes and more, they would be 40 MB and more.
        assert memory() - before < 16e6
        received = read_all(slow)
    assert received.count(b'"finish_reason":"length"') == n
    assert b'"completion_tokens":%d' % (n * max_tokens) in received
    assert received.rstrip().endswith(b"data: [DONE]\n\n\r\n0")


def test_a_sample_that_hits_a_stop_string_frees_its_slot(text_model: Path) -> None:
    """Though its siblings go on, and nobody reads the stream."""
    fields = {"prompt": [5], "ignore_eos": True, "n": 30, "max_tokens": 60, "seed": 3}
    fields |= {"temperature": 1.5}
    with Server(
        text_model, *SERVER_FLAGS, engine_module="tests.kit.processes.held_engine"
    ) as server:
        texts = [choice["text"] for choice in complete(server, **fields)["choices"]]
        # A token of this model is at most a byte, so that these come within half of the tokens.
        early = {text[i : i + 2] for text in texts for i in range(20)}
        counts = {pair: sum(pair in text for text in texts) for pair in early if pair.isascii()}
        stop = next(pair for pair, count in sorted(counts.items()) if 2 < count < 25)

        early_stops = sum(stop in text[:20] for text in texts)
        assert early_stops
        for is_stream in (False, True):
            with held(text_model, steps=32):  # none gets to its last token
                unread = connect(server, **fields, stop=[stop], stream=is_stream)
                wait_until(
                    lambda: 0 < server.metric("srm_engine_running_sequences") <= 30 - early_stops
                )
            with unread:
                reason = b'"stop_reason":%b' % json.dumps(stop).encode()
                assert read_all(unread).count(reason) == counts[stop]
            server.wait_until_idle(60)
