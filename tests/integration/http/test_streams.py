"""Streams over HTTP: what adds up to the reply, in which events, and readers slow or many."""

from __future__ import annotations

import base64
import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.serving import (
    TEXT_MODEL,
    Server,
    children,
    choice_of,
    complete,
    connect,
    events_of,
    parts_of,
    read_all,
    wait_until,
)  # fmt: skip

SLOTS = 4_096


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"prompt": ["the cat", "sat on"], "n": 2, "logprobs": 0},
        {"logprobs": 0, "return_tokens_as_token_ids": True},
        {"stop": ["e", "at"], "n": 5, "logprobs": 3, "echo": True, "return_token_ids": True},
        {"n": 30, "stop_token_ids": list(range(60, 80)), "temperature": 2},
        {"prompt": ["the cat", "sat on"], "n": 20, "stop": ["e", "at", "xy"]},
        {"stop": ["e", "at"], "n": 5, "return_token_ids": True},
        {"echo": True, "n": 2},
        {"echo": True, "max_tokens": 0, "logprobs": 1},
        {"stop": ["e", "at"], "n": 5, "include_stop_str_in_output": True, "logprobs": 0},
        {"echo": True, "logprobs": 1, "skip_special_tokens": False, "n": 3},
        {"stream_interval": 7, "n": 3, "logprobs": 0, "return_token_ids": True},
        {"prompt": [[5, 6, 9], [5]], "n": 2, "echo": True, "logprobs": 2, "prompt_logprobs": 1},
    ],
)
def test_a_stream_adds_up_to_the_whole(server: Server, fields: dict[str, Any]) -> None:
    fields = {"seed": 7, "max_tokens": 30, **fields}
    whole = complete(server, **{k: v for k, v in fields.items() if k != "stream_interval"})
    events = events_of(server, stream_options={"include_usage": True}, **fields)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0
    assert whole["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0
    assert events[-1]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-1])
    assert len({event["id"] for event in events}) == 1
    for choice in whole["choices"]:
        first, *others = parts = parts_of(events, choice["index"])
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert {part["finish_reason"] for part in parts[:-1]} <= {None}
        for name in ("finish_reason", "stop_reason"):
            assert parts[-1][name] == choice[name]
        if "token_ids" in choice:
            assert list(chain(*(part["token_ids"] for part in parts))) == choice["token_ids"]
        for name in ("prompt_token_ids", "prompt_logprobs"):
            assert first.get(name) == choice.get(name)
            assert not any(name in part for part in others)
        for name in choice["logprobs"] or ():
            joined = list(chain(*(part["logprobs"][name] for part in parts)))
            assert joined == choice["logprobs"][name]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ["the cat", "sat on"], "n": 8},
        {"n": 16, "logprobs": 0, "return_token_ids": True},
        {"n": 16, "stop": ["e"]},
        {"n": 16, "stream_whole": True},
    ],
)
def test_an_event_of_a_request_of_few_choices_has_one(
    server: Server, fields: dict[str, Any]
) -> None:
    fields = {"max_tokens": 9, "ignore_eos": True, **fields}
    events = events_of(server, **fields)
    assert [len(event["choices"]) for event in events] == [1] * len(events)
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
        assert sum(sizes) == 30
        assert all(size >= interval for size in sizes[1:-1])
        assert len(sizes) <= 2 + 29 // interval
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 90


def test_random_bytes_read_the_same_streamed_and_whole(server: Server) -> None:
    """However they are cut, tests/unit/server/text/test_sample.py says."""
    fields = {
        **{"prompt": [[0, 5, 6], [0, 1, 226, 130]], "n": 9, "max_tokens": 40, "temperature": 100},
        **{"seed": 11, "stop": ["e", "at", "é", "<|"], "echo": True, "logprobs": 0},
        **{"skip_special_tokens": False, "include_stop_str_in_output": True, "ignore_eos": True},
    }
    events = events_of(server, **fields)
    choices = complete(server, **fields)["choices"]
    for choice in choices:
        mine = parts_of(events, choice["index"])
        assert "".join(part["text"] for part in mine) == choice["text"]
        offsets = [offset for part in mine for offset in part["logprobs"]["text_offset"]]
        assert offsets == choice["logprobs"]["text_offset"]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
    assert any("\ufffd" in choice["text"] for choice in choices)
    assert sum(len(event["choices"]) for event in events) > 5 * len(choices), "cut in many places"


def ints(packed: str) -> npt.NDArray[np.int32]:
    return np.frombuffer(base64.b64decode(packed), "<i4")


def floats(packed: str) -> npt.NDArray[np.float32]:
    return np.frombuffer(base64.b64decode(packed), "<f4")


def named(ids: Any, logprobs: Any) -> dict[str, float]:
    return {f"token_id:{i}": float(p) for i, p in zip(ids, logprobs, strict=True)}


PACKED: list[dict[str, Any]] = [
    {},
    {"logprobs": 0, "n": 3},
    {"logprobs": 3, "n": 2, "prompt_logprobs": 2},
    {"logprobs": 1, "n": 2, "best_of": 4},
    {"max_tokens": 0, "prompt_logprobs": 1},
]


@pytest.mark.parametrize("fields", PACKED)
def test_a_packed_reply_says_what_the_other_says(server: Server, fields: dict[str, Any]) -> None:
    fields = {"prompt": ["the cat", "sat on"], "max_tokens": 9, "seed": 6, **fields}
    fields |= {"return_token_ids": True}
    plain = complete(server, return_tokens_as_token_ids=True, **fields)
    found = complete(server, return_packed=True, **fields)
    for name in ("prompt_tokens", "completion_tokens"):
        assert found["usage"][name] == plain["usage"][name]
    for one, other in zip(found["choices"], plain["choices"], strict=True):
        assert (one["text"], one["logprobs"]) == ("", None)
        assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & set(one)
        for name in ("index", "finish_reason", "stop_reason"):
            assert one[name] == other[name]
        packed, prompt = one["packed"], one["packed_prompt"]
        assert ints(packed["token_ids"]).tolist() == other["token_ids"]
        assert ints(prompt["token_ids"]).tolist() == other["prompt_token_ids"]
        k = fields.get("logprobs")
        assert ("logprobs" in packed, "top_token_ids" in packed) == (k is not None, bool(k))
        if k is not None:
            assert floats(packed["logprobs"]).tolist() == other["logprobs"]["token_logprobs"]
        if k:
            ids = ints(packed["top_token_ids"]).reshape(-1, k)
            tops = floats(packed["top_logprobs"]).reshape(-1, k)
            for row, expected in enumerate(other["logprobs"]["top_logprobs"]):
                assert named(ids[row], tops[row]).items() <= expected.items()
        assert ("logprobs" in prompt) == ("prompt_logprobs" in fields)
        if "logprobs" in prompt:
            rows = zip(
                ints(prompt["token_ids"]), floats(prompt["logprobs"]), ints(prompt["ranks"]),
                other["prompt_logprobs"], strict=True,
            )  # fmt: skip
            (_, logprob, rank, entry), *rest = rows
            assert np.isnan(logprob) and rank == 0 and entry is None
            for token, logprob, rank, entry in rest:
                expected = entry[str(token)]
                assert (float(logprob), rank) == (expected["logprob"], expected["rank"])


@pytest.mark.parametrize("fields", PACKED[:3])
def test_packed_events_add_up(server: Server, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 20, "seed": 6, "return_packed": True, **fields}
    events = events_of(server, **fields)
    for choice in complete(server, **fields)["choices"]:
        parts = parts_of(events, choice["index"])
        for name, value in choice["packed"].items():
            joined = b"".join(base64.b64decode(part["packed"][name]) for part in parts)
            assert joined == base64.b64decode(value)
        assert parts[0].get("packed_prompt") == choice.get("packed_prompt")
        assert not any("packed_prompt" in part for part in parts[1:])
        assert parts[-1]["finish_reason"] == choice["finish_reason"]


def test_the_token_that_ends_a_packed_reply_is_in_it(server: Server) -> None:
    choice = choice_of(server, prompt=[154] * 4, temperature=0, return_packed=True)
    assert choice["finish_reason"] == "stop"
    assert ints(choice["packed"]["token_ids"]).tolist() == [TEXT_MODEL.eos_token_id]


def api_memory(server: Server) -> int:
    """Bytes resident in the API process."""
    statm = Path(f"/proc/{children(server)['api']}/statm").read_text()
    return int(statm.split()[1]) * 4_096


def test_a_slow_reader_holds_its_tokens_and_nobody_up(text_model: Path) -> None:
    """The engine has every result at once."""
    slots, n, max_tokens = 4_096, 4_000, 120
    flags = (f"--num-slots={slots}", f"--max-step-rows={slots}", "--max-step-tokens=9000")
    fields = {"prompt": [5], "ignore_eos": True, "stream_options": {"include_usage": True}}
    with Server(text_model, *flags, engine_module="bench.host.instant") as server:
        complete(server, prompt=[5], n=n, max_tokens=3, ignore_eos=True)
        before = api_memory(server)
        all_tokens = server.metric("srm_engine_decode_tokens_total") + n * max_tokens
        slow = connect(server, n=n, max_tokens=max_tokens, **fields)
        wait_until(lambda: server.metric("srm_engine_decode_tokens_total") >= all_tokens)
        wait_until(lambda: server.metric("srm_engine_free_slots") == slots)  # read or not
        for _ in range(3):
            reply = complete(server, prompt=[7], max_tokens=5, ignore_eos=True)
            assert reply["usage"]["completion_tokens"] == 5
        # As events of a token each, of 80 bytes and more, they would be 40 MB and more.
        assert api_memory(server) - before < 16e6
        received = read_all(slow)
    assert received.count(b'"finish_reason":"length"') == n
    assert b'"completion_tokens":%d' % (n * max_tokens) in received
    assert received.rstrip().endswith(b"data: [DONE]\n\n\r\n0")


def test_a_sample_that_hits_a_stop_string_frees_its_slot(server: Server) -> None:
    """Though nobody reads the stream, and its siblings go on."""
    server.wait_until_idle()
    names = ("requests_total", "finished"), ("sequences_total", "stop")
    fields = {"prompt": [5], "ignore_eos": True, "n": 30, "max_tokens": 60, "seed": 3}
    fields |= {"temperature": 1.5}
    texts = [choice["text"] for choice in complete(server, **fields)["choices"]]
    pairs = {text[i : i + 2] for text in texts for i in range(len(text) - 1)}
    counts = {pair: sum(pair in text for text in texts) for pair in pairs if pair.isascii()}
    stop = next(pair for pair, count in sorted(counts.items()) if 2 < count < 25)
    before = [server.metric(f"srm_engine_{name}", label) for name, label in names]
    decoded = server.metric("srm_engine_decode_tokens_total")
    slow = connect(server, stop=[stop], **fields)
    wait_until(lambda: server.metric("srm_engine_requests_total", "finished") > before[0])
    after = [server.metric(f"srm_engine_{name}", label) for name, label in names]
    finished, stopped = (a - b for a, b in zip(after, before, strict=True))
    assert finished == 1
    assert 0 < stopped <= counts[stop]  # some may have got to their last token first
    assert server.metric("srm_engine_decode_tokens_total") - decoded < 30 * 60
    assert read_all(slow).count(b'"stop_reason":%b' % json.dumps(stop).encode()) == counts[stop]
